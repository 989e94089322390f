"""What the plans of the last steps did to the ranks' loads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrmoe.balance.plan import Plan, home_ranks


class BalanceMeter:
    """Running totals over plans, one for each layer and microbatch trained on. All ranks have the same."""

    def __init__(self) -> None:
        self._plans = 0
        self._sums: dict[str, float] = {}

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
            ("home_max_over_mean", _max_over_mean(home_G)),
            ("forward_max_over_mean", _max_over_mean(plan.rows_EG.sum(0))),
            ("home_kept_max_over_mean", _max_over_mean(quota_home_G)),
            ("backward_max_over_mean", _max_over_mean(plan.quota_EG.sum(0))),
            ("replicas", plan.num_replicas),
            ("moved_rows", plan.moved_rows),
            ("rows", int(home_G.sum())),
            ("kept_rows", int(plan.quota_EG.sum())),
            ("extra_dropped", plan.extra_dropped),
        ):
            self._sums[name] = self._sums.get(name, 0.0) + value

    def read(self) -> dict[str, Any]:
        """Means over plans, empty before the first: ``home_max_over_mean`` of the ranks' rows had every expert been
        computed at home, ``forward_max_over_mean`` as planned; ``home_kept_max_over_mean`` and
        ``backward_max_over_mean`` the same of the rows the backward keeps; ``replicas``; ``moved_rows``, which replicas
        computed; ``rows``, ``kept_rows``, ``extra_dropped`` (beyond the drop asked for, to fit a capacity). And
        ``plans``, their number."""
        return {"plans": self._plans, **{name: total / self._plans for name, total in self._sums.items()}}


def _max_over_mean(rows_G: Tensor) -> float:
    total = int(rows_G.sum())
    return int(rows_G.max()) * rows_G.numel() / total if total else 1.0
