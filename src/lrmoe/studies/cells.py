"""Training runs that several studies share: each is done once and kept under a name made of what defines it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lrmoe.config import LRMoEConfig
from lrmoe.studies.cell_file import TEXTS
from lrmoe.studies.jobs import Job, Progress, run_jobs
from lrmoe.studies.kept_run import check_kept, is_finished, read_kept, read_lines, read_summary
from lrmoe.training.config import PARALLEL, TrainConfig
from lrmoe.training.files import locked

FOLDER = "cells"
# What changes how a run is carried out and not what it gives.
_NOT_DEFINING = {"threads", "keep_checkpoints", "save_every", "trace", "report_to", *PARALLEL}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One training run. With ``start`` it begins with the last weights of that run, and ``config.model`` says only
    which model that is."""

    config: TrainConfig
    start: Cell | None = None

    @property
    def key(self) -> str:
        """Names the run by the settings that are not the default, so that a field which a later version adds does not
        make finished runs unknown."""
        defining = {
            "train": _not_default(self.config, skip=_NOT_DEFINING | {"recalibration"}),
            "recalibration": _not_default(self.config.recalibration, skip=set()),
            "start": None if self.start is None else self.start.key,
        }
        return hashlib.sha256(json.dumps(defining, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """A few words for a progress bar and a folder."""
        recalibration = self.config.recalibration
        what = f"{recalibration.selector}-{recalibration.drop:g}" if recalibration.drop else "exact"
        return f"{what}-seed{self.config.seed}"

    def folder(self, store: Path) -> Path:
        """Where the run is kept."""
        return store / f"{self.label}-{self.key}"

    def is_finished(self, store: Path) -> bool:
        """Whether the run has its result."""
        return is_finished(self.folder(store))

    def summary(self, store: Path) -> dict[str, Any]:
        """What ``summary.json`` of the finished run holds.

        Raises:
            ValueError: if it is damaged; says how to mend it.
        """
        return read_summary(self.folder(store))

    def records(self, store: Path) -> list[dict[str, Any]]:
        """The lines of the run; raises as :meth:`summary`."""
        return read_lines(self.folder(store))

    def versions(self, store: Path) -> Mapping[str, str]:
        """What the run was made with; raises as :meth:`summary`."""
        found: Mapping[str, str] = read_kept(self.folder(store), "config.json", {"versions": TEXTS})["versions"]
        return found

    def check(self, store: Path) -> None:
        """Checks what ``store`` has of the run, finished or interrupted; writes nothing.

        Raises:
            ValueError: if it is damaged; says how to mend it.
        """
        check_kept(self.folder(store))
        if self.is_finished(store):
            self.versions(store)


def _not_default(config: TrainConfig | LRMoEConfig, *, skip: set[str]) -> dict[str, Any]:
    default = type(config)()
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in skip}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def missing(cells: Iterable[Cell], store: Path) -> list[Cell]:
    """The runs that are still to do, each once, with those that others start from in front."""
    found: dict[str, Cell] = {}
    for cell in cells:
        if cell.is_finished(store):
            continue
        if cell.start is not None and not cell.start.is_finished(store):
            found.setdefault(cell.start.key, cell.start)
        found.setdefault(cell.key, cell)
    return sorted(found.values(), key=lambda cell: cell.start is not None)


def run_cells(cells: Iterable[Cell], store: Path, *, jobs: int, progress: Progress) -> None:
    """Does what is missing, ``jobs`` runs at a time with one thread each; what was interrupted goes on.

    Weights are kept of the runs that have no ``start``, from which others may begin.

    Raises:
        ValueError: if another process is working in ``store``, or a run cannot be carried out.
    """
    todo = missing(cells, store)
    if not todo:
        return
    store.mkdir(parents=True, exist_ok=True)
    with locked(store):
        for stage in ([c for c in todo if c.start is None], [c for c in todo if c.start is not None]):
            run_jobs([_job(cell, store) for cell in stage], parallel=jobs, progress=progress)
            for cell in stage:
                if cell.start is not None:
                    shutil.rmtree(cell.folder(store) / "checkpoints", ignore_errors=True)


def _job(cell: Cell, store: Path) -> Job:
    config = replace(cell.config, threads=1, keep_checkpoints=1)
    if cell.start is not None:
        config = replace(config, model=str(cell.start.folder(store).resolve()))
    return Job(name=f"{cell.label} {cell.key[:4]}", config=config, out=cell.folder(store))


def steps_of(cells: Iterable[Cell], store: Path) -> int:
    """Optimizer steps that are still to do."""
    return sum(cell.config.steps for cell in missing(cells, store))
