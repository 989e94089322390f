"""Whether a difference to no drop can be told from the seeds' own differences, and what follows for a user."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lrmoe.report.text import fixed, signed
from lrmoe.studies.gap import gap_of

SAME_TIME = 1.03
"""Times closer than this are not told apart: medians of one machine vary by about as much."""
Kind = Literal["within", "worse", "better", "alone", "missing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A variant against the one without drop.

    Args:
        name: the variant.
        differences: its loss minus the baseline's, seed by seed; finite.
        spread: highest minus lowest seed of the baseline; None with one seed.
        seconds: of its MoE layers in a step; None where not measured.
    """

    name: str
    differences: tuple[float, ...]
    spread: float | None
    seconds: float | None = None

    @property
    def mean(self) -> float | None:
        """Mean difference; None if there is none to take."""
        return math.fsum(self.differences) / len(self.differences) if self.differences else None

    @property
    def kind(self) -> Kind:
        """``within`` the spread, ``worse`` or ``better`` by more than it, ``alone`` with one seed, or ``missing``."""
        if self.mean is None:
            return "missing"
        if self.spread is None:
            return "alone"
        if abs(self.mean) <= self.spread:
            return "within"
        return "worse" if self.mean > 0 else "better"

    @property
    def leans(self) -> str:
        """``worse`` or ``better`` where at least three seeds agree in sign although their mean is within the spread:
        pairs of one seed share start and data, so their differences tell more than the spread does."""
        if self.kind != "within" or len(self.differences) < 3:
            return ""
        if all(value > 0 for value in self.differences):
            return "worse"
        return "better" if all(value < 0 for value in self.differences) else ""


def finite_differences(mine: Sequence[float | None], base: Sequence[float | None]) -> tuple[float, ...]:
    """Paired differences; none if any seed has no finite value, as a mean over the others would flatter."""
    pairs = list(zip(mine, base, strict=False))
    if not pairs or any(a is None or b is None or not math.isfinite(a - b) for a, b in pairs):
        return ()
    return tuple(a - b for a, b in pairs if a is not None and b is not None)


def recommended(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Of the variants that are not worse than the spread, the one with the lowest mean among those whose MoE layers are
    about as fast as the fastest of them; among all where a time was not measured. None if all are worse, or one seed
    cannot tell."""
    return min(_candidates(verdicts), key=lambda one: one.mean or 0.0, default=None)


def _candidates(verdicts: Sequence[Verdict]) -> list[Verdict]:
    fine = [one for one in verdicts if one.kind in ("within", "better")]
    times = [one.seconds for one in fine if one.seconds is not None]
    if fine and len(times) == len(fine):
        fine = [one for one in fine if one.seconds is not None and one.seconds <= SAME_TIME * min(times)]
    return fine


def _alike(best: Verdict, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Other candidates that no t-test of the paired differences tells from the best."""
    found = []
    for one in _candidates(verdicts):
        if one is best or len(one.differences) != len(best.differences):
            continue
        beyond = gap_of([a - b for a, b in zip(one.differences, best.differences, strict=True)])
        if beyond is None or beyond.sign == 0:
            found.append(one)
    return found


def told(one: Verdict) -> str:
    """``“C20 pps” (+0.012 nats; seed spread 0.030)``, as plain text."""
    if one.mean is None:
        return f"“{one.name}” (no finite loss of every seed)"
    spread = "" if one.spread is None else f"; seed spread {fixed(one.spread, 3)}"
    return f"“{one.name}” ({signed(one.mean, 3)} nats{spread})"


def advice(verdicts: Sequence[Verdict], base: str, base_seconds: float | None) -> list[str]:
    """What a user should do with a comparison, a sentence each, as plain text.

    Args:
        base: the variant without drop.
        base_seconds: of its MoE layers in a step.
    """
    if not verdicts:
        return [f"Train a variant with a drop beside “{base}”: there is nothing to compare it with."]
    said = []
    if all(one.kind in ("alone", "missing") for one in verdicts) and any(one.kind == "alone" for one in verdicts):
        return [
            "Do not choose between these variants yet: one seed cannot tell a cost of dropping from chance. "
            "Run the comparison again with --seeds 0,1,2.",
            *_missing(verdicts),
        ]
    best = recommended(verdicts)
    if best is not None:
        said += _use(best, base, base_seconds)
        alike = _alike(best, verdicts)
        if alike and not said[0].startswith("Keep"):
            names = _listed([f"“{one.name}”" for one in alike])
            said.append(
                f"Do not read an order into these: {names} {'is' if len(alike) == 1 else 'are'} as fast, and not told "
                f"from “{best.name}” seed by seed."
            )
    elif any(one.kind == "worse" for one in verdicts):
        said.append(
            f"Keep “{base}”: every variant that drops ends above it by more than its seeds lie apart. Try a lower "
            "drop, warm-up steps without drop, or a dense tail (--warmup-steps, --final-dense-steps)."
        )
    worse = [one for one in verdicts if one.kind == "worse"]
    if worse and best is not None:
        said.append(f"Do not use {_listed([told(one) for one in worse])} here: worse by more than the seeds lie apart.")
    seeds = max(len(one.differences) for one in verdicts)
    if seeds == 2:
        said.append("Two seeds give a rough spread: repeat with a third before relying on a small difference.")
    return said + _missing(verdicts)


def _use(best: Verdict, base: str, base_seconds: float | None) -> list[str]:
    if best.kind == "better":
        how = (
            "it ended below no drop by more than the seeds lie apart, which calls for more seeds before it is believed"
        )
    else:
        how = "its difference to no drop cannot be told from the seed spread"
    if best.leans:
        how += f", although every seed leans to {best.leans}"
    if best.seconds is not None and base_seconds:
        saved = 1 - best.seconds / base_seconds
        if best.seconds * SAME_TIME > base_seconds:
            return [
                f"Keep “{base}”. {told(best)} does no measurable harm, but its MoE layers are not faster here "
                f"({_milliseconds(best.seconds)} against {_milliseconds(base_seconds)} a step)."
            ]
        if len(best.differences) < 3:
            return [
                f"Repeat {told(best)} with a third seed before you use it: {how}, and its MoE layers take "
                f"{fixed(100 * saved, 0)} % less time ({_milliseconds(best.seconds)} against "
                f"{_milliseconds(base_seconds)} a step)."
            ]
        return [
            f"Use {told(best)} for runs like this one: {how}, and its MoE layers take {fixed(100 * saved, 0)} % less "
            f"time ({_milliseconds(best.seconds)} against {_milliseconds(base_seconds)} a step)."
        ]
    return [f"{told(best)} is the one to try: {how}. Measure its time before you rely on it: none was recorded."]


def _missing(verdicts: Sequence[Verdict]) -> list[str]:
    names = [f"“{one.name}”" for one in verdicts if one.kind == "missing"]
    if not names:
        return []
    return [f"Look at the curves of {_listed(names)}: a seed has no finite validation loss. A lower --lr may mend it."]


def _milliseconds(seconds: float) -> str:
    return f"{fixed(1000 * seconds, 1)} ms"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
