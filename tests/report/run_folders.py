"""Small run folders as ``lrmoe train`` and ``lrmoe compare`` write them, with made-up numbers."""

from __future__ import annotations

import base64
import json
from array import array
from pathlib import Path
from typing import Any

from lrmoe.studies.compare_table import make_rows

LAYERS, EXPERTS = 2, 4
RECALIBRATION = {"drop": 0.2, "selector": "pps", "metric": "lrm", "save": "preactivation", "seed": 0}
TRAIN: dict[str, Any] = {
    "model": "qwen3-moe-tiny",
    "text": None,
    "steps": 60,
    "batch": 4,
    "seq": 32,
    "grad_accum": 1,
    "seed": 0,
    "recalibration": RECALIBRATION,
}
CORPUS = {"source": "Python 3.11 standard library", "validation_is_training": False}


def record(
    step: int, *, seed: int = 0, drop: float = 0.2, cost: float = 0.0, validated: bool = False
) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    kept = 1.0 - drop
    load = [40, 30, 20, 10 + seed]
    layers = [
        {
            "name": f"model.layers.{layer}.mlp.experts",
            "kept_share": kept,
            "kept_importance_share": 1.0 - drop / 10,
            "variance_share": drop / 8,
            "load_max_over_mean": 1.6,
            "load": load,
            "kept": [round(kept * pairs) for pairs in load],
        }
        for layer in range(LAYERS)
    ]
    values: dict[str, Any] = {
        "step": step,
        "loss": 2.0 + 1.0 / step + cost + 0.01 * seed,
        "drop": drop,
        "kept_share": kept,
        "kept_importance_share": 1.0 - drop / 10,
        "variance_share": drop / 8,
        "load_max_over_mean": 1.6,
        "forward_seconds": 0.2,
        "backward_seconds": 0.4 * kept,
        "seconds": 1.5,
        "layers": layers,
    }
    if validated:
        values["eval_loss"] = 2.1 + 1.0 / step + cost + 0.02 * seed
    return values


def records(*, seed: int = 0, drop: float = 0.2, cost: float = 0.0) -> list[dict[str, Any]]:
    """The lines of a run of 60 steps, logged every 10 and validated every 20."""
    return [record(s, seed=seed, drop=drop, cost=cost, validated=s % 20 == 0) for s in range(10, 61, 10)]


def unpacked(told: dict[str, str]) -> list[float]:
    """The numbers that a page holds in binary."""
    code = {"u2": "H", "u4": "I", "f4": "f", "f8": "d"}[told["dtype"]]
    return array(code, base64.b64decode(told["bdata"])).tolist()


def summary_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    last = lines[-1]
    return {
        "command": "train",
        "steps": last["step"],
        "eval_loss": last.get("eval_loss"),
        "train_loss": last["loss"],
        **{key: last[key] for key in ("kept_share", "kept_importance_share", "variance_share", "load_max_over_mean")},
        "forward_seconds": 0.02,
        "backward_seconds": last["backward_seconds"] / 10,
        "saved_bytes": {"moe": 3 * 2**20, "model": 9 * 2**20},
        "diverged_at": None,
        "parameters": 1_234_567,
    }


def write(folder: Path, config: object, lines: list[dict[str, Any]], summary: object | None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def train_config(**changes: Any) -> dict[str, Any]:
    return {"command": "train", "train": {**TRAIN, **changes}, "corpus": CORPUS, "architecture": {}, "layers": []}


def train_run(folder: Path, lines: list[dict[str, Any]] | None = None) -> Path:
    lines = records() if lines is None else lines
    return write(folder, train_config(), lines, summary_of(lines))


VARIANTS: dict[str, dict[str, Any]] = {
    "C0": {"drop": 0.0, "cost": 0.0},
    "C20 pps": {"drop": 0.2, "cost": 0.005, "selector": "pps"},
    "C20 topq": {"drop": 0.2, "cost": 0.3, "selector": "topq"},
}


def compare_run(
    folder: Path, variants: dict[str, dict[str, Any]] | None = None, seeds: tuple[int, ...] = (0, 1, 2), **changes: Any
) -> Path:
    variants = VARIANTS if variants is None else variants
    lines: list[dict[str, Any]] = []
    summaries: dict[str, list[dict[str, Any]]] = {}
    for name, variant in variants.items():
        for seed in seeds:
            run = records(seed=seed, drop=variant["drop"], cost=variant["cost"])
            summaries.setdefault(name, []).append(summary_of(run))
            lines += [{"variant": name, "seed": seed, **line} for line in run]
    baseline = next(name for name, variant in variants.items() if variant["drop"] == 0)
    config = {
        "command": "compare",
        "train": {**TRAIN, **changes},
        "variants": [
            {"name": name, **{key: value for key, value in variant.items() if key != "cost"}}
            for name, variant in variants.items()
        ],
        "seeds": list(seeds),
        "pretrain_steps": 0,
        "corpus": CORPUS,
    }
    rows = make_rows(summaries, baseline)
    return write(
        folder, config, lines, {"command": "compare", "baseline": baseline, "seeds": list(seeds), "rows": rows}
    )
