"""Plans as no planner makes them, and which instance of its expert computes each pair, worked out pair by pair.

E experts, G ranks, T tokens, K choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from experts.problem import Problem, live_pairs
from torch import Tensor

from lrmoe.balance.plan import Plan, home_ranks
from lrmoe.balance.policy import ExactPolicy, planned_quotas, require_loads
from lrmoe.config import Quota


class RandomPlans(ExactPolicy):
    """Replicas of any expert anywhere, rows and quotas dealt out at random: instances without rows, replicas that keep
    nothing, homes that compute nothing, all slots of a rank on one expert's neighbour or none.

    A plan is a function of the seed, the loads and how often it was asked for (``calls``); with ``repeats`` it is not
    of the last.
    """

    name = "random"

    def __init__(self, seed: int, *, slots: int = 2, repeats: bool = False) -> None:
        self.seed, self.slots, self.repeats = seed, slots, repeats
        self.calls = 0
        self.observed: list[int] = []

    def observe(self, lam_GE: Tensor, *, layer: int) -> None:
        self.observed.append(layer)

    def plan(self, lam_GE: Tensor, *, drop: float = 0.0, quota: Quota = "expert", layer: int = 0) -> Plan:
        lam_GE = require_loads(lam_GE)
        self.calls += 1
        generator = torch.Generator().manual_seed(1000 * self.seed + (0 if self.repeats else self.calls))
        quota_E = planned_quotas(lam_GE, drop, quota).tolist()
        num_ranks, num_experts = lam_GE.shape
        free = [self.slots] * num_ranks
        hosts = [(home,) for home in home_ranks(num_experts, num_ranks)]
        rows_EG = torch.zeros(num_experts, num_ranks, dtype=torch.int64)
        quota_EG = torch.zeros_like(rows_EG)
        for expert in torch.randperm(num_experts, generator=generator).tolist():
            for rank in torch.randperm(num_ranks, generator=generator).tolist():
                if rank not in hosts[expert] and free[rank] and _coin(generator):
                    hosts[expert] = (*hosts[expert], rank)
                    free[rank] -= 1
            instances = list(hosts[expert])
            rows = _deal(int(lam_GE[:, expert].sum()), [10**9] * len(instances), generator)
            rows_EG[expert, instances] = torch.tensor(rows)
            quota_EG[expert, instances] = torch.tensor(_deal(quota_E[expert], rows, generator))
        return Plan(tuple(hosts), rows_EG, quota_EG, lam_GE)


def _coin(generator: torch.Generator) -> bool:
    return bool(torch.rand((), generator=generator) < 0.6)


def _deal(total: int, room: Sequence[int], generator: torch.Generator) -> list[int]:
    """``total`` over places with so much room each; some of them often get nothing."""
    parts = [0] * len(room)
    order = torch.randperm(len(room), generator=generator).tolist()
    for turn, place in enumerate(order):
        later = sum(room[other] for other in order[turn + 1 :])
        least, most = max(0, total - later), min(room[place], total)
        share = least if not _coin(generator) else int(torch.randint(least, most + 1, (), generator=generator))
        parts[place] = share
        total -= share
    assert total == 0
    return parts


def loads(problem: Problem, shares: Sequence[int]) -> Tensor:
    """(G, E): real pairs of each rank for each expert."""
    live_TK = live_pairs(problem)
    rows = zip(problem.ids_TK.split(list(shares)), live_TK.split(list(shares)), strict=True)
    return torch.stack([torch.bincount(ids[live], minlength=problem.num_experts) for ids, live in rows])


def instance_of_pairs(problem: Problem, shares: Sequence[int], plan: Plan) -> Tensor:
    """(T, K): the rank that computes each pair, -1 for what has no expert.

    By the definition: the k-th real pair of a source goes to the first rank, in ascending order, at which the rows
    that the source sends to the ranks up to there exceed k. Masked pairs go home.
    """
    rank_TK = torch.full_like(problem.ids_TK, -1)
    alloc_GEG = plan.alloc
    live_TK = live_pairs(problem)
    start = 0
    for source, share in enumerate(shares):
        seen = [0] * problem.num_experts
        for t in range(start, start + share):
            for k, expert in enumerate(problem.ids_TK[t].tolist()):
                if expert < 0:
                    continue
                if not live_TK[t, k]:
                    rank_TK[t, k] = plan.hosts[expert][0]
                    continue
                ends = alloc_GEG[source, expert].cumsum(0).tolist()
                rank_TK[t, k] = next(rank for rank, end in enumerate(ends) if end > seen[expert])
                seen[expert] += 1
        start += share
    return rank_TK


def policies(**more: Any) -> dict[str, Any]:
    """One of each kind, made so that they replicate on loads of a few dozen pairs."""
    from lrmoe.balance import get

    return {
        "fixed": get("fixed"),
        "ultraep": get("ultraep", slots=1, floor=1),
        "ultraep, two slots": get("ultraep", slots=2, floor=1, fast_path=False),
        "lrmoe": get("lrmoe", slots=1),
        "lrmoe, two slots": get("lrmoe", slots=2, target=1.0, threshold=1.0, **more),
        "random": RandomPlans(1, repeats=True),
        "random, other": RandomPlans(2, slots=3, repeats=True),
    }


class GivenPlans(ExactPolicy):
    """Plans written down beforehand, one a call: of each expert that has replicas, (rank, rows, kept) of each of these;
    what is left of its rows and quota stays at home. After the last one the first comes again. ``without_quota``:
    experts that keep nothing."""

    name = "given"

    def __init__(
        self, *plans: dict[int, list[tuple[int, int, int]]], slots: int = 2, without_quota: Sequence[int] = ()
    ) -> None:
        self.plans, self.slots, self.without_quota = plans, slots, without_quota
        self.calls = 0

    def plan(self, lam_GE: Tensor, *, drop: float = 0.0, quota: Quota = "expert", layer: int = 0) -> Plan:
        lam_GE = require_loads(lam_GE)
        num_ranks, num_experts = lam_GE.shape
        homes = home_ranks(num_experts, num_ranks)
        given = self.plans[self.calls % len(self.plans)]
        self.calls += 1
        hosts = [(home, *(rank for rank, _, _ in given.get(e, ()))) for e, home in enumerate(homes)]
        rows_EG = torch.zeros(num_experts, num_ranks, dtype=torch.int64)
        quota_EG = torch.zeros_like(rows_EG)
        quota_E = planned_quotas(lam_GE, drop, quota)
        quota_E[list(self.without_quota)] = 0
        for expert, home in enumerate(homes):
            for rank, rows, kept in given.get(expert, ()):
                rows_EG[expert, rank], quota_EG[expert, rank] = rows, kept
            rows_EG[expert, home] = lam_GE[:, expert].sum() - rows_EG[expert].sum()
            quota_EG[expert, home] = quota_E[expert] - quota_EG[expert].sum()
        return Plan(tuple(hosts), rows_EG, quota_EG, lam_GE)
