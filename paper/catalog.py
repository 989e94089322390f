"""The paper's studies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from lrmoe.studies.catalog import Entry, grid, settings_of
from lrmoe.studies.cells import FOLDER
from lrmoe.studies.jobs import Progress
from lrmoe.studies.results import StudyResult
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.study_run import (
    Watch,
    check_folder,
    check_runs,
    command,
    machine,
    watched,
    write_config,
    write_result,
)
from lrmoe.training.files import check_can_be_made, locked
from paper import PROGRAM, recipes, scale
from paper.anatomy import study as anatomy
from paper.anatomy import tables as anatomy_tables
from paper.anatomy.study import AnatomyConfig
from paper.time_to_loss import study as time_to_loss
from paper.time_to_loss import tables as time_to_loss_tables
from paper.time_to_loss.config import TimeToLossConfig

Config = TypeVar("Config", AnatomyConfig, TimeToLossConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Alone(Generic[Config]):
    """A study that keeps its runs to itself, in ``cells`` of its folder.

    Attributes:
        configure: from the settings that a user gave.
        check: raises ValueError for what a user can get wrong; takes the study's folder, and writes nothing.
        work_left: how much of the study its folder does not hold yet, in the steps that ``work`` tells of.
        work: carries it out.
    """

    name: str
    question: str
    settings: Mapping[str, Any]
    configure: Callable[[Mapping[str, Any]], Config]
    check: Callable[[Config, Path], None]
    work_left: Callable[[Config, Path], int]
    work: Callable[[Config, Path, Progress], StudyResult]


def _alone(study: _Alone[Config]) -> Entry:
    def run(given: Mapping[str, Any], out: Path, store: Path, jobs: int, watch: Watch | None) -> StudyResult:
        config = study.configure(given)
        check_folder(study.name, out, program=PROGRAM)
        check_can_be_made(out / FOLDER, field="cells")
        study.check(config, out)
        out.mkdir(parents=True, exist_ok=True)
        with locked(out):
            write_config(study.name, config.to_dict(), out)
            result = study.work(config, out, watched(watch, study.work_left(config, out)))
            typed = command(study.name, given, out=out, program=PROGRAM)
            result = replace(result, provenance={**result.provenance, "command": typed, "machine": machine()})
            write_result(result, out)
        return result

    return Entry(question=study.question, settings=study.settings, run=run)


def _anatomy_config(given: Mapping[str, Any]) -> AnatomyConfig:
    shared = settings_of(StudyConfig())
    study = StudyConfig(**{name: value for name, value in given.items() if name in shared})
    return AnatomyConfig(study=study, **{name: value for name, value in given.items() if name not in shared})


def _check_anatomy(config: AnatomyConfig, out: Path) -> None:
    anatomy.check_cells(config, out)
    check_runs(anatomy.runs_of(config), config.study)


_ANATOMY = _Alone(
    name="anatomy",
    question=anatomy_tables.QUESTION,
    settings={
        **settings_of(StudyConfig()),
        **{name: value for name, value in settings_of(AnatomyConfig()).items() if name not in ("study", "variants")},
    },
    configure=_anatomy_config,
    check=_check_anatomy,
    work_left=anatomy.work_left,
    work=lambda config, out, progress: anatomy.anatomy(config, out, progress=progress),
)
_TIME_TO_LOSS = _Alone(
    name="time_to_loss",
    question=time_to_loss_tables.QUESTION,
    settings=settings_of(TimeToLossConfig()),
    configure=lambda given: TimeToLossConfig(**given),
    check=time_to_loss.check_cells,
    work_left=time_to_loss.work_left,
    work=lambda config, out, progress: time_to_loss.time_to_loss(config, out, progress=progress),
)
CATALOG: Mapping[str, Entry] = {
    recipes.STUDY.name: grid(recipes.STUDY),
    scale.STUDY.name: grid(scale.STUDY),
    _ANATOMY.name: _alone(_ANATOMY),
    _TIME_TO_LOSS.name: _alone(_TIME_TO_LOSS),
}
