"""A run folder as large as they come: thousands of steps, many layers and experts, with made-up numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from run_folders import train_config

POOL = 64


def long_run(folder: Path, *, lines: int = 1000, every: int = 10, layers: int = 48, experts: int = 128) -> Path:
    """``lines`` logged steps, ``every`` steps apart; about 100 kB a line at 48 layers of 128 experts."""
    draw = random.Random(0)
    loads = []
    for _ in range(POOL):
        load = [draw.randint(200, 40_000) for _ in range(experts)]
        kept = [round(0.8 * pairs) for pairs in load]
        loads.append(f'"load": {json.dumps(load)}, "kept": {json.dumps(kept)}')
    folder.mkdir(parents=True)
    config = train_config(steps=lines * every)
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for number in range(1, lines + 1):
            file.write(_line(draw, number, every, layers, loads) + "\n")
    summary = {"command": "train", "steps": lines * every, "eval_loss": 2.0, "kept_share": 0.8}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _line(draw: random.Random, number: int, every: int, layers: int, loads: list[str]) -> str:
    step = number * every
    told: dict[str, Any] = {
        "step": step,
        "loss": 2.0 + 8.0 / number + draw.gauss(0, 0.02),
        "drop": 0.2,
        "kept_share": 0.8,
        "kept_importance_share": 0.97 - 0.1 / number,
        "variance_share": 0.02 + 0.2 / number + draw.random() / 100,
        "load_max_over_mean": 2.0 + draw.random(),
        "forward_seconds": 20.0 + draw.random(),
        "backward_seconds": 35.0 + draw.random(),
        "seconds": 120.0 + 5 * draw.random(),
    }
    if number % 10 == 0:
        told["eval_loss"] = 2.05 + 8.0 / number
    shares = [
        f'{{"name": "model.layers.{layer}.mlp.experts", {loads[draw.randrange(POOL)]}, "kept_share": 0.8, '
        f'"kept_importance_share": {0.97 - layer / 1000 - 0.1 / number:.6f}, "variance_share": '
        f'{0.02 + layer / 1000 + 0.2 / number:.6f}, "load_max_over_mean": {2 + draw.random():.4f}, "guarded": false}}'
        for layer in range(layers)
    ]
    return json.dumps(told)[:-1] + f', "layers": [{", ".join(shares)}]}}'
