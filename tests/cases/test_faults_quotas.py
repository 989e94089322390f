"""Quotas that leave an expert, or all of them, nothing. E experts, G ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.balance.plan import home_ranks
from lrmoe.balance.quotas import rank_quotas, split_quotas
from lrmoe.recalibration.quota import quotas

LOADS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=10)
DROPS = st.one_of(st.sampled_from([0.2, 0.5, 0.76, 0.95, 0.9999]), st.floats(0.01, 0.9999))
KINDS: Any = ["expert", "level", "pooled"]


def one_by_one(loads: list[int], floors: list[int], target: int) -> list[int]:
    """Takes one after the other of the largest that is above its floor, until the target is reached."""
    kept = list(loads)
    while sum(kept) > max(target, sum(floors)):
        able = [i for i, (rows, floor) in enumerate(zip(kept, floors, strict=True)) if rows > floor]
        kept[max(able, key=lambda i: (kept[i], -loads[i], i))] -= 1
    return kept


@pytest.mark.parametrize("kind", KINDS)
def test_s6_one_token_and_a_large_drop_have_gradients(kind: Any) -> None:
    """T = 1, K = 2, drop 0.76: 0.48 pairs to keep. Both experts keep theirs."""
    x, up, down = torch.randn(1, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    leaves = [tensor.requires_grad_() for tensor in (x, up, down)]
    ids_TK, alpha_TK = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
    config = LRMoEConfig(drop=0.76, quota=kind)
    lrmoe.routed_experts(leaves[0], ids_TK, alpha_TK, *leaves[1:], config=config).sum().backward()
    assert all(bool((leaf.grad != 0).any()) for leaf in leaves)
    assert down.grad is not None
    assert (down.grad.flatten(1) != 0).any(1).tolist() == [True, True]


@settings(max_examples=150, deadline=None)
@given(loads=LOADS, drop=DROPS, kind=st.sampled_from(KINDS))
@example(loads=[1, 1], drop=0.76, kind="level")
def test_s6_every_expert_with_load_keeps_a_pair(loads: list[int], drop: float, kind: Any) -> None:
    quota = quotas(kind, torch.tensor(loads), drop).tolist()
    assert all((q >= 1) == (load > 0) and q <= load for q, load in zip(quota, loads, strict=True))
    assert sum(quota) == max(math.floor((1.0 - drop) * sum(loads) + 0.5), sum(load > 0 for load in loads))


@settings(max_examples=150, deadline=None)
@given(loads=LOADS, ranks=st.integers(1, 5), drop=DROPS, kind=st.sampled_from(KINDS))
@example(loads=[20, 1, 1, 1], ranks=2, drop=0.95, kind="level")
def test_s6_so_does_each_on_every_rank(loads: list[int], ranks: int, drop: float, kind: Any) -> None:
    homes = home_ranks(len(loads), min(ranks, len(loads)))
    quota = rank_quotas(kind, torch.tensor(loads), homes, drop).tolist()
    assert all((q >= 1) == (load > 0) and q <= load for q, load in zip(quota, loads, strict=True))
    target = math.floor((1.0 - drop) * sum(loads) + 0.5)
    assert sum(quota) == max(target, sum(load > 0 for load in loads))
    if kind == "level" and max(homes) > 0:
        every = range(max(homes) + 1)
        of_rank = [[e for e, home in enumerate(homes) if home == rank] for rank in every]
        kept = [sum(quota[e] for e in experts) for experts in of_rank]
        floors = [sum(loads[e] > 0 for e in experts) for experts in of_rank]
        wanted = one_by_one([sum(loads[e] for e in experts) for experts in of_rank], floors, target)
        # Which of equally high ranks gets what a whole cap leaves over is another test's.
        assert sorted(kept) == sorted(wanted)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.one_of(st.integers(0, 2), st.integers(0, 200)), min_size=2, max_size=5), drop=DROPS)
@example(rows=[99, 1], drop=0.5)
def test_s6_and_each_instance_of_an_expert(rows: list[int], drop: float) -> None:
    """An expert's copy with one row of a hundred keeps it: it alone could."""
    quota = max(math.floor((1.0 - drop) * sum(rows) + 0.5), int(sum(rows) > 0))
    split = split_quotas(torch.tensor([quota]), torch.tensor([rows]), [tuple(range(len(rows)))])[0].tolist()
    assert all((q >= 1) == (r > 0) and q <= r for q, r in zip(split, rows, strict=True))
    assert sum(split) == max(quota, sum(r > 0 for r in rows))
