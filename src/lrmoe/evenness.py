"""How even loads are: the one measure that metrics, studies and pages share."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def max_over_mean(loads: Sequence[int] | Sequence[float] | Sequence[Fraction]) -> float | None:
    """The largest load over the mean of the same loads, at least 1.

    Args:
        loads: not negative; of ranks or of experts, rows or kept rows, but of one kind: rows that were kept are held
            against the mean of those that were kept.

    Returns:
        1 where all are the same, so also for a single one; None where there is no load, which is neither even nor
        uneven.
    """
    total = sum(loads)
    # Rounding of a mean of floats must not bring an even load below 1.
    return max(float(max(loads) * len(loads) / total), 1.0) if total else None


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """The mean of those that are known, say of several :func:`max_over_mean` over what has a load; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
