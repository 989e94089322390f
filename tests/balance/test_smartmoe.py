"""SmartMoE: the worked examples, when it decides, and from what."""

from __future__ import annotations

import pytest
from balance.problem import M1, loads

from lrmoe.balance.baselines.smartmoe import SmartMoE, deal
from lrmoe.balance.ownership import Move, Slots

P1 = [200, 300, 200, 100]


def rank_loads(load: list[int], placement: Slots) -> list[int]:
    return [sum(load[e] for e in slots) for slots in placement]


@pytest.mark.parametrize(
    ("load", "current", "before", "experts", "after"),
    [
        (P1, ((0, 1), (2, 3)), [500, 300], [{1, 3}, {0, 2}], [400, 400]),
        ([90, 80, 70, 30, 20, 10], ((0, 1), (2, 3), (4, 5)), [170, 100, 30], [{0, 5}, {1, 4}, {2, 3}], [100] * 3),
    ],
)
def test_p1_p2(load: list[int], current: Slots, before: list[int], experts: list[set[int]], after: list[int]) -> None:
    assert rank_loads(load, current) == before
    found = deal(load, current)
    assert [set(slots) for slots in found] == experts
    assert rank_loads(load, found) == after


def test_p4_one_expert_above_the_mean_cannot_be_helped() -> None:
    current = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert max(rank_loads(M1, deal(M1, current))) == 450


def test_who_stays_keeps_its_slot_and_who_moves_says_so() -> None:
    policy = SmartMoE(interval=1)
    policy.observe(loads(P1, ranks=2), layer=4)
    policy.step()
    assert policy.placement(4) == ((3, 1), (2, 0))
    assert policy.moves() == [Move(4, 3, 1, 1, 0, 0), Move(4, 0, 0, 0, 1, 1)]
    plan = policy.plan(loads(P1, ranks=2), layer=4).validate(policy.slots, ownership="placed")
    assert plan.hosts == ((1,), (0,), (1,), (0,))
    assert plan.num_replicas == 0
    # Other layers are where they were.
    assert policy.placement(0) == ((0, 1), (2, 3))
    policy.observe(loads(P1, ranks=2), layer=4)
    policy.step()
    assert policy.moves() == []


def test_a_placement_that_is_no_better_is_not_adopted() -> None:
    # Greedy pairs 5 with 3 and 4 with 4, which is 9 and 8; they lie so that both ranks have 9 and 8 already.
    policy = SmartMoE(interval=1)
    policy.observe(loads([4, 4, 5, 4], ranks=2), layer=0)
    policy.step()
    assert policy.placement(0) == ((0, 1), (2, 3))


def test_it_decides_every_so_many_steps_from_the_first_microbatches_of_the_last_two() -> None:
    policy = SmartMoE(interval=3)
    for step in range(1, 4):
        policy.observe(loads(P1 if step > 1 else [0, 0, 0, 9000], ranks=2), layer=0)
        policy.observe(loads([9000, 9000, 0, 0], ranks=2), layer=0)
        assert policy.placement(0) == ((0, 1), (2, 3))
        policy.step()
    assert policy.placement(0) == ((3, 1), (2, 0))


def test_uneven_ranks_keep_their_number_of_experts() -> None:
    policy = SmartMoE(interval=1)
    policy.observe(loads([10, 9, 8, 1, 1], ranks=2), layer=0)
    policy.step()
    assert [len(slots) for slots in policy.placement(0)] == [3, 2]
    assert policy.slots == 3
    assert policy.placement(0) == ((0, 3, 4), (1, 2))
