"""What the plans of the last steps did to the ranks' loads."""

from __future__ import annotations

from typing import Any

import torch

from lrmoe.balance.plan import Plan, home_ranks
from lrmoe.evenness import max_over_mean


class BalanceMeter:
    """Running totals over plans, one for each layer and microbatch trained on. All ranks have the same."""

    def __init__(self) -> None:
        self._plans = 0
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, plan: Plan) -> None:
        """Counts a plan."""
        num_ranks, num_experts = plan.lam_GE.shape
        homes = torch.tensor(home_ranks(num_experts, num_ranks), device="cpu")
        home_G = torch.zeros(num_ranks, dtype=torch.int64, device="cpu").index_add_(0, homes, plan.lam_GE.sum(0))
        quota_home_G = torch.zeros(num_ranks, dtype=torch.int64, device="cpu").index_add_(
            0, homes, plan.quota_EG.sum(1)
        )
        self._plans += 1
        for name, value in (
            ("home_max_over_mean", max_over_mean(home_G.tolist())),
            ("forward_max_over_mean", max_over_mean(plan.rows_EG.sum(0).tolist())),
            ("home_kept_max_over_mean", max_over_mean(quota_home_G.tolist())),
            ("backward_max_over_mean", max_over_mean(plan.quota_EG.sum(0).tolist())),
            ("replicas", plan.num_replicas),
            ("moved_rows", plan.moved_rows),
            ("rows", int(home_G.sum())),
            ("kept_rows", int(plan.quota_EG.sum())),
            ("extra_dropped", plan.extra_dropped),
        ):
            if value is not None:
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._counts[name] = self._counts.get(name, 0) + 1

    def read(self) -> dict[str, Any]:
        """Means over plans, empty before the first: ``home_max_over_mean`` of the ranks' rows had every expert been
        computed at home, ``forward_max_over_mean`` as planned; ``home_kept_max_over_mean`` and
        ``backward_max_over_mean`` the same of the rows the backward keeps; ``replicas``; ``moved_rows``, which replicas
        computed; ``rows``, ``kept_rows``, ``extra_dropped`` (beyond the drop asked for, to fit a capacity). And
        ``plans``, their number. A plan without rows is in no ratio; where no plan had any, there is none."""
        return {"plans": self._plans, **{name: total / self._counts[name] for name, total in self._sums.items()}}
