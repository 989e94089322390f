"""The comparison: one row a variant, from ``summary.json`` or, while a run is unfinished, from the logged lines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lrmoe.report.run_folder import Run, Training

# Columns a row may have: name in summary.json -> what it is. Seconds are those of one optimizer step.
COLUMNS = (
    "eval_loss",
    "eval_loss_spread",
    "eval_loss_difference",
    "train_loss",
    "kept_share",
    "kept_importance_share",
    "variance_share",
    "load_max_over_mean",
    "forward_seconds",
    "backward_seconds",
    "saved_bytes",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One variant; ``values`` has the columns that are known, ``differences`` one value a seed."""

    variant: str
    values: dict[str, float]
    differences: list[float] = field(default_factory=list)

    def get(self, column: str) -> float | None:
        return self.values.get(column)


def rows_from_lines(run: Run, baseline: str | None) -> list[Row]:
    """What the logged lines tell about every variant: last validation loss, and means over all logged steps."""
    base = {training.seed: _last(training, "eval_loss") for training in run.of(baseline)} if baseline else {}
    rows = []
    for variant in run.variants:
        trainings = run.of(variant)
        values: dict[str, float] = {}
        last = [value for training in trainings if (value := _last(training, "eval_loss")) is not None]
        if last:
            values["eval_loss"] = math.fsum(last) / len(last)
            values["eval_loss_spread"] = max(last) - min(last)
        differences = [
            value - reference
            for training in trainings
            if (value := _last(training, "eval_loss")) is not None
            and (reference := base.get(training.seed)) is not None
        ]
        if differences:
            values["eval_loss_difference"] = math.fsum(differences) / len(differences)
        for column in ("kept_share", "kept_importance_share", "variance_share", "load_max_over_mean"):
            logged = [value for training in trainings for value in training.series(column)[1]]
            if logged:
                values[column] = math.fsum(logged) / len(logged)
        for column in ("forward_seconds", "backward_seconds"):
            seconds = seconds_a_step(trainings, column)
            if seconds is not None:
                values[column] = seconds
        rows.append(Row(variant=variant, values=values, differences=differences))
    return rows


def seconds_a_step(trainings: list[Training], column: str) -> float | None:
    """Mean seconds of one optimizer step: each logged line holds the sum since the line before."""
    seconds = steps = 0.0
    for training in trainings:
        logged_steps, values = training.series(column)
        if logged_steps:
            seconds += math.fsum(values)
            steps += logged_steps[-1]
    return seconds / steps if steps else None


def _last(training: Training, column: str) -> float | None:
    values = training.series(column)[1]
    return values[-1] if values else None


def comparison_rows(run: Run, baseline: str | None) -> list[Row]:
    return rows_from_lines(run, baseline)
