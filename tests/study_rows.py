"""Rows of studies, made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lrmoe.studies.compare_table import make_rows
from lrmoe.studies.grid import BASELINE, Rows, add_verdict


def made_up(differences: Mapping[str, list[float]], base: list[float]) -> Rows:
    """Rows as a comparison gives them, with the given paired differences."""
    rows: Rows = []
    for name, each in {BASELINE: [0.0] * len(base), **differences}.items():
        losses = [b + d for b, d in zip(base, each, strict=True)]
        rows.append(
            {
                "variant": name,
                "eval_loss": sum(losses) / len(losses),
                "eval_loss_difference": sum(each) / len(each),
                "eval_loss_differences": each,
                "eval_loss_spread": max(losses) - min(losses) if len(losses) > 1 else None,
                "kept_share": 1.0 if name == BASELINE else 0.8,
                "variance_share": 0.1,
                "selector": "topq" if "topq" in name else "random" if "random" in name else "pps",
                "metric": "lrm",
                "error_budget": None,
                "guard_variance": None,
                "drop": 0.0 if name == BASELINE else 0.2,
                "warmup_steps": 90,
            }
        )
    return [add_verdict(row, rows[0], "eval_loss") for row in rows]


def rows_of(differences: dict[str, list[float]], *, spread: float = 0.1, **settings: Any) -> list[dict[str, Any]]:
    """Rows of a study: no drop at 3.0 with seeds ``spread`` apart, and variants with these paired differences."""
    seeds = len(next(iter(differences.values())))
    base = [3.0 + spread * i / max(seeds - 1, 1) for i in range(seeds)]

    def summary(loss: float) -> dict[str, Any]:
        keys = ("kept_share", "kept_importance_share", "variance_share", "load_max_over_mean")
        shared = dict.fromkeys(keys, 1.0) | dict.fromkeys(("forward_seconds", "backward_seconds", "saved_bytes"))
        return {"eval_loss": loss, "train_loss": loss, "diverged_at": None, **shared}

    losses = {"C0": base, **{n: [b + d for b, d in zip(base, each, strict=True)] for n, each in differences.items()}}
    rows = make_rows({name: [summary(loss) for loss in each] for name, each in losses.items()}, "C0")
    shared = {"selector": "pps", "guard_variance": None, "metric": "lrm", "drop": 0.2, **settings}
    return [add_verdict({**row, **shared}, rows[0], "eval_loss") for row in rows]
