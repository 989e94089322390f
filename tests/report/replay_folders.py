"""Small folders of ``lrmoe balance`` with a workload or a trace."""

from __future__ import annotations

from pathlib import Path

import torch

from lrmoe.report import write_report
from lrmoe.studies.replay_config import ReplayConfig
from lrmoe.studies.replay_run import run_replay
from lrmoe.training.trace import TraceWriter

POLICIES = "ultraep,lrmoe,symi,symi:slots=2,laer,flexmoe,smartmoe:interval=2,fastermoe,eplb:interval=2"


def played(folder: Path, workload: str = "burst", **options: object) -> Path:
    """Eight steps of a workload under all nine policies, and one that cannot run."""
    sizes = {"ranks": 4, "experts": 16, "tokens": 512, "top_k": 2, "steps": 8, "floor": 1}
    config = ReplayConfig(workload=workload, policies=POLICIES, **{**sizes, **options})  # type: ignore[arg-type]
    run_replay(config, folder)
    write_report(folder)
    return folder


def played_trace(folder: Path, *, steps: int = 3, microbatches: int = 2, layers: int = 2, ranks: int = 2) -> Path:
    """A trace that a run might have left, played to three policies."""
    run = folder / "<b>run</b>"
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(layers)]
    writer = TraceWriter(run / "trace", {"top_k": 2, "dim": 64, "expert_dim": 32, "layers": names})
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for microbatch in range(microbatches):
            for layer in range(layers):
                writer.add(layer, step, microbatch, torch.randint(0, 40, (ranks, 8), generator=generator))
    writer.flush()
    run_replay(ReplayConfig(trace=str(run), policies="lrmoe,symi:slots=2", floor=1), folder / "out")
    write_report(folder / "out")
    return folder / "out"
