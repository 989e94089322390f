"""Small folders of what is planned on paper: a model of 16 experts on a machine of round numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lrmoe.report import write_report
from lrmoe.studies.plan_config import PlanConfig
from lrmoe.studies.plan_run import plan


def small_model(folder: Path, *, experts: int = 16, name: str = "small") -> str:
    """A config.json of two layers."""
    path = folder / name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "vocab_size": 300,
    }
    path.write_text(json.dumps(config))
    return str(path)


def small_machine(folder: Path, **changed: Any) -> str:
    """A hardware file."""
    path = folder / "machine.json"
    values = {
        "flops": 1e12,
        "memory_bytes": 2**30,
        "memory_bandwidth": 1e11,
        "intra_bytes_per_s": 1e10,
        "inter_bytes_per_s": 1e9,
        "tile_rows": 1,
        "name": "<i>machine</i>",
        **changed,
    }
    path.write_text(json.dumps(values))
    return str(path)


def planned(folder: Path, **options: Any) -> Path:
    """What ``lrmoe plan`` writes."""
    settings = {"ep": 4, "seq": 256, "microbatch": 2, "floor": 1, **options}
    plan(PlanConfig(model=small_model(folder), hardware=small_machine(folder), **settings), folder / "out")
    write_report(folder / "out")
    return folder / "out"
