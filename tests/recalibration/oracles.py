"""Selection as one would write it with lists and plain loops; what the tensor code is held against.

r = sqrt(R) are the scores of one expert's pairs, q its quota.
"""

from __future__ import annotations

import torch

from lrmoe.recalibration.draws import Source
from lrmoe.recalibration.segments import Segments


def source(position: tuple[int, int, int, int], segments: Segments) -> Source:
    """The draws of segments that are whole experts."""
    return Source.of_all(position, segments.count_S.numel() - 1, torch.device("cpu"))


def pps_probabilities(r: list[float], q: int) -> list[float]:
    """Inclusion probabilities min(1, r/theta) that add up to q: the largest are made sure, one after the other, while
    their probability would be 1, or so close to it that the rest weighs less than fp32 can tell. Pairs of score 0
    share evenly what the others leave of the quota."""
    order = sorted(range(len(r)), key=lambda i: -r[i])
    p = [0.0] * len(r)
    left = q
    while order and left > 0:
        total = sum(r[i] for i in order)
        if total == 0:
            for i in order:
                p[i] = left / len(order)
            break
        if r[order[0]] * left < total * (1 - 1e-7):
            for i in order:
                p[i] = r[i] * left / total
            break
        p[order.pop(0)] = 1.0
        left -= 1
    return p


def variance(r: list[float], p: list[float]) -> float:
    """sum R (1/p - 1): the variance of the sum of kept contributions times 1/p, for incoherent contributions. A pair
    that is never kept is missing from the sum: R."""
    return sum(ri * ri * (1.0 / pi - 1.0 if pi > 0 else 1.0) for ri, pi in zip(r, p, strict=True))


def floored(r: list[float]) -> list[float]:
    """The documented floor of the sampling: a positive score counts as at least 1e-7 of the largest."""
    return [max(ri, 1e-7 * max(r)) if ri > 0 else 0.0 for ri in r]


def top_q(r: list[float], q: int) -> set[int]:
    """The q largest, ties to the lower index."""
    return set(sorted(range(len(r)), key=lambda i: (-r[i], i))[:q])


def level_quotas(loads: list[int], target: int) -> list[int]:
    """One pair at a time is dropped where most are left; among equals where the load is smallest, the index highest."""
    quota = list(loads)
    while sum(quota) > target:
        fullest = max(range(len(loads)), key=lambda e: (quota[e], -loads[e], e))
        quota[fullest] -= 1
    return quota
