"""One row of numbers for every variant: from ``summary.json``, or from the logged lines while that is not there."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from lrmoe.experts.meter import SECONDS, SHARES
from lrmoe.report.run_folder import Run, Training

# What a row of summary.json may have. ``saved_bytes`` is what one microbatch's forward saves in the MoE layers; a
# single run tells those and the whole model's in one object.
_COLUMNS = (
    "eval_loss",
    "eval_loss_spread",
    "eval_loss_difference",
    "train_loss",
    "train_loss_spread",
    "train_loss_difference",
    *SHARES,
    *SECONDS,
    "forward_ratio",
    "backward_ratio",
    "saved_bytes",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One variant. ``values`` has the columns that are known, seconds per optimizer step; ``differences`` the
    validation loss minus the baseline's, seed by seed."""

    variant: str
    values: dict[str, float]
    differences: list[float] = field(default_factory=list)

    def get(self, column: str) -> float | None:
        return self.values.get(column)


def rows_of(run: Run, baseline: str | None) -> list[Row]:
    """One row a variant, in the order of the lines.

    Raises:
        ValueError: if ``summary.json`` has rows that are not what a comparison writes.
    """
    told = run.summary or {}
    path = run.path / "summary.json"
    if run.is_comparison and "rows" in told:
        if not isinstance(told["rows"], list) or not all(isinstance(row, dict) for row in told["rows"]):
            raise ValueError(f"{path}: rows must be a list of objects")
        by_name = {
            row.get("variant"): _read(row, row.get("variant"), f"{path}, rows[{i}]")
            for i, row in enumerate(told["rows"])
        }
        missing = [variant for variant in run.variants if variant not in by_name]
        if missing:
            raise ValueError(f"{path}: rows lacks the variant {missing[0]!r}, which metrics.jsonl has")
        return [by_name[variant] for variant in run.variants]
    rows = [_from_lines(run, variant, baseline) for variant in run.variants]
    if not run.is_comparison and rows:
        rows[0].values.update(_read(told, rows[0].variant, str(path)).values)
    return rows


def _read(told: dict[str, Any], variant: object, where: str) -> Row:
    if not isinstance(variant, str):
        raise ValueError(f"{where}: variant={variant!r} must be a string")
    values = {
        column: _number(told[column], column, where) for column in _COLUMNS if _plain(told.get(column)) is not None
    }
    saved = told.get("saved_bytes")
    if isinstance(saved, dict) and saved.get("moe") is not None:
        values["saved_bytes"] = _number(saved["moe"], "saved_bytes.moe", where)
    differences = told.get("eval_loss_differences") or []
    if not isinstance(differences, list):
        raise ValueError(f"{where}: eval_loss_differences must be a list")
    each = [_number(value, "eval_loss_differences", where) for value in differences if value is not None]
    return Row(variant=variant, values=values, differences=each)


def _plain(value: object) -> object:
    return None if isinstance(value, dict) else value


def _number(value: object, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where}: {name}={value!r} must be a number")
    return float(value)


def _from_lines(run: Run, variant: str, baseline: str | None) -> Row:
    """Last validation loss; means over all steps; seconds as the median over log intervals, as summaries have them."""
    trainings = run.of(variant)
    base = {training.seed: _last(training, "eval_loss") for training in run.of(baseline)} if baseline else {}
    values: dict[str, float] = {}
    last = [value for training in trainings if (value := _last(training, "eval_loss")) is not None]
    if last:
        values["eval_loss"] = math.fsum(last) / len(last)
    if len(last) > 1:
        values["eval_loss_spread"] = max(last) - min(last)
    differences = [
        value - reference
        for training in trainings
        if (value := _last(training, "eval_loss")) is not None and (reference := base.get(training.seed)) is not None
    ]
    if differences:
        values["eval_loss_difference"] = math.fsum(differences) / len(differences)
    for column in SHARES:
        pairs = [pair for training in trainings for pair in _intervals(training, column)]
        weighted = [pair for pair in pairs if math.isfinite(pair[0])]
        if weighted:
            values[column] = math.fsum(v * n for v, n in weighted) / sum(n for _, n in weighted)
    for column in SECONDS:
        seconds = seconds_a_step(trainings, column)
        if seconds is not None:
            values[column] = seconds
    return Row(variant=variant, values=values, differences=differences)


def seconds_a_step(trainings: list[Training], column: str) -> float | None:
    """Median seconds of one optimizer step, mean over trainings. A line holds the sum since the line before."""
    medians = []
    for training in trainings:
        a_step = [seconds / steps for seconds, steps in _intervals(training, column)]
        if a_step:
            medians.append(statistics.median(a_step))
    return math.fsum(medians) / len(medians) if medians and any(medians) else None


def _intervals(training: Training, column: str) -> list[tuple[float, int]]:
    """Each value of a column with the number of steps it stands for."""
    steps, values = training.series(column)
    return [(v, n) for v, n in zip(values, _gaps(steps), strict=True) if n > 0]


def _gaps(steps: list[int]) -> list[int]:
    return [step - before for before, step in zip([0, *steps], steps, strict=False)]


def _last(training: Training, column: str) -> float | None:
    values = training.series(column)[1]
    return values[-1] if values else None
