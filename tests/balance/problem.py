"""Loads that the tests of several policies share."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from lrmoe.balance import Plan

# Four ranks with two experts each: home loads 500, 200, 100, 200.
M1 = [400, 100, 100, 100, 50, 50, 100, 100]

LOADS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 300)), min_size=1, max_size=12)


def loads(values: list[int], ranks: int = 4) -> torch.Tensor:
    """(ranks, E) with the given loads, shared out over the sources as evenly as it goes."""
    return torch.tensor([[(value + s) // ranks for value in values] for s in range(ranks)])


def scattered(values: list[int], ranks: int, random: Any) -> torch.Tensor:
    """(ranks, E) with the given loads, each expert's from two sources drawn at random."""
    lam_GE = torch.zeros(ranks, len(values), dtype=torch.int64)
    for expert, rows in enumerate(values):
        lam_GE[random.randrange(ranks), expert] += rows // 2
        lam_GE[random.randrange(ranks), expert] += rows - rows // 2
    return lam_GE


def exports_of(plan: Plan) -> list[tuple[int, int, int]]:
    """(expert, rank, kept rows) of each replica, in planned order of each expert."""
    return [(e, r, int(plan.quota_EG[e, r])) for e, ranks in enumerate(plan.hosts) for r in ranks[1:]]
