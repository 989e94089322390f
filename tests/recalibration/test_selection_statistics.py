"""What the sampling promises on average: inclusion probabilities, no bias, the least variance, the error budget."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from experts.problem import expected, make, run
from hypothesis import given, settings
from hypothesis import strategies as st
from recalibration.oracles import floored, pps_probabilities, source, top_q, variance
from recalibration.test_selection import layout, one
from torch import Tensor

from lrmoe import LRMoEConfig
from lrmoe.recalibration.design import design, rank
from lrmoe.recalibration.segments import Segments
from lrmoe.recalibration.selection import select

SCORES = {
    "varied": [9.0, 3.0, 2.5, 2.0, 1.0, 1.0, 0.7, 0.5, 0.2, 0.1, 0.05, 0.0],
    "equal": [1.0] * 9,
    "one large": [1000.0] + [1.0] * 8,
    "any range": floored([10.0**-e for e in range(12)]),
}


def draws_of(scores: list[float], quota: int, selector: Any, steps: int, experts: int) -> tuple[Tensor, Tensor]:
    """(kept, weight) of ``steps * experts`` independent draws, one a row: many experts with the same scores."""
    n = len(scores)
    segments = Segments.from_loads(torch.full((experts,), n), n * experts)
    score_N = torch.tensor(scores, dtype=torch.float64).repeat(experts)
    quota_E = torch.full((experts,), quota)
    weights = []
    for step in range(steps):
        kept = select(score_N, segments, quota_E, selector=selector, source=source((0, step, 0, 0), segments))
        weights.append(torch.zeros(n * experts, dtype=torch.float64).scatter_(0, kept.index_M, kept.weight_M))
    weight_XN = torch.stack(weights).view(-1, n)
    return weight_XN > 0, weight_XN


@pytest.mark.parametrize("quota", [1, 4, 7])
@pytest.mark.parametrize("kind", list(SCORES))
@pytest.mark.parametrize("selector", ["pps", "random"])
def test_inclusion_frequencies_are_the_probabilities(selector: Any, kind: str, quota: int) -> None:
    """Binomial bounds: beyond 5 standard deviations with probability 6e-7."""
    scores = SCORES[kind]
    kept_XN, _ = draws_of(scores, quota, selector, steps=20, experts=500)
    p = torch.tensor(pps_probabilities(scores if selector == "pps" else [1.0] * len(scores), quota)).double()
    count = kept_XN.shape[0]
    bound_N = 5 * (p * (1 - p) / count).sqrt() + 1e-6
    assert ((kept_XN.double().mean(0) - p).abs() <= bound_N).all()
    # Such a bound is not empty: rows that are always or never drawn are so in each draw.
    assert (kept_XN[:, p > 1 - 1e-6]).all()


def test_pairs_of_rows_are_not_tied_together() -> None:
    """With equal scores any two rows are kept together about as often as under simple random sampling: the random
    permutation, not the order of the rows, decides who shares a draw."""
    kept_XN, _ = draws_of([1.0] * 10, 5, "pps", steps=20, experts=500)
    together = (kept_XN.double().T @ kept_XN.double()) / kept_XN.shape[0]
    wanted = 5 * 4 / (10 * 9)
    off = together[~torch.eye(10, dtype=torch.bool)]
    assert (off - wanted).abs().max() < 5 * (wanted * (1 - wanted) / kept_XN.shape[0]) ** 0.5


@pytest.mark.parametrize("selector", ["pps", "random"])
@pytest.mark.parametrize("kind", list(SCORES))
def test_the_variance_of_incoherent_contributions_is_the_formulas(selector: Any, kind: str) -> None:
    """Contributions at right angles: the squared error of a draw is sum R (w - 1)^2, its mean V*."""
    scores, quota = SCORES[kind], 4
    _, weight_XN = draws_of(scores, quota, selector, steps=20, experts=500)
    r = torch.tensor(scores, dtype=torch.float64)
    error_X = (r.square() * (weight_XN - 1).square()).sum(-1)
    p = pps_probabilities(scores if selector == "pps" else [1.0] * len(scores), quota)
    wanted = variance(scores, p)
    spread = float(error_X.std()) / error_X.numel() ** 0.5
    assert abs(float(error_X.mean()) - wanted) < 5 * spread + 1e-6 * float(r.square().sum())
    if selector == "pps":
        score_N, segments, quota_E = layout([(scores, quota)])
        formula = float(design(rank(score_N, segments), quota_E).variance_E)
        assert formula == pytest.approx(wanted, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.floats(0.01, 10.0), min_size=2, max_size=8),
    share=st.floats(0.1, 0.9),
    nudge=st.lists(st.floats(-0.2, 0.2), min_size=8, max_size=8),
)
def test_no_other_design_of_this_size_has_less_variance(rows: list[float], share: float, nudge: list[float]) -> None:
    """V* in closed form, B^2/(q - c) - sum_rest R, and below every other set of probabilities with the same sum."""
    q = max(1, int(share * len(rows)))
    score_N, segments, quota_E = layout([(rows, q)])
    least = float(design(rank(score_N, segments), quota_E).variance_E)
    p = pps_probabilities(rows, q)
    rest = [r for r, pi in zip(rows, p, strict=True) if pi < 1]
    free = q - (len(rows) - len(rest))
    closed = sum(rest) ** 2 / free - sum(r * r for r in rest) if rest else 0.0
    assert least == pytest.approx(closed, rel=1e-6, abs=1e-6 * sum(r * r for r in rows))
    other = [min(1.0, max(1e-3, pi + d)) for pi, d in zip(p, nudge, strict=False)]
    # Back to the same sum, within (0, 1], by moving each towards 1 or towards 0.
    excess = sum(other) - q
    if excess > 0:
        other = [pi * q / sum(other) for pi in other]
    else:
        room = sum(1 - pi for pi in other)
        other = [pi + (1 - pi) * (-excess / room if room else 0.0) for pi in other]
    assert sum(other) == pytest.approx(q)
    assert variance(rows, other) >= least * (1 - 1e-6) - 1e-9


@pytest.mark.parametrize("selector", ["pps", "random"])
def test_the_mean_gradient_over_draws_is_the_exact_one(selector: Any) -> None:
    """Weights, biases, input: the mean over 250 steps lies within 5.5 standard errors of the gradient without drop
    (4e-8 per number, 700 numbers). The same bound refutes top-q, which is biased by design."""
    problem = make(tokens=24, dim=6, width=5, experts=3, bias=True, seed=2)
    exact = expected(problem).grads

    def deviation(selector: Any, steps: int) -> dict[str, float]:
        config = LRMoEConfig(drop=0.5, selector=selector, router_grad="exact")
        grads = [run(problem, config, step=step).grads for step in range(steps)]
        worst = {}
        for name, wanted in exact.items():
            samples = torch.stack([g[name] for g in grads])
            error = samples.std(0) / steps**0.5 + 1e-9 * wanted.abs().max()
            worst[name] = float(((samples.mean(0) - wanted).abs() / error).max())
        return worst

    found = deviation(selector, 250)
    assert max(found.values()) < 5.5, found
    biased = deviation("topq", 2)
    assert biased["down_proj"] > 100
    assert biased["x_TD"] > 100


def test_an_expert_that_keeps_nothing_counts_with_all_of_its_importance() -> None:
    score_N, segments, quota_E = layout([([2.0, 1.0], 0), ([2.0, 1.0], 2), ([], 0)])
    assert design(rank(score_N, segments), quota_E).variance_E.tolist() == [5.0, 0.0, 0.0]


def budgeted(scores: list[float], quota: int, selector: Any, budget: float) -> int:
    return len(one(scores, quota, selector, error_budget=budget))


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(st.one_of(st.floats(0.01, 10.0), st.just(0.0)), min_size=1, max_size=12),
    share=st.floats(0.0, 1.0),
    budget=st.sampled_from([0.0, 1e-3, 0.025, 0.1, 0.5, 2.0]),
)
def test_an_error_budget_gives_the_least_quota_that_meets_it(rows: list[float], share: float, budget: float) -> None:
    base = int(share * len(rows))
    total = sum(r * r for r in rows)
    allowed = budget * total

    def error(selector: str, q: int) -> float:
        if selector == "topq":
            return sum(r * r for i, r in enumerate(rows) if i not in top_q(rows, q))
        p = pps_probabilities(rows if selector == "pps" else [1.0] * len(rows), q)
        if any(pi == 0 and r > 0 for pi, r in zip(p, rows, strict=True)):
            return math.inf
        return variance(rows, p)

    for selector in ("topq", "pps", "random"):
        q = budgeted(rows, base, selector, budget)
        assert q >= base
        if total == 0:
            continue
        slack = 1e-6 * total
        assert error(selector, q) <= allowed + slack
        if q > base:
            assert error(selector, q - 1) > allowed - slack


def test_a_budget_of_nothing_keeps_whatever_counts() -> None:
    rows = [3.0, 0.0, 1.0, 1e-5, 0.0, 2.0]
    assert set(one(rows, 1, "topq", error_budget=0.0)) == {0, 2, 3, 5}
    assert set(one(rows, 1, "pps", error_budget=0.0)) == {0, 2, 3, 5}
    assert len(one(rows, 1, "random", error_budget=0.0)) == 6


def test_a_budget_never_lowers_a_quota_and_knows_flawed_rows() -> None:
    rows = [3.0, math.nan, 1.0, 1.0, math.inf]
    for selector in ("topq", "pps", "random", "auto"):
        assert budgeted(rows, 4, selector, 100.0) == 4
        assert {1, 4} <= set(one(rows, 0, selector, error_budget=0.01))
        assert budgeted(rows, 0, selector, 0.0) == 5


def test_a_budget_in_training_drops_less_where_errors_are_larger() -> None:
    problem = make(tokens=60)
    counts = {}
    for budget in (None, 10.0, 0.05, 0.0):
        call = run(problem, LRMoEConfig(drop=0.9, error_budget=budget)).call
        assert call is not None
        counts[budget] = int(call.kept_TK.sum())
    assert counts[None] == 12
    assert counts[None] <= counts[10.0] < counts[0.05] < counts[0.0] == 120
