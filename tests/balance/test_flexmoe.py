"""FlexMoE: the worked examples, exchanges for the gradients' sake, and the moves of slots."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from balance.problem import M1, loads
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.balance.baselines.flexmoe import FlexMoE, adjust
from lrmoe.balance.ownership import Slots

START = ((0, 1), (2, 3), (0, 1), (2, 3))


def rank_loads(load: list[int], placement: Slots) -> list[float]:
    count = {e: sum(slots.count(e) for slots in placement) for e in range(len(load))}
    return [round(float(sum(Fraction(load[e], count[e]) for e in slots)), 1) for slots in placement]


@pytest.mark.parametrize(
    ("load", "before", "placement", "after"),
    [
        # The text lists the slots of a rank with the newcomer last; here it takes the place of who leaves.
        ([400, 100, 100, 100], [250, 100, 250, 100], ((0, 1), (0, 3), (0, 1), (2, 3)), [183.3, 183.3, 183.3, 150]),
        ([300, 300, 50, 50], [300, 50, 300, 50], ((0, 1), (0, 3), (0, 1), (2, 1)), [200, 150, 200, 150]),
    ],
)
def test_f1_f2(load: list[int], before: list[float], placement: Slots, after: list[float]) -> None:
    assert rank_loads(load, START) == before
    assert adjust(load, START) == placement
    assert rank_loads(load, placement) == after


def test_f2_step_by_step() -> None:
    one = adjust([300, 300, 50, 50], START, max_changes=1)
    assert one == ((0, 1), (0, 3), (0, 1), (2, 3))
    assert max(rank_loads([300, 300, 50, 50], one)) == 250
    assert adjust([300, 300, 50, 50], START, max_changes=0) == START
    # 300 is 1.71 times the mean of 175, and 250 is 1.43 times.
    assert adjust([300, 300, 50, 50], START, threshold=1.72) == START
    assert adjust([300, 300, 50, 50], START, threshold=1.43) == one


def test_gradients_that_cost_much_keep_experts_together() -> None:
    # Twice on one rank is one host, whose gradients cost nothing.
    together = adjust([100, 100, 100, 100], START, sync_cost=10.0)
    assert sorted(sorted(slots) for slots in together) == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert adjust([100, 100, 100, 100], START) == START


def test_exchanges_pay_for_themselves() -> None:
    # 400 rows on one rank are more than 250 and twice the cost of two ranks' gradients.
    load = [400, 100, 100, 100]
    assert adjust(load, START, threshold=9.0, sync_cost=10.0) == ((0, 1), (3, 3), (0, 1), (2, 2))
    assert adjust(load, START, threshold=9.0, sync_cost=100.0) == ((1, 1), (3, 3), (0, 0), (2, 2))
    # Bringing expert 0 together on rank 1 spreads expert 2, and on rank 0 leaves 20 rows to rank 1.
    spread = ((0, 1), (0, 2, 2))
    assert adjust([10, 10, 10], spread, threshold=9.0, sync_cost=1.0, max_changes=1) == spread


def test_a_change_without_a_gain_is_the_end() -> None:
    # A second slot for expert 0 on the rank that has it all: no better, though a third on the other rank would be.
    stuck = ((0, 1, 1), (2, 3, 3))
    assert adjust([300, 0, 10, 10], stuck) == stuck


def test_the_start_has_every_rank_own_its_experts() -> None:
    policy = FlexMoE(slots=2)
    policy.prepare(4, 4)
    assert policy.placement(0) == ((0, 1), (1, 0), (2, 3), (3, 2))
    uneven = FlexMoE(slots=3)
    uneven.prepare(5, 2)
    assert uneven.placement(0) == ((0, 1, 2), (3, 4, 0))
    full = FlexMoE(slots=3)
    full.prepare(2, 2)
    assert full.placement(0) == ((0, 1, 0), (1, 0, 1))


def test_moves_say_how_the_new_placement_comes_of_the_old() -> None:
    policy = FlexMoE(slots=3, threshold=1.0)
    lam_GE = loads(M1)
    old = None
    moved = 0
    for _ in range(4):
        policy.observe(lam_GE, layer=2)
        policy.observe(lam_GE[:, torch.randperm(8, generator=torch.Generator().manual_seed(3))], layer=0)
        old = {layer: policy.placement(layer) for layer in (0, 2)}
        policy.step()
        for layer in (0, 2):
            slots = [list(held) for held in old[layer]]
            for move in policy.moves():
                if move.layer == layer:
                    assert old[layer][move.source_rank][move.source_slot] == move.expert
                    slots[move.target_rank][move.target_slot] = move.expert
            assert tuple(map(tuple, slots)) == policy.placement(layer)
        moved += len(policy.moves())
    assert moved > 0
    assert policy.moves() == []  # The loads are as before.


def test_it_looks_every_so_often_and_only_above_the_threshold() -> None:
    policy = FlexMoE(slots=2, interval=3)
    for step in range(1, 7):
        policy.observe(loads([400, 100, 100, 100]), layer=0)
        policy.step()
        assert bool(policy.moves()) == (step == 3)
    calm = FlexMoE(slots=2, threshold=3.0)
    calm.observe(loads([400, 100, 100, 100]), layer=0)
    calm.step()
    assert calm.moves() == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=4, max_size=8), st.integers(1, 3), st.sampled_from([0.0, 5.0]))
def test_no_change_makes_it_worse(load: list[int], extra: int, sync_cost: float) -> None:
    policy = FlexMoE(slots=-(-len(load) // 4) + extra)
    policy.prepare(len(load), 4)
    start = policy.placement(0)
    after = adjust(load, start, sync_cost=sync_cost, max_changes=10)
    assert [len(slots) for slots in after] == [len(slots) for slots in start]
    assert {e for slots in after for e in slots} == set(range(len(load)))
    if sync_cost == 0:
        assert max(rank_loads(load, after)) <= max(rank_loads(load, start))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.9}, "threshold=0.9 must be >= 1 and finite"),
        ({"sync_cost": -1}, "sync_cost=-1 must be >= 0"),
        ({"slots": 0}, "slots=0 must be an integer >= 1"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlexMoE(**options)  # type: ignore[arg-type]
