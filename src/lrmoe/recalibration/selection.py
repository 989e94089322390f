"""Which pairs fill an expert's quota, and with what weight.

N rows in expert segments (see :mod:`segments`), M kept rows, E experts. Scores are r = sqrt(R), fp64.
A row with a non-finite score is always kept with weight 1, so that overflow checks still see it; where an expert has
more of them than quota, its quota is raised. Ties go to the lower row. Kept rows come in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.config import Selector
from lrmoe.recalibration import draws
from lrmoe.recalibration.design import Design, Ranking, design, equal_scores, rank
from lrmoe.recalibration.pooling import pooled_quotas
from lrmoe.recalibration.segments import Segments

# Under `auto`, an expert whose least sampling variance V* is below this share of its sum R is left to topq.
AUTO_VARIANCE_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Kept:
    """``index_M`` int64 kept rows, ascending; ``weight_M`` fp64, what their contribution is multiplied by;
    ``count_E`` int64 rows kept of each expert; ``variance_E`` fp64, V* of these scores at these counts."""

    index_M: Tensor
    weight_M: Tensor
    count_E: Tensor
    variance_E: Tensor


def select(
    score_N: Tensor,
    segments: Segments,
    quota_E: Tensor,
    *,
    selector: Selector,
    source: draws.Source,
    error_budget: float | None = None,
    pooled: bool = False,
) -> Kept:
    """Chooses ``quota_E`` rows of each expert.

    Args:
        score_N: r of each row, fp64, >= 0 (or not finite).
        segments: which rows belong to which expert.
        quota_E: int64, at most the expert's load.
        selector: ``topq`` the largest, weight 1; ``pps`` systematic sampling in proportion to r on a random
            permutation, weight 1/p (VarOpt-like: exactly the quota, distinct, unbiased); ``random`` the same with
            equal sizes; ``auto`` topq where V* < 0.005 sum R, else pps.
        source: keys the draws.
        error_budget: raises quotas until V* (topq: the dropped sum of R) is at most this share of the expert's sum R.
        pooled: the experts share the sum of their quotas by relative importance, see :mod:`pooling`.
    """
    ranking = rank(score_N, segments)
    if pooled:
        quota_E = pooled_quotas(ranking, quota_E, selector)
    quota_E = torch.maximum(quota_E, ranking.flawed_E)
    if error_budget is not None:
        quota_E = _raise_to_budget(ranking, quota_E, selector, error_budget)
    best = design(ranking, quota_E)
    probability_N = _probabilities(ranking, quota_E, selector, best)
    kept_ranks_N = probability_N > 0 if selector == "topq" else _systematic(ranking, probability_N, quota_E, source)
    weight_N = torch.where(kept_ranks_N, 1.0 / probability_N, 0.0)
    kept_N = torch.empty_like(kept_ranks_N).scatter_(0, ranking.order_N, kept_ranks_N)
    weight_N = torch.empty_like(weight_N).scatter_(0, ranking.order_N, weight_N)
    # The one place where the host learns how many rows there are.
    index_M = kept_N.nonzero().squeeze(-1)
    return Kept(index_M, weight_N.index_select(0, index_M), segments.total(kept_N.to(torch.int64)), best.variance_E)


def keep_all(segments: Segments) -> Kept:
    """Every row of every expert, with weight 1."""
    load_E = segments.count_S[:-1]
    index_M = segments.live_N.nonzero().squeeze(-1)
    one_M = torch.ones_like(index_M, dtype=torch.float64)
    return Kept(index_M, one_M, load_E, torch.zeros_like(load_E, dtype=torch.float64))


def _probabilities(ranking: Ranking, quota_E: Tensor, selector: Selector, sampled: Design) -> Tensor:
    """Inclusion probability of each ranked row; only 0 and 1 for topq."""
    segments = ranking.segments
    if selector == "pps":
        return sampled.probability_N
    if selector == "random":
        return design(equal_scores(ranking), quota_E).probability_N
    top_N = (segments.position_N < segments.spread(quota_E)).to(torch.float64)
    if selector == "topq":
        return top_N
    total_E = segments.total(ranking.score_N.square())
    negligible_E = sampled.variance_E < AUTO_VARIANCE_SHARE * total_E
    return torch.where(segments.spread(negligible_E), top_N, sampled.probability_N)


def _systematic(ranking: Ranking, probability_N: Tensor, quota_E: Tensor, source: draws.Source) -> Tensor:
    """Which ranked rows are kept, bool: those of probability 1, and of the others a systematic sample.

    The others lie on a line in random order, each as long as its probability, and every integer shifted by one
    uniform draw picks the row it falls into. Lengths under 1 that add up to an integer give exactly that many
    distinct rows.
    """
    segments = ranking.segments
    chance_N = torch.where(probability_N < 1.0, probability_N, 0.0)
    sure_N = probability_N >= 1.0
    free_E = quota_E - segments.total(sure_N.to(torch.int64))
    # Draws belong to the row's place in its expert's list of pairs, not to its rank.
    place_N = segments.position_N.index_select(0, ranking.order_N) + segments.spread(source.first_S)
    draw_N = draws.integer(segments.spread(source.keys(draws.PERMUTATION)), place_N)
    # Rows left to chance come last, so that what rounding does to the end of the line falls on one of them.
    shuffle_N = segments.ascending((draw_N >> 1) | ((chance_N > 0).to(torch.int64) << 62))
    offset_N = segments.spread(draws.uniform(source.keys(draws.OFFSET), source.first_S))
    end_N = segments.running_total(chance_N.index_select(0, shuffle_N))
    # The total is an integer but for rounding; say so exactly, or a row would be lost or gained at the end.
    limit_N = segments.spread(free_E.to(torch.float64))
    last_N = segments.position_N == segments.count_S.index_select(0, segments.of_N) - 1
    end_N = torch.where(last_N, limit_N, torch.minimum(end_N, limit_N))
    passed_N = torch.floor(end_N + offset_N)
    before_N = torch.cat([passed_N.new_zeros(1), passed_N])[:-1]
    before_N = torch.where(segments.position_N == 0, 0.0, before_N)
    return torch.empty_like(sure_N).scatter_(0, shuffle_N, passed_N > before_N) | sure_N


def _raise_to_budget(ranking: Ranking, quota_E: Tensor, selector: Selector, budget: float) -> Tensor:
    """The least quota >= ``quota_E`` at which each expert's error is within ``budget`` of its sum R."""
    segments = ranking.segments
    load_E = segments.count_S[:-1]
    total_E = segments.total(ranking.score_N.square())
    if selector == "topq":
        share_N = ranking.score_N.square() / segments.spread(total_E).clamp(min=torch.finfo(torch.float64).tiny)
        needed_N = (segments.remaining_total(share_N) > budget) | (
            segments.position_N < segments.spread(ranking.flawed_E)
        )
        return torch.minimum(torch.maximum(quota_E, segments.total(needed_N.to(torch.int64))), load_E)
    if selector == "random":
        # Sampling q of n evenly has variance (n/q - 1) sum R.
        # In fp64: an int64 tensor over a float would take the default dtype.
        needed_E = torch.ceil(load_E.to(torch.float64) / (1.0 + budget)).to(torch.int64)
        return torch.minimum(torch.maximum(quota_E, needed_E), load_E)
    # V* falls as the quota rises from 1 on: bisect between the quota and the load, all experts at once.
    low_E = torch.maximum(quota_E, ranking.flawed_E + (total_E > 0).to(torch.int64))
    high_E = load_E.clone()
    for _ in range(max(1, segments.of_N.numel().bit_length())):
        middle_E = (low_E + high_E) // 2
        enough_E = design(ranking, middle_E).variance_E <= budget * total_E
        high_E = torch.where(enough_E, middle_E, high_E)
        low_E = torch.where(enough_E, low_E, torch.minimum(middle_E + 1, high_E))
    return high_E
