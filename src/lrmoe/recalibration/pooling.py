"""How a rank's kept pairs are shared among its experts by their relative importance, known in the backward alone.

The total is fixed in the forward, from the loads; only its split over the experts follows the gradients. With r the
square root of R, an expert's relative scores are x = r / sqrt(sum R): experts with large gradients get no more than
others. N rows in expert segments, E experts of one rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.config import Selector
from lrmoe.recalibration.design import Ranking, equal_scores
from lrmoe.recalibration.quota import level, round_up

# Every expert keeps half its pairs, or this many if that is less (and never more than its own quota).
POOLED_FLOOR = 64


def pooled_quotas(ranking: Ranking, quota_E: Tensor, selector: Selector) -> Tensor:
    """int64 (E,): ``quota_E`` split anew, with the same sum.

    ``topq`` takes the largest x of all experts above the floors, ties to the lower expert and row. The sampling
    selectors minimise the sum over experts of V*/sum R: inclusion probabilities min(1, x/theta) with one theta, and
    an expert's quota is their sum, at least its floor, made whole by largest remainder. For ``random`` the scores it
    samples by are equal, so that quotas go with the square root of the load.

    Non-finite rows are counted in first. Only where an expert has more of them than quota can the sum grow.

    Args:
        ranking: the rows of all experts of the rank.
        quota_E: int64, what each would keep on its own.
        selector: as in :func:`lrmoe.recalibration.selection.select`.
    """
    segments = ranking.segments
    load_E = segments.count_S[:-1]
    floor_E = torch.minimum(torch.minimum((load_E + 1) // 2, quota_E), torch.full_like(quota_E, POOLED_FLOOR))
    floor_E = torch.maximum(floor_E, ranking.flawed_E)
    total = torch.maximum(quota_E.sum(), floor_E.sum())
    size_N = _relative(equal_scores(ranking) if selector == "random" else ranking)
    if selector == "topq":
        return _largest(ranking, size_N, floor_E, total)
    share_E = _water_level(ranking, size_N, floor_E, total)
    return _whole(share_E, floor_E, load_E, total)


def _relative(ranking: Ranking) -> Tensor:
    """x of each ranked row, (N,) fp64; 0 for non-finite rows, rows of nobody, and where all of an expert's are 0."""
    segments = ranking.segments
    largest_N = segments.spread(segments.largest(ranking.score_N))
    # By the largest first: squares of the scores themselves need not be finite.
    scaled_N = torch.where(largest_N > 0, ranking.score_N / largest_N, 0.0)
    norm_N = segments.spread(segments.total(scaled_N.square()).sqrt())
    return torch.where(largest_N > 0, scaled_N / norm_N, 0.0)


def _largest(ranking: Ranking, size_N: Tensor, floor_E: Tensor, total: Tensor) -> Tensor:
    """The floors, and above them the largest of all until the total is reached."""
    segments = ranking.segments
    open_N = segments.live_N & (segments.position_N >= segments.spread(floor_E))
    order_N = torch.argsort(torch.where(open_N, size_N, -1.0), descending=True, stable=True)
    first_N = torch.arange(order_N.numel(), device=order_N.device) < total - floor_E.sum()
    chosen_N = torch.empty_like(first_N).scatter_(0, order_N, first_N)
    return floor_E + segments.total(chosen_N.to(torch.int64))


def _water_level(ranking: Ranking, size_N: Tensor, floor_E: Tensor, total: Tensor) -> Tensor:
    """fp64 (E,): max(floor, number of non-finite rows + sum min(1, x/theta)) with the theta at which they add up.

    Seen from a large theta down, an expert stands at its floor until min(1, x/theta) adds up to more, at a theta of its
    own; from there on a row is kept surely once theta has come down to its x. Between two such events the sum is
    C + B/theta, with C and B running sums over the events in order: one sort finds theta, without iteration.
    """
    segments = ranking.segments
    # Where each expert leaves its floor: the theta of its own design with the floor for a quota.
    free_E = floor_E - ranking.flawed_E
    open_N = segments.spread(free_E) - (segments.position_N - segments.spread(ranking.flawed_E))
    sure_N = (size_N > 0) & (open_N > 0) & (size_N * open_N >= segments.remaining_total(size_N))
    left_E = free_E - segments.total(sure_N.to(torch.int64))
    rest_E = segments.total(torch.where(sure_N, 0.0, size_N))
    leaves_E = torch.where(left_E > 0, rest_E / left_E, torch.where(free_E > 0, 0.0, torch.inf))
    # Of an expert whose floor is the non-finite rows alone, no row is sure when it leaves; rest / left is for others.
    at_N = torch.where(size_N < segments.spread(leaves_E), size_N, 0.0)
    done_E = segments.total(((size_N > 0) & (at_N == 0)).to(torch.float64))
    join_E = segments.total(at_N)
    step_E = ranking.flawed_E + done_E - floor_E

    theta_V = torch.cat([leaves_E, at_N])
    theta_V, order_V = torch.sort(theta_V, descending=True, stable=True)
    sure_V = torch.cat([step_E, (at_N > 0).to(torch.float64)]).index_select(0, order_V).cumsum(0)
    rest_V = torch.cat([join_E, -at_N]).index_select(0, order_V).cumsum(0).clamp(min=0.0)
    # What never happens lies at theta 0, at the end: there the sums are whole.
    kept_V = floor_E.sum() + sure_V + torch.where(theta_V > 0, rest_V / theta_V, 0.0)
    num = theta_V.numel()
    before = ((theta_V > 0) & (kept_V < total)).sum()
    # The state before event number `before` holds between its theta and that of the event ahead of it.
    zero = rest_V.new_zeros(1)
    rest = torch.cat([zero, rest_V])[before]
    sure = torch.cat([zero, sure_V])[before]
    lowest = torch.cat([theta_V, zero])[before.clamp(max=num)]
    highest = torch.cat([theta_V.new_full((1,), torch.inf), theta_V])[before]
    missing = total - floor_E.sum() - sure
    theta = torch.where(missing > 0, rest / missing, lowest)
    theta = torch.minimum(torch.maximum(theta, lowest), highest)
    chance_N = torch.where(size_N >= theta, torch.where(size_N > 0, 1.0, 0.0), size_N / theta)
    share_E = ranking.flawed_E + segments.total(torch.where(size_N > 0, chance_N, 0.0))
    return torch.maximum(share_E, floor_E.to(torch.float64))


def _whole(share_E: Tensor, floor_E: Tensor, load_E: Tensor, total: Tensor) -> Tensor:
    """``share_E`` in whole rows between ``floor_E`` and ``load_E`` that add up to ``total``: largest remainder, lower
    expert first."""
    quota_E = torch.minimum(torch.maximum(share_E.floor().to(torch.int64), floor_E), load_E)
    quota_E = round_up(quota_E, share_E - quota_E, load_E, total - quota_E.sum())
    # What the shares leave over are rows of score 0, of which one is as good as the other.
    quota_E = quota_E + level(load_E - quota_E, torch.clamp(total - quota_E.sum(), min=0))
    # Should rounding have given too much, the fullest give it back.
    return floor_E + level(quota_E - floor_E, total - floor_E.sum())
