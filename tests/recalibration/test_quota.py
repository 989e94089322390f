"""How many pairs each expert keeps: the exact sum, the bounds, and both rules against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recalibration.oracles import level_quotas

from lrmoe.recalibration.quota import level, quotas

LOADS = st.lists(st.one_of(st.integers(0, 6), st.integers(0, 3000)), min_size=1, max_size=20)
DROPS = st.one_of(st.sampled_from([0.0, 0.1, 0.2, 1 / 3, 0.5, 0.7, 0.9, 0.999]), st.floats(0.0, 0.9999))


def found(kind: str, loads: list[int], drop: float) -> list[int]:
    quota_E = quotas(kind, torch.tensor(loads), drop)  # type: ignore[arg-type]
    assert quota_E.dtype == torch.int64
    return quota_E.tolist()


def target(loads: list[int], drop: float) -> int:
    return math.floor((1.0 - drop) * sum(loads) + 0.5)


@pytest.mark.parametrize(
    ("kind", "loads", "drop", "wanted"),
    [
        ("expert", [4, 2, 3], 1 / 3, [3, 1, 2]),
        ("level", [4, 2, 3], 1 / 3, [2, 2, 2]),
        ("expert", [10, 10, 10], 0.5, [5, 5, 5]),
        ("expert", [3, 3, 3], 0.5, [2, 2, 1]),  # 4.5 is rounded up; equal remainders: lower index first.
        ("expert", [1, 1, 8], 0.9, [1, 1, 1]),  # More loaded experts than pairs to keep: one each.
        ("expert", [1, 1, 1, 17], 0.5, [1, 1, 1, 7]),  # What the smallest get beyond their share, the largest gives.
        ("expert", [0, 4, 0], 0.5, [0, 2, 0]),
        ("expert", [0, 0], 0.5, [0, 0]),
        ("level", [9, 1, 1], 0.5, [4, 1, 1]),
        ("level", [5, 5, 5], 1 / 3, [4, 3, 3]),  # The leftover row goes to the lower index ...
        ("level", [4, 6, 5], 1 / 3, [3, 4, 3]),  # ... of the largest load.
        ("level", [7, 0, 2], 0.0, [7, 0, 2]),
        ("level", [1, 1, 1], 0.9, [1, 1, 1]),
        ("level", [0], 0.9, [0]),
    ],
)
def test_worked_examples(kind: str, loads: list[int], drop: float, wanted: list[int]) -> None:
    assert found(kind, loads, drop) == wanted


@settings(max_examples=120, deadline=None)
@given(loads=LOADS, drop=DROPS)
@example(loads=[1] * 19 + [3000], drop=0.999)
@example(loads=[3, 3, 3], drop=1 / 3)
def test_quotas_add_up_and_stay_within_the_loads(loads: list[int], drop: float) -> None:
    for kind in ("expert", "level"):
        quota = found(kind, loads, drop)
        assert all(0 <= q <= load for q, load in zip(quota, loads, strict=True))
        loaded = sum(load > 0 for load in loads)
        assert sum(quota) == max(target(loads, drop), loaded)
    assert found("expert", loads, 0.0) == found("level", loads, 0.0) == loads


@settings(max_examples=120, deadline=None)
@given(loads=st.lists(st.integers(0, 60), min_size=1, max_size=8), drop=DROPS)
def test_level_is_dropping_one_pair_after_the_other_where_most_are_left(loads: list[int], drop: float) -> None:
    assert found("level", loads, drop) == level_quotas(loads, max(target(loads, drop), sum(load > 0 for load in loads)))


@settings(max_examples=120, deadline=None)
@given(loads=st.lists(st.integers(0, 60), min_size=1, max_size=8), share=st.floats(0.0, 1.0))
def test_level_reaches_every_target(loads: list[int], share: float) -> None:
    wanted = int(share * sum(loads))
    assert level(torch.tensor(loads), torch.tensor(wanted)).tolist() == level_quotas(loads, wanted)


@settings(max_examples=120, deadline=None)
@given(loads=LOADS, drop=DROPS)
def test_expert_is_the_largest_remainder_and_at_least_one(loads: list[int], drop: float) -> None:
    quota = found("expert", loads, drop)
    share = [load * (1.0 - drop) for load in loads]
    lifted = [max(math.floor(s), int(load > 0)) for s, load in zip(share, loads, strict=True)]
    missing = target(loads, drop) - sum(lifted)
    assert all(q >= 1 for q, load in zip(quota, loads, strict=True) if load > 0)
    if missing >= 0:
        by_remainder = sorted(range(len(loads)), key=lambda e: (-(share[e] - lifted[e]), e))
        assert quota == [n + int(e in by_remainder[:missing]) for e, n in enumerate(lifted)]
    else:
        # Lifting the smallest overshot: the largest quotas give, never more than down to a common level.
        given_up = [n - q for n, q in zip(lifted, quota, strict=True)]
        assert all(g >= 0 for g in given_up)
        cap = max((q for q, g in zip(quota, given_up, strict=True) if g > 0), default=0)
        if sum(quota) > sum(load > 0 for load in loads):
            assert all(q <= cap + 1 or g == 0 for q, g in zip(quota, given_up, strict=True))
            assert max(quota) <= cap + 1


@settings(max_examples=100, deadline=None)
@given(loads=LOADS, drop=DROPS)
def test_an_expert_never_keeps_less_when_less_may_be_dropped(loads: list[int], drop: float) -> None:
    less, more = found("level", loads, drop), found("level", loads, drop / 2)
    assert all(a <= b for a, b in zip(less, more, strict=True))


def test_large_loads_are_exact() -> None:
    loads = [2**40 + 1, 3, 2**39]
    for kind in ("expert", "level"):
        quota = found(kind, loads, 0.5)
        assert sum(quota) == target(loads, 0.5)
        assert all(0 <= q <= load for q, load in zip(quota, loads, strict=True))
