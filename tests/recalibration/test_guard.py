"""When a layer stops dropping and when it tries again: the decisions alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe import LRMoEConfig
from lrmoe.recalibration.guard import PAUSE, WINDOW, LayerState, Limit, Sums, after_window, limit_of, mean_share

LIMIT = Limit("guard_variance", "V*/sum R", 0.1)
TAIL = Limit("guard_tail", "dropped share of sum R", 0.005)
BAD, GOOD = 0.2, 0.05


def history(shares: list[float | None]) -> list[LayerState]:
    """The states after windows with these shares, of a layer that begins to drop."""
    states = [LayerState()]
    for share in shares:
        states.append(after_window(states[-1], share, LIMIT))
    return states[1:]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("guard_variance", 0.1)),
        ({"selector": "random", "guard_variance": 0.3}, ("guard_variance", 0.3)),
        ({"selector": "auto"}, ("guard_variance", 0.1)),
        ({"selector": "topq"}, ("guard_tail", 0.005)),
        ({"selector": "topq", "guard_variance": None}, ("guard_tail", 0.005)),
        ({"selector": "topq", "guard_tail": None}, None),
        ({"guard_variance": None}, None),
        ({"drop": 0.0}, None),
    ],
)
def test_the_limit_is_that_of_the_selector(fields: dict[str, Any], expected: tuple[str, float] | None) -> None:
    limit = limit_of(LRMoEConfig(**fields))
    assert (None if limit is None else (limit.field, limit.value)) == expected


def test_a_layer_over_the_limit_rests_and_tries_again_after_ever_longer_rests() -> None:
    steps, rests = 0, []
    state = LayerState()
    for _ in range(40):
        before, state = state, after_window(state, 0.0 if state.rest else BAD, LIMIT)
        steps += WINDOW
        if before.rest == 0:
            assert state.rest > 0
            rests.append((steps, state.rest))
    # Bad windows end at steps 10, 10 + 50 + 10, ...; a layer that never settles rests most of the time.
    assert rests == [(10, 50), (70, 100), (180, 200), (390, 400)]


def test_a_clean_window_makes_the_next_rest_short_again() -> None:
    windows = PAUSE // WINDOW
    states = history([BAD, *[0.0] * windows, BAD, *[0.0] * 2 * windows, GOOD, BAD])
    assert states[-2] == LayerState(0, PAUSE)
    assert states[-1] == LayerState(PAUSE, 2 * PAUSE)
    assert states[windows] == LayerState(0, 2 * PAUSE)


def test_the_limit_itself_is_allowed() -> None:
    assert history([0.1]) == [LayerState()]
    assert history([math.nextafter(0.1, 1.0)]) == [LayerState(PAUSE, 2 * PAUSE)]


def test_a_window_that_tells_nothing_changes_nothing() -> None:
    tried_before = LayerState(0, 4 * PAUSE)
    assert after_window(tried_before, None, LIMIT) == tried_before
    # A rest goes on whatever came in.
    assert after_window(LayerState(PAUSE, 2 * PAUSE), None, LIMIT) == LayerState(PAUSE - WINDOW, 2 * PAUSE)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(0.0, 1.0)), max_size=60))
def test_states_stay_on_the_grid_of_windows_and_only_bad_windows_stop_a_layer(shares: list[float | None]) -> None:
    states = [LayerState(), *history(shares)]
    for share, before, after in zip(shares, states, states[1:], strict=False):
        assert after.rest % WINDOW == 0
        assert after.pause % PAUSE == 0
        assert (after.rest > before.rest) == (before.rest == 0 and share is not None and share > LIMIT.value)
        assert after.rest < after.pause
        if before.rest:
            assert after == LayerState(before.rest - WINDOW, before.pause)


# --- what a window costs -----------------------------------------------------------------------------------------


def test_variance_for_sampling_and_the_tail_for_topq() -> None:
    steps = [Sums(total=8.0, kept=6.0, variance=1.0), Sums(total=4.0, kept=4.0, variance=1.0)]
    assert mean_share(steps, LIMIT) == pytest.approx((1 / 8 + 1 / 4) / 2)
    assert mean_share(steps, TAIL) == pytest.approx((2 / 8 + 0) / 2)


def test_one_odd_step_counts_as_one_step_however_large_it_is() -> None:
    usual = [Sums(1.0, 0.99, 0.02)] * (WINDOW - 1)
    odd = Sums(total=1e12, kept=0.8e12, variance=0.25e12)
    share = mean_share([*usual, odd], LIMIT)
    assert share == pytest.approx((9 * 0.02 + 0.25) / 10)
    assert share < LIMIT.value


@pytest.mark.parametrize(
    "odd",
    [
        Sums(math.nan, math.nan, 0.0),
        Sums(math.inf, math.inf, 1.0),
        Sums(1.0, 0.9, math.nan),
        Sums(0.0, 0.0, 0.0),
    ],
)
def test_a_step_that_tells_nothing_is_left_out(odd: Sums) -> None:
    assert mean_share([odd, Sums(2.0, 1.9, 0.5)], LIMIT) == 0.25
    assert mean_share([odd] * WINDOW, LIMIT) is None
    assert mean_share([], LIMIT) is None


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-300, 1e300), st.floats(0.0, 1.0), st.floats(0.0, 0.25)), min_size=1, max_size=12),
    st.sampled_from([LIMIT, TAIL]),
)
def test_a_share_lies_between_those_of_its_steps(steps: list[tuple[float, float, float]], limit: Limit) -> None:
    sums = [Sums(total, total * kept, total * variance) for total, kept, variance in steps]
    each = [mean_share([one], limit) for one in sums]
    share = mean_share(sums, limit)
    assert share is not None
    assert min(each) - 1e-12 <= share <= max(each) + 1e-12
