"""SYMI: the worked examples, and what is left of a hot spot that moves."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from balance.problem import M1, loads
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.balance import get
from lrmoe.balance.baselines.symi import SYMI, place, slot_shares
from lrmoe.balance.ownership import even_rows, slot_counts

S2 = [900, 60, 30, 10]


@pytest.mark.parametrize(
    ("popularity", "slots", "counts", "placement", "rows"),
    [
        ([500, 250, 125, 125], 2, [4, 2, 1, 1], ((0, 0), (0, 0), (1, 1), (2, 3)), [250] * 4),
        (S2, 2, [5, 1, 1, 1], ((0, 0), (0, 0), (0, 1), (2, 3)), [360, 360, 240, 40]),
        # In halves of slots 266.7, 233.3, 200, 300.
        (M1, 4, [6, 2, 2, 2, 1, 1, 1, 1], ((0,) * 4, (0, 0, 1, 1), (2, 2, 3, 3), (4, 5, 6, 7)), [267, 233, 200, 300]),
    ],
)
def test_s1_s2_s4(
    popularity: list[int], slots: int, counts: list[int], placement: tuple[tuple[int, ...], ...], rows: list[int]
) -> None:
    assert slot_shares(popularity, 4 * slots) == counts
    assert place(counts, slots) == placement
    policy = SYMI(slots=slots)
    policy.observe(loads(popularity), layer=3)
    policy.step()
    assert policy.placement(3) == placement
    plan = policy.plan(loads(popularity), layer=3).validate(slots, ownership="sharded")
    assert plan.rows_EG.sum(0).tolist() == rows


def test_shares_follow_the_exact_fractions() -> None:
    share = [400 / 6 * 4, 400 / 6 * 2 + 100]
    rows_EG = even_rows(torch.tensor(M1), slot_counts(place(slot_shares(M1, 16), 4), 8))
    assert [round(x, 1) for x in share] == [266.7, 233.3]
    assert rows_EG.sum(0).tolist()[:2] == [round(x) for x in share]


def test_the_slots_are_those_of_the_step_before() -> None:
    policy = get("symi", slots=2)
    hot = [loads([100 if e == hot else 10 for e in range(4)]) for hot in range(4)]
    for step in range(1, 4):
        policy.observe(hot[step - 1], layer=0)
        # Until the step ends nothing changes, whatever is observed.
        before = policy.plan(hot[step]).hosts
        policy.observe(hot[step - 1], layer=0)
        assert policy.plan(hot[step]).hosts == before
        policy.step()
        slots_E = slot_counts(policy.placement(0), 4).sum(1).tolist()  # type: ignore[attr-defined]
        assert slots_E == [5 if e == step - 1 else 1 for e in range(4)]
        late = policy.plan(hot[step]).rows_EG.sum(0)
        in_time = policy.plan(hot[step - 1]).rows_EG.sum(0)
        assert late.max() > 1.5 * in_time.max()


def test_two_microbatches_of_a_step_add_up() -> None:
    one, two = get("symi", slots=2), get("symi", slots=2)
    one.observe(loads(S2), layer=0)
    two.observe(loads([850, 10, 10, 10]), layer=0)
    two.observe(loads([50, 50, 20, 0]), layer=0)
    for policy in (one, two):
        policy.step()
    assert one.placement(0) == two.placement(0)  # type: ignore[attr-defined]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(0, 20))
def test_shares_are_those_of_the_published_loop(popularity: list[int], spare: int) -> None:
    total, whole = len(popularity) + spare, sum(popularity)
    goal = [Fraction(p * total, whole) if whole else Fraction(total, len(popularity)) for p in popularity]
    count = [max(int(one), 1) for one in goal]
    above = [c - g for c, g in zip(count, goal, strict=True)]
    while sum(count) > total:
        i = above.index(max(above))
        count[i] -= count[i] > 1
        above[i] -= 1
    while sum(count) < total:
        i = above.index(min(above))
        count[i] += 1
        above[i] += 1
    assert slot_shares(popularity, total) == count
