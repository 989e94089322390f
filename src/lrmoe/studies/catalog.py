"""All studies by name, whatever they are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lrmoe.studies import anatomy_tables, time_to_loss_table
from lrmoe.studies.anatomy import AnatomyConfig, anatomy, runs_of
from lrmoe.studies.anatomy import work_left as anatomy_left
from lrmoe.studies.grid import GridStudy
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
from lrmoe.studies.time_to_loss import TimeToLossConfig, check_cells, time_to_loss
from lrmoe.studies.time_to_loss import work_left as time_left
from lrmoe.training.files import locked

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

    return Entry(question=study.question, settings=_settings(StudyConfig()), run=run)


def _anatomy(given: Mapping[str, Any], out: Path, store: Path, jobs: int, watch: Watch | None) -> StudyResult:
    shared = set(_settings(StudyConfig()))
    study = StudyConfig(**{name: value for name, value in given.items() if name in shared})
    config = AnatomyConfig(study=study, **{name: value for name, value in given.items() if name not in shared})
    check_folder("anatomy", out)
    check_runs(runs_of(config), study)
    return _alone(
        "anatomy",
        given,
        out,
        lambda: anatomy(config, out, progress=watched(watch, anatomy_left(config, out))),
        config.to_dict(),
    )


def _time_to_loss(given: Mapping[str, Any], out: Path, store: Path, jobs: int, watch: Watch | None) -> StudyResult:
    config = TimeToLossConfig(**given)
    check_folder("time_to_loss", out)
    check_cells(config, out)
    return _alone(
        "time_to_loss",
        given,
        out,
        lambda: time_to_loss(config, out, progress=watched(watch, time_left(config, out))),
        config.to_dict(),
    )


def _alone(
    name: str, given: Mapping[str, Any], out: Path, work: Callable[[], StudyResult], settings: Mapping[str, Any]
) -> StudyResult:
    """A study that keeps its runs to itself, in ``out/cells``: its work, and the files around it."""
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        write_config(name, settings, out)
        result = work()
        made = {**result.provenance, "command": command(name, given), "machine": machine()}
        result = replace(result, provenance=made)
        write_result(result, out)
    return result


def _settings(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


CATALOG: Mapping[str, Entry] = {
    **{name: _grid(study) for name, study in STUDIES.items()},
    "anatomy": Entry(
        question=anatomy_tables.QUESTION,
        settings={
            **_settings(StudyConfig()),
            **{k: v for k, v in _settings(AnatomyConfig()).items() if k not in ("study", "variants")},
        },
        run=_anatomy,
    ),
    "time_to_loss": Entry(
        question=time_to_loss_table.QUESTION, settings=_settings(TimeToLossConfig()), run=_time_to_loss
    ),
}
