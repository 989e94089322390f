"""The order of an expert's rows, and the sampling design of least variance that fills its quota.

N rows in expert segments (see :mod:`segments`), E experts. Scores are r = sqrt(R), fp64. Rows with a non-finite score
head their expert and are always kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.recalibration.segments import Segments

# A positive score counts as at least this fraction of its expert's largest: keeps running sums meaningful over any
# range of scores. It changes inclusion probabilities of negligible rows, never the expectation (the weight is 1/p).
_SCORE_FLOOR = 1e-7
# A row whose inclusion probability is this close to 1 is kept surely, so that rounding cannot make the systematic
# sample pass over it twice.
_SURE_MARGIN = 1e-7


@dataclass(frozen=True, slots=True)
class Design:
    """Fixed-size sampling in proportion to size: ``probability_N`` fp64 inclusion probabilities that add up to the
    quota, ``variance_E`` fp64 V*, the variance of sum sampled w G."""

    probability_N: Tensor
    variance_E: Tensor


@dataclass(frozen=True, slots=True)
class Ranking:
    """Rows of each expert from the largest score to the smallest; computed once, used by every selector.

    ``order_N`` row indices; ``score_N`` fp64 scores in that order, floored, 0 for non-finite rows and rows of nobody;
    ``flawed_E`` int64, how many non-finite rows head each expert's segment.
    """

    segments: Segments
    order_N: Tensor
    score_N: Tensor
    flawed_E: Tensor


def rank(score_N: Tensor, segments: Segments) -> Ranking:
    """Orders rows by score; NaN and infinite ones first."""
    live_N = segments.live_N
    flawed_N = live_N & ~torch.isfinite(score_N)
    clean_N = torch.where(live_N & ~flawed_N, score_N, 0.0)
    floor_N = segments.spread(segments.largest(clean_N)) * _SCORE_FLOOR
    clean_N = torch.where(clean_N > 0, torch.maximum(clean_N, floor_N), 0.0)
    order_N = segments.descending(torch.where(flawed_N, math.inf, torch.where(live_N, score_N, 0.0)))
    return Ranking(segments, order_N, clean_N.index_select(0, order_N), segments.total(flawed_N.to(torch.int64)))


def design(ranking: Ranking, quota_E: Tensor) -> Design:
    """Inclusion probabilities p = min(1, r / theta) with sum p = quota, and their V*.

    With c rows kept surely (p = 1) and B the sum of r over the rest, theta = B / (quota - c) and
    V* = B^2 / (quota - c) - sum_rest R. Rows are sure from the top while r (quota - i) >= sum of r from row i on.
    Rows of score 0 share what the others leave of the quota evenly. An expert that keeps nothing counts with its sum R:
    all of it is missing from the gradient.
    """
    segments, score_N = ranking.segments, ranking.score_N
    total_N = segments.spread(segments.total(score_N))
    share_N = torch.where(total_N > 0, score_N / total_N, 0.0)
    clean_rank_N = segments.position_N - segments.spread(ranking.flawed_E)
    flawed_N = (clean_rank_N < 0) & segments.live_N
    open_N = segments.spread(quota_E - ranking.flawed_E) - clean_rank_N
    remaining_N = segments.remaining_total(share_N)
    sure_N = (share_N > 0) & (open_N > 0) & (share_N * open_N >= remaining_N * (1.0 - _SURE_MARGIN))
    rest_N = segments.live_N & ~sure_N & ~flawed_N
    free_E = quota_E - ranking.flawed_E - segments.total(sure_N.to(torch.int64))
    rest_share_E = segments.total(torch.where(rest_N, share_N, 0.0))
    rest_count_E = segments.total(rest_N.to(torch.int64))
    # With nothing but zero scores left, each remaining row is as good as the other.
    size_N = torch.where(segments.spread(rest_share_E) > 0, share_N, 1.0)
    size_E = torch.where(rest_share_E > 0, rest_share_E, rest_count_E.to(torch.float64))
    chance_N = size_N * segments.spread(free_E / size_E.clamp(min=torch.finfo(torch.float64).tiny))
    probability_N = torch.where(rest_N, chance_N, (sure_N | flawed_N).to(torch.float64))
    surplus_N = torch.where(chance_N > 0, 1.0 / chance_N - 1.0, 1.0)
    variance_N = torch.where(rest_N, score_N.square() * surplus_N, 0.0)
    return Design(probability_N, segments.total(variance_N))


def equal_scores(ranking: Ranking) -> Ranking:
    """The same rows with score 1 wherever the score is finite."""
    segments = ranking.segments
    clean_N = segments.live_N & (segments.position_N >= segments.spread(ranking.flawed_E))
    return Ranking(segments, ranking.order_N, clean_N.to(torch.float64), ranking.flawed_E)
