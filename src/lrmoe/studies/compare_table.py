"""From the summaries of paired runs to one row a variant, and to the table a person reads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lrmoe.experts.meter import SECONDS, SHARES
from lrmoe.training.summary import LAST_STEPS

Row = dict[str, Any]
MEANS = (
    "eval_loss",
    "train_loss",
    *SHARES,
    *SECONDS,
)


def make_rows(summaries: Mapping[str, Sequence[Mapping[str, Any]]], baseline: str) -> list[Row]:
    """One row a variant.

    ``*_difference`` are means over seeds of the paired difference to ``baseline``, with ``*_differences`` seed by
    seed; ``*_spread`` is the largest minus the smallest seed and ``*_std`` the sample standard deviation (None for one
    seed). ``forward_ratio`` and ``backward_ratio`` are means of the paired ratios. ``saved_bytes`` is what one
    microbatch's forward saves in the MoE layers, ``saved_bytes_model`` in the whole model. A value that a run does not
    have is None.

    Args:
        summaries: per variant, one ``summary.json`` a seed, in the same order of seeds for all.
        baseline: the variant with ``drop=0``.
    """
    return [_row(name, runs, summaries[baseline]) for name, runs in summaries.items()]


def _row(name: str, runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> Row:
    row: Row = {"variant": name, "seeds": len(runs)}
    for key in MEANS:
        row[key] = _mean([run[key] for run in runs])
    for key in ("eval_loss", "train_loss"):
        values = [run[key] for run in runs]
        row[f"{key}es"] = values
        known = [value for value in values if value is not None]
        row[f"{key}_spread"] = max(known) - min(known) if len(known) > 1 else None
        row[f"{key}_std"] = statistics.stdev(known) if len(known) > 1 and all(map(math.isfinite, known)) else None
        pairs = [(run[key], other[key]) for run, other in zip(runs, base, strict=True)]
        differences = [None if None in pair else pair[0] - pair[1] for pair in pairs]
        row[f"{key}_differences"] = differences
        row[f"{key}_difference"] = _mean(differences)
    for key in ("forward", "backward"):
        pairs = [(run[f"{key}_seconds"], other[f"{key}_seconds"]) for run, other in zip(runs, base, strict=True)]
        row[f"{key}_ratio"] = _mean([mine / other if mine and other else None for mine, other in pairs])
    saved = [run["saved_bytes"] for run in runs]
    row["saved_bytes"] = _mean([None if s is None else s["moe"] for s in saved])
    row["saved_bytes_model"] = _mean([None if s is None else s["model"] for s in saved])
    row["diverged"] = [run["diverged_at"] for run in runs]
    return row


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


HEADINGS = (
    "variant",
    "validation loss",
    "minus no drop (each seed)",
    "training loss",
    "minus no drop",
    "kept pairs",
    "kept sum R",
    "V*/sum R",
    "load max/mean",
    "expert forward",
    "expert backward",
    "saved for backward",
)


def cells(row: Row) -> list[str]:
    """A row as text, in the order of :data:`HEADINGS`."""
    each = ", ".join(_signed(value, 3) for value in row["eval_loss_differences"])
    several = f" ({each})" if row["seeds"] > 1 else ""
    return [
        row["variant"],
        _fixed(row["eval_loss"], 4),
        _signed(row["eval_loss_difference"], 4) + several,
        _fixed(row["train_loss"], 4),
        _signed(row["train_loss_difference"], 4),
        _percent(row["kept_share"], 1),
        _percent(row["kept_importance_share"], 2),
        _fixed(row["variance_share"], 4),
        _fixed(row["load_max_over_mean"], 2),
        _timed(row, "forward"),
        _timed(row, "backward"),
        "-" if row["saved_bytes"] is None else f"{row['saved_bytes'] / 2**20:.1f} MiB",
    ]


def footnote(rows: Sequence[Row], baseline: str, *, steps: int, memorized: int | None = None) -> str:
    """What the differences are to be held against, in a few sentences.

    Args:
        steps: of the longest run.
        memorized: bytes of text that the runs repeat, None where they do not.
    """
    base = next(row for row in rows if row["variant"] == baseline)
    sentences = [
        f"Losses in nats per token, training loss over the last {min(LAST_STEPS, steps)} steps; times of all MoE "
        "layers in one step."
    ]
    if memorized is not None:
        sentences.append(f"Validated on the training text, {memorized} bytes repeated.")
    if base["eval_loss_spread"] is None:
        sentences.append("One seed shows no spread to compare a difference with.")
    else:
        sentences.append(
            f"Seed spread of {baseline}: validation {_fixed(base['eval_loss_spread'], 4)} (std "
            f"{_fixed(base['eval_loss_std'], 4)}), training {_fixed(base['train_loss_spread'], 4)} (std "
            f"{_fixed(base['train_loss_std'], 4)})."
        )
    for row in rows:
        stopped = [str(step) for step in row["diverged"] if step is not None]
        if stopped:
            sentences.append(f"{row['variant']} diverged at step {', '.join(stopped)}.")
    return " ".join(sentences)


def markdown(rows: Sequence[Row], note: str) -> str:
    """The table for ``table.md``, with the note below."""
    lines = [HEADINGS, ("---", *("---:" for _ in HEADINGS[1:])), *([_cell(c) for c in cells(row)] for row in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{table}\n\n{note}\n"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|")


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _signed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:+.{digits}f}"


def _percent(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _timed(row: Row, which: str) -> str:
    seconds, ratio = row[f"{which}_seconds"], row[f"{which}_ratio"]
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" + ("" if ratio is None else f" ({ratio:.2f} x)")
