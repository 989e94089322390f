"""How much MoE-layer time a training run takes to fixed losses: on one device, and over ranks with each balancer.

Dropping makes a step cheaper and may make more of them necessary; a balancer makes a step of uneven loads cheaper. What
counts is the product, so every contender trains, and the time to a loss that plain training reaches is read off its own
curve.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lrmoe.studies.cell_file import OBJECT, read_whole, require
from lrmoe.studies.jobs import Progress
from lrmoe.studies.results import StudyResult
from lrmoe.training.files import locked, read_json, write_json
from lrmoe.training.launch import launch
from paper.time_to_loss.config import TimeToLossConfig
from paper.time_to_loss.curves import Setting
from paper.time_to_loss.run import CellPlan, Sizes, check_cell, read_text, work
from paper.time_to_loss.tables import make_result

CELLS = "cells"


def work_left(config: TimeToLossConfig, out: Path) -> int:
    """Optimizer steps, of all contenders, in the cells that ``out`` does not hold yet."""
    return sum(
        config.steps * len(setting.contenders)
        for setting in config.settings()
        for seed in setting.seeds
        if not _path(out, setting, seed).exists()
    )


def check_cells(config: TimeToLossConfig, out: Path) -> None:
    """Checks the text, and that the cells that ``out`` has are of these settings; writes nothing.

    Raises:
        ValueError: naming what is wrong and the mend.
    """
    for setting in config.settings():
        read_text(config.sizes, setting.ranks)
        for seed in setting.seeds:
            _finished(out, setting, _plan(config, setting, seed))


def time_to_loss(
    config: TimeToLossConfig, out: Path, *, progress: Progress = lambda *_: None, command: str = ""
) -> StudyResult:
    """Trains what ``out`` does not hold yet, a file of ``out/cells`` for each setting and seed, and reads the tables.

    Args:
        config: of the study.
        out: folder; what an interrupted call has finished there is not done again.
        progress: called with a cell's name and its number of finished steps, of all contenders together.
        command: what the user typed, for the result's provenance.

    Raises:
        ValueError: if a finished cell was made with other settings, or another process is working in the folder.
        RunFailure: if a rank failed.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file; give a folder")
    (out / CELLS).mkdir(parents=True, exist_ok=True)
    records: dict[str, list[dict[str, Any]]] = {}
    with locked(out / CELLS):
        plans = [
            (setting, seed, _plan(config, setting, seed)) for setting in config.settings() for seed in setting.seeds
        ]
        # All that is there is checked before hours go into what is not.
        found = {_name(setting, seed): _finished(out, setting, plan) for setting, seed, plan in plans}
        for setting, seed, plan in plans:
            name = _name(setting, seed)
            cell = found[name]
            if cell is None:
                cell = _run(name, plan, setting, _path(out, setting, seed), config.rank_timeout, progress)
            records.setdefault(setting.name, []).append(cell)
    return make_result(config, records, command=command)


def _plan(config: TimeToLossConfig, setting: Setting, seed: int) -> CellPlan:
    return CellPlan(
        setting=setting.name,
        seed=seed,
        balance_loss_weight=setting.balance_loss_weight,
        contenders=setting.contenders,
        sizes=config.sizes,
    )


def _settings(plan: CellPlan) -> dict[str, Any]:
    """What a finished cell must have been made with, as JSON gives it back."""
    return {
        "balance_loss_weight": plan.balance_loss_weight,
        "contenders": {one.name: [one.policy, one.config.to_dict()] for one in plan.contenders},
        **{one.name: getattr(plan.sizes, one.name) for one in fields(Sizes)},
    }


def _name(setting: Setting, seed: int) -> str:
    return f"{setting.name}-seed-{seed}"


def _path(out: Path, setting: Setting, seed: int) -> Path:
    return out / CELLS / f"{_name(setting, seed)}.json"


def _finished(out: Path, setting: Setting, plan: CellPlan) -> dict[str, Any] | None:
    path = _path(out, setting, plan.seed)
    if not path.exists():
        return None

    def differing(stored: Mapping[str, Any]) -> list[str]:
        settings = {"ranks": setting.ranks, **_settings(plan)}
        return [f"{name}={stored.get(name)!r}" for name, value in settings.items() if stored.get(name) != value]

    def check(cell: Mapping[str, Any]) -> None:
        require(cell, {"settings": OBJECT})
        # Records of other settings have other lengths, and are no damage.
        if not differing(cell["settings"]):
            check_cell(cell, plan)

    cell = read_whole(path, check, mend="delete it, and it is made again")
    if wrong := differing(cell["settings"]):
        raise ValueError(f"{path} was made with {', '.join(wrong)}; give the same settings, or another out")
    return cell


def _run(name: str, plan: CellPlan, setting: Setting, path: Path, timeout: float, progress: Progress) -> dict[str, Any]:
    start = time.monotonic()
    raw = path.with_suffix(".part")
    here, there = Pipe(duplex=False)
    listener = threading.Thread(target=_listen, args=(here, lambda done: progress(name, done, None)), daemon=True)
    listener.start()
    try:
        launch(work, plan, str(raw), there, size=setting.ranks, timeout=timeout)
    finally:
        there.send(None)
        # A rank that was ended in the middle of a message leaves the listener waiting for its rest.
        listener.join(timeout=2.0)
        there.close()
    # One move makes the cell finished, with what it was made with in it.
    seconds = time.monotonic() - start
    write_json(path, {**read_json(raw), "seconds": seconds, "settings": {"ranks": setting.ranks, **_settings(plan)}})
    raw.unlink()
    return read_json(path)


def _listen(messages: Connection, tell: Callable[[int], None]) -> None:
    while (done := messages.recv()) is not None:
        tell(done)
