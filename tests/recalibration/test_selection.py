"""Which pairs fill a quota: against plain loops, for scores of any kind.

r = sqrt(R) are the scores; rows of several experts lie one expert after the other, rows of nobody last.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recalibration.oracles import floored, pps_probabilities, source, top_q, variance

from lrmoe.recalibration.design import design, rank
from lrmoe.recalibration.segments import Segments
from lrmoe.recalibration.selection import Kept, keep_all, select

SELECTORS = ("topq", "pps", "random", "auto")
NOW = (0, 0, 0, 0)

# Scores of every size, many zeros and ties; never so close that only the last bits of fp64 tell them apart.
SCORE = st.one_of(
    st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0]),
    st.floats(0.015625, 1024.0, width=32),
    st.integers(-30, 30).map(lambda e: 10.0**e),
)
EXPERT = st.integers(0, 14).flatmap(lambda n: st.tuples(st.lists(SCORE, min_size=n, max_size=n), st.integers(0, n)))
EXPERTS = st.lists(EXPERT, min_size=1, max_size=6)


def layout(experts: list[tuple[list[float], int]], nobody: int = 2) -> tuple[torch.Tensor, Segments, torch.Tensor]:
    """(scores, segments, quotas); rows of nobody get the largest scores, which must not matter."""
    scores = [r for rows, _ in experts for r in rows] + [1e40] * nobody
    load_E = torch.tensor([len(rows) for rows, _ in experts])
    segments = Segments.from_loads(load_E, len(scores))
    return torch.tensor(scores, dtype=torch.float64), segments, torch.tensor([q for _, q in experts])


def chosen(kept: Kept, segments: Segments) -> list[set[int]]:
    """The kept places inside each expert."""
    found: list[set[int]] = [set() for _ in range(segments.count_S.numel() - 1)]
    for row in kept.index_M.tolist():
        found[int(segments.of_N[row])].add(int(segments.position_N[row]))
    return found


def one(scores: list[float], quota: int, selector: Any, step: int = 0, **options: Any) -> dict[int, float]:
    """Kept places of a single expert and their weights."""
    score_N, segments, quota_E = layout([(scores, quota)])
    kept = select(score_N, segments, quota_E, selector=selector, source=source((0, step, 0, 0), segments), **options)
    return dict(zip(kept.index_M.tolist(), kept.weight_M.tolist(), strict=True))


@settings(max_examples=120, deadline=None)
@given(EXPERTS)
def test_topq_is_the_sorted_list(experts: list[tuple[list[float], int]]) -> None:
    score_N, segments, quota_E = layout(experts)
    kept = select(score_N, segments, quota_E, selector="topq", source=source(NOW, segments))
    assert chosen(kept, segments) == [top_q(rows, q) for rows, q in experts]
    assert (kept.weight_M == 1).all()


@settings(max_examples=120, deadline=None)
@given(EXPERTS, st.sampled_from(SELECTORS), st.integers(0, 2**40))
def test_every_selector_keeps_exactly_the_quota_in_rising_order(
    experts: list[tuple[list[float], int]], selector: Any, step: int
) -> None:
    score_N, segments, quota_E = layout(experts)
    kept = select(score_N, segments, quota_E, selector=selector, source=source((1, step, 2, 3), segments))
    assert [len(places) for places in chosen(kept, segments)] == quota_E.tolist() == kept.count_E.tolist()
    assert (kept.index_M.diff() > 0).all()
    assert kept.weight_M.isfinite().all()
    assert (kept.weight_M >= 1 - 1e-12).all()


@settings(max_examples=120, deadline=None)
@given(EXPERTS)
@example([([1.0, 1.0, 1.0], 3), ([0.0, 0.0], 1), ([5.0, 3.0, 0.0, 0.0], 3)])
@example([([1e30, 1.0, 1e-30], 2)])
def test_probabilities_are_the_loops_and_weights_their_inverse(experts: list[tuple[list[float], int]]) -> None:
    score_N, segments, quota_E = layout(experts)
    ranking = rank(score_N, segments)
    plan = design(ranking, quota_E)
    probability_N = torch.empty_like(plan.probability_N).scatter_(0, ranking.order_N, plan.probability_N)
    kept = select(score_N, segments, quota_E, selector="pps", source=source(NOW, segments))
    weight_N = torch.zeros_like(score_N).scatter_(0, kept.index_M, kept.weight_M)
    start = 0
    for e, (rows, q) in enumerate(experts):
        scores = floored(rows)
        wanted = pps_probabilities(scores, q)
        mine = probability_N[start : start + len(rows)]
        assert torch.allclose(mine, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-15)
        for place in range(len(rows)):
            w = float(weight_N[start + place])
            assert w == 0 or w == pytest.approx(1 / wanted[place], rel=1e-6)
        slack = 1e-6 * sum(r * r for r in scores)
        assert float(plan.variance_E[e]) == pytest.approx(variance(scores, wanted), rel=1e-5, abs=slack)
        start += len(rows)
    # Rows of nobody are never kept.
    assert kept.index_M.numel() == 0 or int(kept.index_M[-1]) < start


def test_scores_of_zero_never_displace_a_positive_one() -> None:
    scores = [0.0] * 20 + [1e-30, 1.0, 3.0]
    for selector in ("topq", "pps", "auto"):
        for step in range(50):
            assert set(one(scores, 3, selector, step)) == {20, 21, 22}
            assert {20, 21, 22} < set(one(scores, 7, selector, step))


def test_with_nothing_but_zeros_every_row_is_as_good_as_the_other() -> None:
    seen = set()
    for step in range(60):
        kept = one([0.0] * 6, 2, "pps", step)
        assert len(kept) == 2
        assert all(w == pytest.approx(3.0) for w in kept.values())
        seen |= set(kept)
    assert seen == set(range(6))


@pytest.mark.parametrize("flaw", [math.nan, math.inf])
@pytest.mark.parametrize("selector", SELECTORS)
def test_scores_that_are_not_finite_are_always_kept(selector: Any, flaw: float) -> None:
    scores = [1.0, flaw, 5.0, 2.0, 7.0, flaw, 1.0, 0.0]
    for step in range(20):
        kept = one(scores, 4, selector, step)
        assert len(kept) == 4
        assert {1, 5} < set(kept)
        assert kept[1] == kept[5] == 1.0
        assert all(math.isfinite(w) for w in kept.values())
        # More of them than quota: the quota is raised, the evidence is not dropped.
        assert set(one(scores, 1, selector, step)) == {1, 5}
        assert set(one(scores, 0, selector, step)) == {1, 5}
        assert set(one([flaw] * 3, 1, selector, step)) == {0, 1, 2}
    # The others are chosen as if the flawed rows were not there: the largest, or in proportion.
    if selector == "topq":
        assert set(one(scores, 4, selector)) == {1, 2, 4, 5}
    if selector == "pps":
        clean = pps_probabilities([1.0, 5.0, 2.0, 7.0, 1.0, 0.0], 2)
        kept = one(scores, 4, selector)
        for place, w in kept.items():
            if place not in (1, 5):
                assert w == pytest.approx(1 / clean[[0, 2, 3, 4, 6, 7].index(place)])


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("factor", [1e6, 1e-12, 2.0**-300])
def test_scaling_all_scores_changes_nothing(selector: Any, factor: float) -> None:
    """The loss may be scaled: the kept set and the weights stay."""
    generator = torch.Generator().manual_seed(3)
    load_E = torch.tensor([40, 0, 7, 90, 1])
    segments = Segments.from_loads(load_E, 140)
    score_N = torch.randn(140, generator=generator, dtype=torch.float64).exp()
    quota_E = torch.tensor([20, 0, 3, 70, 0])
    for step in range(10):
        first = select(score_N, segments, quota_E, selector=selector, source=source((0, step, 0, 0), segments))
        scaled = select(
            score_N * factor, segments, quota_E, selector=selector, source=source((0, step, 0, 0), segments)
        )
        assert torch.equal(first.index_M, scaled.index_M)
        assert torch.allclose(first.weight_M, scaled.weight_M, rtol=1e-9)


def test_the_draw_is_a_function_of_position_and_expert_alone() -> None:
    """An expert's choice does not depend on the other experts, nor on what was selected before."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.rand(3, 30, generator=generator, dtype=torch.float64).tolist()
    for selector in ("pps", "random"):
        score_N, segments, quota_E = layout([(rows[0], 10), (rows[1], 12), (rows[2], 5)])
        together = chosen(
            select(score_N, segments, quota_E, selector=selector, source=source((9, 8, 7, 6), segments)), segments
        )  # type: ignore[arg-type]
        torch.rand(5)
        for others in ([([], 0), ([1.0] * 4, 2)], [([1.0] * 50, 3), ([2.0, 1.0], 1)]):
            score_N, segments, quota_E = layout([others[0], (rows[1], 12), others[1]])
            kept = select(score_N, segments, quota_E, selector=selector, source=source((9, 8, 7, 6), segments))  # type: ignore[arg-type]
            assert chosen(kept, segments)[1] == together[1]


def test_equal_experts_draw_independently() -> None:
    score_N, segments, quota_E = layout([([1.0] * 20, 10)] * 8)
    kept = chosen(select(score_N, segments, quota_E, selector="pps", source=source(NOW, segments)), segments)
    assert len({frozenset(places) for places in kept}) == 8


def test_auto_is_topq_where_the_variance_would_be_negligible_and_pps_elsewhere() -> None:
    concentrated = [100.0, 90.0, 80.0] + [1e-3] * 20
    spread = [1.0] * 23
    score_N, segments, quota_E = layout([(concentrated, 8), (spread, 8)])
    for step in range(20):
        position = (0, step, 0, 0)
        auto, pps, top = (
            select(score_N, segments, quota_E, selector=s, source=source(position, segments))  # type: ignore[arg-type]
            for s in ("auto", "pps", "topq")
        )
        assert chosen(auto, segments)[0] == chosen(top, segments)[0] == set(range(8))
        assert chosen(auto, segments)[1] == chosen(pps, segments)[1]
        weight_N = dict(zip(auto.index_M.tolist(), auto.weight_M.tolist(), strict=True))
        assert all(weight_N[row] == (1.0 if row < 23 else pytest.approx(23 / 8)) for row in weight_N)
    # Exactly at the documented share: V*/sum R just under and just over 0.005.
    for tail, is_top in ((0.02, True), (0.06, False)):
        rows = [1.0] + [tail] * 6
        share = variance(rows, pps_probabilities(rows, 4)) / sum(r * r for r in rows)
        assert (share < 0.005) == is_top
        assert all((set(one(rows, 4, "auto", step)) == {0, 1, 2, 3}) for step in range(20)) == is_top


def test_keep_all_is_every_row_of_every_expert() -> None:
    _, segments, _ = layout([([1.0] * 3, 0), ([], 0), ([1.0] * 2, 0)], nobody=4)
    kept = keep_all(segments)
    assert kept.index_M.tolist() == [0, 1, 2, 3, 4]
    assert kept.count_E.tolist() == [3, 0, 2]
    assert (kept.weight_M == 1).all()
