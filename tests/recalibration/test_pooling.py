"""Quotas pooled over the experts of a rank: exact totals, floors, and both rules against plain loops.

r = sqrt(R) are the scores of an expert's pairs; x = r / sqrt(sum of the expert's R) the relative ones.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recalibration.oracles import floored, pps_probabilities, source, variance

from lrmoe.recalibration.design import rank
from lrmoe.recalibration.pooling import pooled_quotas
from lrmoe.recalibration.quota import quotas
from lrmoe.recalibration.segments import Segments
from lrmoe.recalibration.selection import select

SELECTORS = ("topq", "pps", "random", "auto")
SCORE = st.one_of(
    st.sampled_from([0.0, 1.0, 1.0, 2.0, math.nan, math.inf]),
    st.floats(0.015625, 1024.0, width=32),
    st.integers(-30, 30).map(lambda e: 10.0**e),
)
EXPERTS = st.lists(
    st.integers(0, 14).flatmap(lambda n: st.tuples(st.lists(SCORE, min_size=n, max_size=n), st.integers(0, n))),
    min_size=1,
    max_size=6,
)
# Few orders of magnitude, where the bisection below is as good as the closed form; some rows far above the others.
LIKELY = st.one_of(st.floats(0.125, 8.0, width=32), st.sampled_from([100.0, 300.0]))
TAME = st.lists(
    st.integers(0, 14).flatmap(lambda n: st.tuples(st.lists(LIKELY, min_size=n, max_size=n), st.integers(0, n))),
    min_size=1,
    max_size=6,
)


def pooled(experts: list[tuple[list[float], int]], selector: Any, nobody: int = 2) -> list[int]:
    scores = [r for rows, _ in experts for r in rows] + [1e40] * nobody
    segments = Segments.from_loads(torch.tensor([len(rows) for rows, _ in experts]), len(scores))
    ranking = rank(torch.tensor(scores, dtype=torch.float64), segments)
    quota_E = pooled_quotas(ranking, torch.tensor([q for _, q in experts]), selector)
    assert quota_E.dtype == torch.int64
    return quota_E.tolist()


def least(rows: list[float], quota: int) -> int:
    """The documented floor, and every score that is not finite."""
    return max(min(math.ceil(len(rows) / 2), 64, quota), sum(not math.isfinite(r) for r in rows))


def relative(rows: list[float]) -> list[float]:
    """From the largest down; without those that are not finite."""
    clean = floored(sorted((r for r in rows if math.isfinite(r)), reverse=True)) if rows else []
    total = math.hypot(*clean)
    return [r / total if total > 0 else 0.0 for r in clean]


def loop_topq(experts: list[tuple[list[float], int]]) -> list[int]:
    """Every expert takes its floor; what is left of the total goes to the largest relative scores of all."""
    kept = [least(rows, q) for rows, q in experts]
    rest = [
        (-x, e, place)
        for e, (rows, _) in enumerate(experts)
        for place, x in enumerate(relative(rows), start=sum(not math.isfinite(r) for r in rows))
        if place >= kept[e]
    ]
    for _, e, _ in sorted(rest)[: max(sum(q for _, q in experts) - sum(kept), 0)]:
        kept[e] += 1
    return kept


def water_levels(experts: list[tuple[list[float], int]]) -> list[float]:
    """sum of min(1, x/theta) for each expert, at least its floor, with the theta that reaches the total."""
    sizes = [relative(rows) for rows, _ in experts]
    floors = [least(rows, q) for rows, q in experts]
    total = sum(q for _, q in experts)
    low, high = 1e-12, 1e12
    shares: list[float] = []
    for _ in range(100):
        theta = math.sqrt(low * high)
        shares = [max(sum(min(1.0, x / theta) for x in xs), float(f)) for xs, f in zip(sizes, floors, strict=True)]
        low, high = (theta, high) if sum(shares) > total else (low, theta)
    return shares


@settings(max_examples=60, deadline=None)
@given(EXPERTS, st.sampled_from(SELECTORS))
@example([([0.0] * 5, 4), ([0.0] * 3, 1)], "pps")
@example([([0.0] * 8, 5), ([1.0], 1), ([1e-30, 1e30], 1)], "pps")
@example([([math.nan] * 6, 1), ([1.0] * 4, 3)], "topq")
@example([([], 0)], "pps")
@example([([0.0] * 14, 13), ([1.0] * 3, 3)], "pps")
def test_the_total_is_kept_exactly_between_floors_and_loads(
    experts: list[tuple[list[float], int]], selector: Any
) -> None:
    found = pooled(experts, selector)
    floors = [least(rows, q) for rows, q in experts]
    assert all(f <= q <= len(rows) for f, q, (rows, _) in zip(floors, found, experts, strict=True))
    assert sum(found) == max(sum(q for _, q in experts), sum(floors))


@settings(max_examples=60, deadline=None)
@given(EXPERTS)
@example([([3.0, 1.0, 1.0, 1.0], 3), ([1.0, 1.0, 1.0, 3.0], 3)])
def test_topq_keeps_the_largest_relative_scores_of_all(experts: list[tuple[list[float], int]]) -> None:
    # Relative scores that agree but for rounding may be taken for ties, or not: compare what is kept.
    def captured(quota: list[int]) -> float:
        flawed = [sum(not math.isfinite(r) for r in rows) for rows, _ in experts]
        parts = zip(quota, experts, flawed, strict=True)
        return sum(sum(x * x for x in relative(rows)[: q - f]) for q, (rows, _), f in parts)

    assert captured(pooled(experts, "topq")) == pytest.approx(captured(loop_topq(experts)), abs=1e-9)


def test_topq_by_trying_everything() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        experts = [
            (torch.rand(n, generator=generator, dtype=torch.float64).pow(3).tolist(), q)
            for n, q in ((6, 4), (3, 2), (5, 5), (1, 1))
        ]
        floors = [least(rows, q) for rows, q in experts]
        ranges = (range(f, len(rows) + 1) for f, (rows, _) in zip(floors, experts, strict=True))
        choices = [c for c in itertools.product(*ranges) if sum(c) == sum(q for _, q in experts)]
        best = max(
            choices,
            key=lambda c: sum(sum(x * x for x in relative(rows)[:q]) for q, (rows, _) in zip(c, experts, strict=True)),
        )
        assert pooled(experts, "topq") == list(best)


@settings(max_examples=60, deadline=None)
@given(TAME)
@example([([300.0] * 2 + [0.125] * 12, 9), ([1.0] * 14, 9), ([1.0, 2.0] * 5, 6), ([1.0] * 4, 3)])
def test_pps_is_water_filling_with_one_theta(experts: list[tuple[list[float], int]]) -> None:
    found, wanted = pooled(experts, "pps"), water_levels(experts)
    assert all(abs(q - w) < 1 + 1e-6 for q, w in zip(found, wanted, strict=True))
    # Largest remainder: whoever was rounded up had no smaller fraction than whoever was rounded down.
    up = [w - math.floor(w + 1e-6) for q, w in zip(found, wanted, strict=True) if q > w + 1e-6]
    down = [w - math.floor(w + 1e-6) for q, w in zip(found, wanted, strict=True) if q < w - 1e-6]
    assert not up or not down or min(up) > max(down) - 1e-5


def test_pps_quotas_have_the_least_relative_variance() -> None:
    """Moving a row from one expert to another never helps by more than rounding to whole rows costs."""
    generator = torch.Generator().manual_seed(6)
    scores = [
        torch.randn(n, generator=generator).double().mul(s).exp().tolist() for n, s in ((80, 0.2), (60, 2.0), (90, 1))
    ]
    experts = [(rows, int(0.8 * len(rows))) for rows in scores]

    def cost(quota: list[int]) -> float:
        return sum(
            variance(floored(rows), pps_probabilities(floored(rows), q)) / sum(r * r for r in floored(rows))
            for rows, q in zip(scores, quota, strict=True)
        )

    found = pooled(experts, "pps")
    assert found != [q for _, q in experts]
    assert cost(found) < 0.9 * cost([q for _, q in experts])
    for a, b in itertools.permutations(range(3), 2):
        moved = [q + 3 * (e == a) - 3 * (e == b) for e, q in enumerate(found)]
        assert cost(found) < cost(moved)


def test_concentrated_experts_give_to_spread_ones_and_size_does_not_matter() -> None:
    concentrated, spread = [100.0] * 10 + [0.01] * 90, [1.0] * 100
    for selector in ("topq", "pps", "auto"):
        assert pooled([(concentrated, 80), (spread, 80)], selector) == [60, 100] or selector == "pps"
        # An expert with a thousand times the gradient gets no more.
        louder = [1000.0 * r for r in concentrated]
        assert pooled([(louder, 80), (spread, 80)], selector) == pooled([(concentrated, 80), (spread, 80)], selector)
    assert pooled([(concentrated, 70), (spread, 70)], "pps")[0] == 50
    # Half its pairs, or 64 of many.
    assert pooled([([1.0] + [0.0] * 999, 500), ([1.0] * 1000, 500)], "pps") == [64, 936]
    assert pooled([([1.0] + [0.0] * 999, 500), ([1.0] * 1000, 500)], "topq") == [64, 936]


def test_ties_go_to_the_lower_expert_and_equal_experts_share_alike() -> None:
    assert pooled([([1.0] * 4, 3)] * 3, "topq") == [4, 3, 2]
    assert pooled([([1.0] * 4, 3)] * 3, "pps") == [3, 3, 3]
    assert pooled([([1.0] * 4, 4), ([1.0] * 4, 3), ([1.0] * 4, 3)], "pps") == [4, 3, 3]


@pytest.mark.parametrize("selector", ["random", "pps"])
def test_quotas_of_even_sampling_do_not_depend_on_the_scores(selector: Any) -> None:
    experts = [([1.0] * 100, 50), ([1.0] * 400, 200)]
    skewed = [([float(i) for i in range(100)], 50), ([float(i % 7) for i in range(400)], 200)]
    # Even sampling varies by (n/q - 1) sum R: least in relative terms for q in proportion to sqrt(n).
    assert pooled(experts, selector) == [83, 167]
    assert (pooled(skewed, selector) == [83, 167]) == (selector == "random")


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("factor", [1e6, 2.0**-300])
def test_scaling_all_scores_changes_nothing(selector: Any, factor: float) -> None:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(3, 40, generator=generator, dtype=torch.float64).exp()
    experts = [(row.tolist(), 30) for row in rows]
    assert pooled([((row * factor).tolist(), 30) for row in rows], selector) == pooled(experts, selector)


@pytest.mark.parametrize("selector", SELECTORS)
def test_select_keeps_the_pooled_quotas_and_stays_unbiased(selector: Any) -> None:
    generator = torch.Generator().manual_seed(8)
    load_E = torch.tensor([40, 0, 7, 90, 1])
    segments = Segments.from_loads(load_E, 140)
    score_N = torch.randn(140, generator=generator, dtype=torch.float64).mul(1.5).exp()
    score_N[45] = math.nan
    quota_E = quotas("pooled", load_E, 0.3)
    assert torch.equal(quota_E, quotas("expert", load_E, 0.3))
    wanted_E = pooled_quotas(rank(score_N, segments), quota_E, selector)
    weight_N = torch.zeros(140, dtype=torch.float64)
    for step in range(100):
        kept = select(
            score_N, segments, quota_E, selector=selector, source=source((0, step, 0, 0), segments), pooled=True
        )
        assert torch.equal(kept.count_E, wanted_E)
        assert 45 in kept.index_M.tolist()
        weight_N[kept.index_M] += kept.weight_M / 100
    assert kept.count_E.sum() == quota_E.sum()
    if selector in ("pps", "random"):
        # Each row's mean weight is 1, within five standard errors of the least likely one.
        assert (weight_N[segments.live_N] - 1).abs().max() < 1.5
        assert weight_N[segments.live_N].mean() == pytest.approx(1.0, abs=0.05)
