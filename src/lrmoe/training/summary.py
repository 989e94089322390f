"""From the lines of a run to the numbers that stand for it."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from lrmoe.experts.meter import SECONDS, SHARES
from lrmoe.training.checkpoints import newest_checkpoint
from lrmoe.training.config import TrainConfig
from lrmoe.training.files import read_records

LAST_STEPS = 50


def summarize(config: TrainConfig, out: Path, *, diverged_at: int | None) -> dict[str, Any]:
    """What ``summary.json`` holds.

    ``eval_loss`` is the last validation's, NaN for a run that diverged; ``train_loss`` the mean over the last 50 steps,
    or all of fewer; ``guarded`` the names of the layers that the guard stopped at some time;
    shares are means over the run; ``forward_seconds`` and ``backward_seconds`` those of all MoE layers in one optimizer
    step, the median over log intervals (None where none was measured); ``saved_bytes`` of one microbatch's forward.
    """
    every_record = read_records(out / "metrics.jsonl")
    records = [record for record in every_record if "loss" in record]
    steps = {record["step"]: record["step"] - before for before, record in _after(records)}
    last = [record for record in records if record["step"] > records[-1]["step"] - LAST_STEPS]
    checkpoint = newest_checkpoint(out)
    summary: dict[str, Any] = {
        "command": "train",
        "steps": records[-1]["step"],
        "eval_loss": next((r["eval_loss"] for r in reversed(every_record) if "eval_loss" in r), None),
        "train_loss": _mean([(record["loss"], steps[record["step"]]) for record in last]),
    }
    for key in SHARES:
        # Intervals whose backwards were all not finite know no share; older versions wrote NaN for those.
        known = [record for record in records if record.get(key) is not None and math.isfinite(record[key])]
        summary[key] = _mean([(record[key], steps[record["step"]]) for record in known])
    for key in SECONDS:
        seconds = [record[key] / steps[record["step"]] for record in records]
        # A GPU's kernels run on after the host's clock has stopped; the layers then report zero.
        summary[key] = statistics.median(seconds) if any(seconds) else None
    events = [event for record in records for event in record.get("guard_events", ())]
    summary["guarded"] = list(dict.fromkeys(event["layer"] for event in events if event["kind"] == "stopped"))
    summary["seconds"] = sum(record["seconds"] for record in every_record)
    summary["saved_bytes"] = next((record["saved_bytes"] for record in records if "saved_bytes" in record), None)
    summary["checkpoint"] = None if checkpoint is None else str(checkpoint.relative_to(out))
    summary["diverged_at"] = diverged_at
    if diverged_at is not None:
        summary["eval_loss"] = math.nan
    return summary


def _after(records: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Each record with the step of the one before it."""
    return list(zip([0, *(record["step"] for record in records)], records, strict=False))


def _mean(weighted: list[tuple[float, int]]) -> float | None:
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else None
