"""Verdicts on differences, and the advice that follows from them."""

from __future__ import annotations

import math

import pytest

from lrmoe.report.verdicts import SAME_TIME, Verdict, advice, finite_differences, recommended


def verdict(name: str, *differences: float, spread: float | None = 0.02, seconds: float | None = None) -> Verdict:
    return Verdict(name=name, differences=differences, spread=spread, seconds=seconds)


@pytest.mark.parametrize(
    ("one", "kind", "leans"),
    [
        (verdict("a", 0.01, 0.02, 0.03), "within", "worse"),
        (verdict("a", -0.01, -0.02, -0.01), "within", "better"),
        (verdict("a", 0.01, -0.02, 0.03), "within", ""),
        (verdict("a", 0.01, 0.02), "within", ""),
        (verdict("a", 0.03, 0.02), "worse", ""),
        (verdict("a", -0.03, -0.02), "better", ""),
        (verdict("a", 0.03, spread=None), "alone", ""),
        (verdict("a"), "missing", ""),
    ],
)
def test_a_difference_is_held_against_the_spread(one: Verdict, kind: str, leans: str) -> None:
    assert (one.kind, one.leans) == (kind, leans)


def test_a_seed_without_a_finite_loss_leaves_no_differences() -> None:
    assert finite_differences([1.5, 1.25], [1.0, 1.0]) == (0.5, 0.25)
    assert finite_differences([1.5, math.nan], [1.0, 1.0]) == ()
    assert finite_differences([1.5, None], [1.0, 1.0]) == ()
    assert finite_differences([], []) == ()


def test_of_equal_times_the_lower_loss_is_recommended_else_the_faster() -> None:
    slow_low = verdict("low", 0.001, 0.001, seconds=1.0)
    fast_high = verdict("high", 0.01, 0.01, seconds=0.8)
    assert recommended([slow_low, fast_high]) is fast_high
    nearly = verdict("nearly", 0.01, 0.01, seconds=1.0 / SAME_TIME)
    assert recommended([slow_low, nearly]) is slow_low
    assert recommended([slow_low, verdict("unknown", 0.0, 0.0)]) is not slow_low
    assert recommended([verdict("a", 0.3, 0.3), verdict("b")]) is None


def test_what_is_advised_follows_from_the_numbers() -> None:
    use = advice([verdict("pps", 0.01, 0.0, -0.01, seconds=0.8), verdict("topq", 0.3, 0.2, 0.3)], "C0", 1.0)
    assert use[0].startswith("Use “pps” (0.000 nats; seed spread 0.020)")
    assert "20 % less time (800.0 ms against 1,000.0 ms a step)" in use[0]
    assert use[1].startswith("Do not use “topq” (+0.267 nats")
    assert len(use) == 2
    (same,) = advice([verdict("pps", 0.0, 0.0, 0.0, seconds=0.99)], "C0", 1.0)
    assert same.startswith("Keep “C0”")
    assert "not faster" in same
    (worse,) = advice([verdict("pps", 0.3, 0.3, 0.3, seconds=0.5)], "C0", 1.0)
    assert worse.startswith("Keep “C0”: every variant that drops ends above it")
    (alone,) = advice([verdict("pps", 0.3, spread=None, seconds=0.5)], "C0", 1.0)
    assert "one seed cannot tell" in alone
    assert "--seeds 0,1,2" in alone
    two = advice([verdict("pps", 0.0, 0.0), verdict("gone")], "C0", None)
    assert "none was recorded" in two[0]
    assert "repeat with a third" in two[1]
    assert "“gone”" in two[2]
    (leaning,) = advice([verdict("pps", 0.01, 0.01, 0.01, seconds=0.5)], "C0", 1.0)
    assert "every seed leans to worse" in leaning
