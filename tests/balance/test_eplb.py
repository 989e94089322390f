"""EPLB: the worked examples, and its copies as replicas of experts that live at home."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from balance.problem import M1, loads

from lrmoe.balance.baselines.eplb import EPLB, rebalance, replicate

README = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]


def rank_loads(load: list[int], placement: tuple[tuple[int, ...], ...]) -> list[float]:
    count = {e: sum(slots.count(e) for slots in placement) for e in range(len(load))}
    return [float(sum(Fraction(load[e], count[e]) for e in slots)) for slots in placement]


def test_twelve_slots_on_four_ranks() -> None:
    owner, _ = replicate(M1, 12)
    assert [owner.count(e) for e in range(8)] == [5, 1, 1, 1, 1, 1, 1, 1]
    placement = rebalance(M1, 12, 4)
    assert placement == ((1, 7, 5), (2, 0, 0), (3, 0, 0), (6, 0, 4))
    assert rank_loads(M1, placement) == [250, 260, 260, 230]


def test_the_example_of_its_readme() -> None:
    owner, _ = replicate(README, 16)
    assert [e for e in range(12) if owner.count(e) == 2] == [1, 4, 5, 10]
    assert len(owner) == 16
    assert rank_loads(README, rebalance(README, 16, 8)) == [130.5, 95.5, 130, 138, 138.5, 134.5, 134, 132]
    hierarchical = rebalance(README, 16, 8, groups=4, nodes=2)
    assert [e for slots in hierarchical for e in slots] == [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]


def test_the_policy_copies_from_home() -> None:
    policy = EPLB(slots=1, interval=2)
    for step in range(2):
        plan = policy.plan(loads(M1))
        assert plan.num_replicas == 0, step  # Until the first decision.
        policy.observe(loads(M1), layer=0)
        policy.step()
    assert policy.placement(0) == ((1, 7, 5), (2, 0, 0), (3, 0, 0), (6, 0, 4))
    assert policy.slots == 3
    plan = policy.plan(loads(M1)).validate(policy.slots)
    assert plan.rows_EG.sum(0).tolist() == [250, 260, 260, 230]
    # Two slots of a rank are one instance with twice the rows; a home without a slot computes nothing.
    assert plan.hosts[0] == (0, 1, 2, 3)
    assert plan.rows_EG[0].tolist() == [0, 160, 160, 80]
    assert policy.moves() == []


def test_it_forgets_what_it_has_decided_on() -> None:
    policy = EPLB(interval=1)
    policy.observe(loads(M1), layer=0)
    policy.step()
    first = policy.placement(0)
    policy.step()
    assert policy.placement(0) == first  # Nothing new.
    policy.observe(loads(M1[::-1]), layer=0)
    policy.step()
    assert policy.placement(0) == rebalance(M1[::-1], 12, 4)


def test_nodes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="groups=3 must be a multiple of nodes=2"):
        EPLB(groups=3, nodes=2)
    with pytest.raises(ValueError, match="groups=3 does not divide the 8 experts"):
        EPLB(groups=3, nodes=3).prepare(8, 6)
    with pytest.raises(ValueError, match="nodes=2 does not divide the 3 ranks"):
        EPLB(groups=4, nodes=2).plan(torch.ones(3, 8, dtype=torch.int64))
