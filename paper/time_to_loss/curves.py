"""From the curves of the study of time to loss to its numbers: pure functions of records."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lrmoe.studies.gap import gap_of
from paper.time_to_loss.run import Contender

Row = dict[str, Any]
Cell = Mapping[str, Any]
# Steps that a median of step times goes over; odd.
MEDIAN_STEPS = 21


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Where contenders meet. The first of them is plain training, whose losses are the targets."""

    name: str
    title: str
    ranks: int
    balance_loss_weight: float
    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...]


Curve = Sequence[tuple[float, float]]


def loss_at(curve: Curve, step: float) -> float:
    """The loss of a curve of (steps, loss), rising in steps, by linear interpolation; its ends outside of it."""
    before = max((point for point in curve if point[0] <= step), default=curve[0])
    after = min((point for point in curve if point[0] > step), default=before)
    if after[0] <= before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (step - before[0]) / (after[0] - before[0])


def steps_to(curve: Curve, target: float) -> float | None:
    """After how many steps a curve, interpolated, is first at or below ``target``; None if it never is. A loss that is
    not a number is not below anything, and neither is what leads to it."""
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (start, high), (end, low) in itertools.pairwise(curve):
        if low <= target:
            return start + (end - start) * (high - target) / (high - low) if high > target else end
    return None


def until(seconds: Sequence[float], steps: float) -> float:
    """Seconds of so many steps, of the last one in part."""
    whole = int(steps)
    return sum(seconds[:whole]) + (steps - whole) * (seconds[whole] if whole < len(seconds) else 0.0)


def without_spikes(seconds: Sequence[float]) -> list[float]:
    """Each step's time replaced by the median of those around it (:data:`MEDIAN_STEPS` of them, fewer at the ends)."""
    half = MEDIAN_STEPS // 2
    return [statistics.median(seconds[max(0, step - half) : step + half + 1]) for step in range(len(seconds))]


def seconds_of(contender: Mapping[str, Any]) -> list[float]:
    """MoE-layer seconds of each step: computation and transfers, none of them overlapped."""
    return [c + t for c, t in zip(contender["compute_s"], contender["transfer_s"], strict=True)]


def reach(cell: Cell, *, share: float) -> dict[str, Row]:
    """How each contender of a cell comes to the validation loss that the first has after ``share`` of its steps.

    Returns:
        by name: ``target``, ``steps`` and ``seconds`` until there and ``steady`` (the same without spikes), the last
        three None where the loss is never reached.
    """
    first = cell["contenders"][0]
    target = loss_at(first["validation"], share * len(first["losses"]))
    found = {}
    for contender in cell["contenders"]:
        steps = steps_to(contender["validation"], target)
        seconds = seconds_of(contender)
        found[contender["name"]] = {
            "target": target,
            "steps": steps,
            "seconds": None if steps is None else until(seconds, steps),
            "steady": None if steps is None else until(without_spikes(seconds), steps),
        }
    return found


def target_rows(setting: Setting, cells: Sequence[Cell], *, share: float) -> list[Row]:
    """One row a contender: means over seeds of steps and minutes, and of the paired ratios of time.

    A contender that does not reach the target with every seed has no numbers, since the seeds that do would flatter it;
    ``reached`` says with how many.
    """
    seeds = [reach(cell, share=share) for cell in cells]
    names = [contender.name for contender in setting.contenders]
    rows = []
    for contender in setting.contenders:
        mine = [seed[contender.name] for seed in seeds]
        there = [one for one in mine if one["steps"] is not None]
        row: Row = {
            "share": share,
            "loss": statistics.fmean(one["target"] for one in mine),
            "variant": contender.name,
            "role": contender.role,
            "reached": f"{len(there)} of {len(mine)} seeds" if there else "not reached",
            "steps": None,
            "minutes": None,
        }
        whole = len(there) == len(mine)
        if whole:
            row["steps"] = statistics.fmean(one["steps"] for one in mine)
            row["minutes"] = statistics.fmean(one["seconds"] for one in mine) / 60
        for against in names:
            others = [seed[against] for seed in seeds]
            if not whole or any(other["steps"] is None for other in others):
                row[f"over {against}"] = row[f"each over {against}"] = row[f"steady over {against}"] = None
                continue
            each = [one["seconds"] / other["seconds"] for one, other in zip(mine, others, strict=True)]
            row[f"each over {against}"] = each
            row[f"over {against}"] = statistics.fmean(each)
            row[f"steady over {against}"] = statistics.fmean(
                one["steady"] / other["steady"] for one, other in zip(mine, others, strict=True)
            )
        first = row[f"each over {names[0]}"]
        row["range"] = f"{min(first):.2f} to {max(first):.2f}" if first and len(first) > 1 else ""
        row["steady"] = row[f"steady over {names[0]}"]
        rows.append(row)
    return rows


def verdict(setting: Setting, rows: Sequence[Row]) -> Row:
    """The recommended recipe against every baseline at one target.

    Returns:
        ``share``, ``loss``; ``fastest`` (the baseline with the least mean time); ``recipe`` and ``ratio`` (its time
        over that baseline's, mean of the pairs; None where it does not reach the loss); ``quickest`` and
        ``quickest_ratio`` (the same of the fastest of our variants); ``beaten`` (how many baselines the recipe is
        faster than on average) of ``baselines``; ``seeds`` (in how many it is faster than all of them) of
        ``of_seeds``; ``wins``; and ``apart``: -1 where a t-test of the paired ratios tells the recipe from every
        baseline as faster, 1 where it tells it from one as slower, or it does not reach the loss, else 0.
    """
    recipe = next(row for row in rows if row["role"] == "recipe")
    reaching = [row for row in rows if row["minutes"] is not None]
    baselines = [row for row in reaching if row["role"] == "baseline"]
    fastest = min(baselines, key=lambda row: row["minutes"])
    ours = [row for row in reaching if row["role"] in ("recipe", "variant")]
    quickest = min(ours, key=lambda row: row["minutes"], default=None)
    ratios = [recipe[f"over {row['variant']}"] for row in baselines]
    each = [recipe[f"each over {row['variant']}"] for row in baselines]
    reached = recipe["minutes"] is not None
    signs = [0 if found is None else found.sign for found in map(gap_of, _above_one(each))] if reached else [1]
    beaten = sum(ratio < 1 for ratio in ratios) if reached else 0
    return {
        "setting": setting.title,
        "share": recipe["share"],
        "loss": recipe["loss"],
        "recipe": recipe["variant"],
        "fastest": fastest["variant"],
        "ratio": recipe[f"over {fastest['variant']}"],
        "steady": recipe[f"steady over {fastest['variant']}"],
        "quickest": None if quickest is None else quickest["variant"],
        "quickest_ratio": None if quickest is None else quickest[f"over {fastest['variant']}"],
        "beaten": beaten,
        "baselines": len(baselines),
        "seeds": sum(max(column) < 1 for column in zip(*each, strict=True)) if reached else 0,
        "of_seeds": len(setting.seeds),
        "wins": reached and beaten == len(baselines),
        "apart": 1 if 1 in signs else -1 if all(sign == -1 for sign in signs) else 0,
    }


def _above_one(each: Sequence[Sequence[float] | None]) -> list[list[float]]:
    """Paired ratios minus one, none of a baseline that has none."""
    return [[ratio - 1 for ratio in ratios or ()] for ratios in each]
