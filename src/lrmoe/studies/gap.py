"""Whether a difference of paired runs is told from nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; from 9 on that of 9, which is stricter.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def student(seeds: int) -> float:
    """How many standard errors a mean of so many values, at least two, must be from nothing."""
    return _STUDENT[min(seeds - 1, len(_STUDENT)) - 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """How much more one variant loses than another.

    Attributes:
        mean: of the seeds' paired differences.
        error: its standard error; None for one seed.
        seeds: how many.
    """

    mean: float
    error: float | None
    seeds: int

    @property
    def sign(self) -> int:
        """1 or -1 where a t-test of the paired differences tells the gap from nothing at 95 %, else 0, also for one
        seed."""
        if self.error is None or abs(self.mean) <= student(self.seeds) * self.error:
            return 0
        return 1 if self.mean > 0 else -1

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + (" (one seed)" if self.error is None else f" ± {self.error:.4f}")


def gap_of(differences: Sequence[float]) -> Gap | None:
    """Of paired differences, one a seed; None if there is none, or one is not finite."""
    if not differences or not all(map(math.isfinite, differences)):
        return None
    several = len(differences) > 1
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if several else None
    return Gap(mean=sum(differences) / len(differences), error=error, seeds=len(differences))
