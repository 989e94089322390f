"""What ranks do in the tests of training over several of them; imported by the processes that are started."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lrmoe.training import optimizer_state
from lrmoe.training.files import read_records, write_records
from lrmoe.training.world import World


def well(world: World, code: int) -> int:
    assert world.sum([1.0, float(world.rank)]) == [world.size, sum(range(world.size))]
    assert world.broadcast(f"from {world.rank}") == "from 0"
    return code if world.rank == 1 else 0


def bad_input(world: World) -> int:
    if world.rank == 1:
        raise ValueError("colour='mauve' is not known; choose another")
    time.sleep(60)
    return 0


def broken(world: World) -> int:
    if world.rank == 1:
        raise KeyError("a bug")
    world.barrier()
    return 0


def killed(world: World) -> int:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()
    return 0


def deaf(world: World) -> int:
    world.barrier()
    if world.rank == 1:
        time.sleep(60)
    # Not through World: what FSDP's collectives look like.
    dist.all_reduce(torch.ones(1))
    return 0


def complains(world: World) -> int:
    world.agree(ValueError("the disk is full") if world.rank == 1 else None)
    return 0


def saves_optimizer(world: World, checkpoint: Path) -> int:
    model = torch.nn.Linear(2, 2)
    optimizer_state.save_shards(model, torch.optim.Adam(model.parameters()), checkpoint)
    return 0


class Odd(BaseException):
    """What some libraries raise."""


def odd(world: World) -> int:
    if world.rank == 1:
        raise Odd("neither fish nor fowl")
    world.barrier()
    return 0


def cut(whole: Path, folder: Path, *, step: int) -> None:
    """Makes ``folder`` what a kill soon after ``step`` leaves of the run in ``whole``: the checkpoints until then,
    later lines, half a line, and half a checkpoint."""
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()
    for entry in (folder / "checkpoints").iterdir():
        if int(entry.name.rpartition("-")[2]) > step:
            shutil.rmtree(entry)
    (folder / "checkpoints" / ".incomplete" / f"checkpoint-{step + 2}").mkdir(parents=True)
    path = folder / "metrics.jsonl"
    write_records(path, [record for record in read_records(path) if record["step"] <= step + 1])
    with open(path, "a") as file:
        file.write('{"step": 99, "lo')


def train_all(world: World, runs: list[tuple[Any, Path, dict[str, Any]]]) -> int:
    """Several runs one after the other in the same processes; a run with ``cut_from`` resumes what is left of that one
    after a cut at step 2."""
    from lrmoe.training.run import prepare, train

    for config, out, options in runs:
        source = options.pop("cut_from", None)
        if source is not None:
            if world.is_main:
                cut(source, out, step=2)
            world.barrier()
            options["resume"] = True
        train(prepare(config, out, world=world, **options))
    return 0
