"""All studies by name, whatever they are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from lrmoe.studies import anatomy, anatomy_tables, time_to_loss, time_to_loss_table
from lrmoe.studies.anatomy import AnatomyConfig
from lrmoe.studies.cells import FOLDER
from lrmoe.studies.grid import GridStudy
from lrmoe.studies.jobs import Progress
from lrmoe.studies.results import StudyResult
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.study_run import (
    STUDIES,
    Watch,
    check,
    check_folder,
    check_runs,
    command,
    machine,
    run_study,
    watched,
    write_config,
    write_result,
)
from lrmoe.studies.time_to_loss import TimeToLossConfig
from lrmoe.training.files import check_can_be_made, locked

Config = TypeVar("Config", AnatomyConfig, TimeToLossConfig)
# Carries a study out: settings as a user gives them, its folder, that of shared runs, runs at a time, a display.
Run = Callable[[Mapping[str, Any], Path, Path, int, "Watch | None"], StudyResult]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A study in the list. ``settings`` are the fields that a user may give, with their defaults."""

    question: str
    settings: Mapping[str, Any]
    run: Run


def run_named(
    name: str, given: Mapping[str, Any], out: Path, *, store: Path, jobs: int = 1, watch: Watch | None = None
) -> StudyResult:
    """Carries out the study of that name.

    Args:
        name: a key of :data:`CATALOG`.
        given: settings that are not left at their default, by field.
        out: the study's folder.
        store: folder of the training runs that studies share.
        jobs: runs at a time, where the study has many of them.
        watch: asked for a progress display when a batch of work begins.

    Raises:
        ValueError: naming what is wrong and the mend; nothing is written then.
    """
    entry = CATALOG[name]
    for field in given:
        if field not in entry.settings:
            raise ValueError(
                f"{field}={given[field]!r} is no setting of the study {name}; it has {', '.join(entry.settings)}"
            )
    return entry.run(given, out, store, jobs, watch)


def _grid(study: GridStudy) -> Entry:
    def run(given: Mapping[str, Any], out: Path, store: Path, jobs: int, watch: Watch | None) -> StudyResult:
        config = StudyConfig(**given)
        check(study, config, out, store)
        return run_study(study, config, out, store=store, jobs=jobs, watch=watch)

    settings = _settings(StudyConfig())
    if not study.has_regimes:
        del settings["regimes"]
    return Entry(question=study.question, settings=settings, run=run)


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
        check_folder(study.name, out)
        check_can_be_made(out / FOLDER, field="cells")
        study.check(config, out)
        out.mkdir(parents=True, exist_ok=True)
        with locked(out):
            write_config(study.name, config.to_dict(), out)
            result = study.work(config, out, watched(watch, study.work_left(config, out)))
            made = {**result.provenance, "command": command(study.name, given, out=out), "machine": machine()}
            result = replace(result, provenance=made)
            write_result(result, out)
        return result

    return Entry(question=study.question, settings=study.settings, run=run)


def _settings(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


def _anatomy_config(given: Mapping[str, Any]) -> AnatomyConfig:
    shared = _settings(StudyConfig())
    study = StudyConfig(**{name: value for name, value in given.items() if name in shared})
    return AnatomyConfig(study=study, **{name: value for name, value in given.items() if name not in shared})


def _check_anatomy(config: AnatomyConfig, out: Path) -> None:
    anatomy.check_cells(config, out)
    check_runs(anatomy.runs_of(config), config.study)


_ANATOMY = _Alone(
    name="anatomy",
    question=anatomy_tables.QUESTION,
    settings={
        **_settings(StudyConfig()),
        **{name: value for name, value in _settings(AnatomyConfig()).items() if name not in ("study", "variants")},
    },
    configure=_anatomy_config,
    check=_check_anatomy,
    work_left=anatomy.work_left,
    work=lambda config, out, progress: anatomy.anatomy(config, out, progress=progress),
)
_TIME_TO_LOSS = _Alone(
    name="time_to_loss",
    question=time_to_loss_table.QUESTION,
    settings=_settings(TimeToLossConfig()),
    configure=lambda given: TimeToLossConfig(**given),
    check=time_to_loss.check_cells,
    work_left=time_to_loss.work_left,
    work=lambda config, out, progress: time_to_loss.time_to_loss(config, out, progress=progress),
)
CATALOG: Mapping[str, Entry] = {
    **{name: _grid(study) for name, study in STUDIES.items()},
    _ANATOMY.name: _alone(_ANATOMY),
    _TIME_TO_LOSS.name: _alone(_TIME_TO_LOSS),
}
