"""Curves from logged points: smoothing, and the mean and range over seeds. No plotting in here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

Values = list[float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Mean, lowest and highest value over seeds at each step; None where a seed has no finite value."""

    steps: list[int]
    mean: Values
    low: Values
    high: Values

    @property
    def has_band(self) -> bool:
        return any(low is not None and low != high for low, high in zip(self.low, self.high, strict=True))


def smooth(values: list[float]) -> Values:
    """Centred moving average over a 25th of the run, so that a 400-step curve still shows its bends.

    The window shrinks at both ends. Values that are not finite give None wherever the window touches them: an average
    that skipped them would hide a divergence.
    """
    half = len(values) // 50
    out: Values = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        out.append(sum(window) / len(window) if all(map(math.isfinite, window)) else None)
    return out


def finite(values: Iterable[float]) -> Values:
    """Values with None, which JSON and plotly know, for what is not finite."""
    return [value if math.isfinite(value) else None for value in values]


def over_seeds(curves: list[tuple[list[int], Values]]) -> Curve:
    """Mean and range over seeds, at the steps that every seed logged."""
    by_step = [dict(zip(steps, values, strict=True)) for steps, values in curves if steps]
    shared = sorted(set.intersection(*(set(curve) for curve in by_step))) if by_step else []
    mean: Values = []
    low: Values = []
    high: Values = []
    for step in shared:
        found = [curve[step] for curve in by_step]
        values = [value for value in found if value is not None]
        whole = len(values) == len(found)
        mean.append(math.fsum(values) / len(values) if whole else None)
        low.append(min(values) if whole else None)
        high.append(max(values) if whole else None)
    return Curve(steps=shared, mean=mean, low=low, high=high)


def difference(
    steps: list[int], values: list[float], base_steps: list[int], base: list[float]
) -> tuple[list[int], Values]:
    """Values minus the base's at the steps that both have."""
    at = dict(zip(base_steps, base, strict=True))
    pairs = [(step, value - at[step]) for step, value in zip(steps, values, strict=True) if step in at]
    return [step for step, _ in pairs], finite(value for _, value in pairs)


def first_not_finite(steps: list[int], values: list[float]) -> int | None:
    """The first step whose value is NaN or infinite, or None."""
    return next((step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)), None)
