"""Curves from logged points: smoothing, and the mean and range over seeds. No plotting in here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

Values = list[float | None]
# Points that a curve is drawn through; longer ones are thinned.
MAX_POINTS = 1200


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

    def thinned(self, most: int) -> Curve:
        """At most about ``most`` points: the mean, the lowest and the highest of each run of neighbouring ones."""
        if len(self.steps) <= most:
            return self
        cut = parts(len(self.steps), most)
        whole = [all(self.mean[i] is not None for i in part) for part in cut]
        return Curve(
            steps=[self.steps[part[len(part) // 2]] for part in cut],
            mean=[mean(self.mean[i] for i in part) if ok else None for part, ok in zip(cut, whole, strict=True)],
            low=[min(_known(self.low, part)) if ok else None for part, ok in zip(cut, whole, strict=True)],
            high=[max(_known(self.high, part)) if ok else None for part, ok in zip(cut, whole, strict=True)],
        )


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


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values there are; None if there is none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def over_seeds(curves: list[tuple[list[int], Values]]) -> Curve:
    """Mean and range over seeds, at the steps that every seed logged."""
    by_step = [dict(zip(steps, values, strict=True)) for steps, values in curves if steps]
    shared = sorted(set.intersection(*(set(curve) for curve in by_step))) if by_step else []
    means: Values = []
    low: Values = []
    high: Values = []
    for step in shared:
        found = [curve[step] for curve in by_step]
        values = [value for value in found if value is not None]
        whole = len(values) == len(found)
        means.append(mean(values) if whole else None)
        low.append(min(values) if whole else None)
        high.append(max(values) if whole else None)
    return Curve(steps=shared, mean=means, low=low, high=high)


def _known(values: Values, part: range) -> list[float]:
    return [value for i in part if (value := values[i]) is not None]


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


def thin(steps: list[int], values: Values, most: int = MAX_POINTS) -> tuple[list[int], Values]:
    """A curve of at most about ``most`` points that reaches as low and as high as the whole one does.

    Of each run of neighbouring points the lowest and the highest stay, in their order, and a gap stays a gap.
    """
    if len(steps) <= most:
        return steps, values
    kept: list[int] = []
    for part in parts(len(steps), most // 2):
        known = [i for i in part if values[i] is not None]
        ends = {min(known, key=lambda i: values[i] or 0.0), max(known, key=lambda i: values[i] or 0.0)} if known else {}
        gap = next((i for i in part if values[i] is None), None)
        kept += sorted({*ends, *([gap] if gap is not None else [])})
    return [steps[i] for i in kept], [values[i] for i in kept]


def parts(length: int, most: int) -> list[range]:
    """``range(length)`` cut into at most ``most`` stretches whose lengths differ by one at most."""
    count = max(1, min(length, most))
    return [range(i * length // count, (i + 1) * length // count) for i in range(count)]


def thinned_by(length: int, most: int = MAX_POINTS) -> int | None:
    """How many points of a curve :func:`thin` puts together, at most; None if it leaves the curve alone."""
    return None if length <= most else math.ceil(length / (most // 2))
