"""The studies by name, and how one is carried out from what a user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lrmoe.studies.grid import GridStudy
from lrmoe.studies.results import StudyResult
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.study_run import STUDIES, Watch, check, run_study

# Carries a study out: settings as a user gives them, its folder, that of shared runs, runs at a time, a display.
Run = Callable[[Mapping[str, Any], Path, Path, int, "Watch | None"], StudyResult]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A study in the list. ``settings`` are the fields that a user may give, with their defaults."""

    question: str
    settings: Mapping[str, Any]
    run: Run


def settings_of(config: Any) -> dict[str, Any]:
    """The fields of a config, by name."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def grid(study: GridStudy) -> Entry:
    """The entry of a study that is a set of comparisons."""

    def run(given: Mapping[str, Any], out: Path, store: Path, jobs: int, watch: Watch | None) -> StudyResult:
        config = StudyConfig(**given)
        check(study, config, out, store)
        return run_study(study, config, out, store=store, jobs=jobs, watch=watch)

    settings = settings_of(StudyConfig())
    if not study.has_regimes:
        del settings["regimes"]
    return Entry(question=study.question, settings=settings, run=run)


CATALOG: Mapping[str, Entry] = {name: grid(study) for name, study in STUDIES.items()}
"""The studies of ``lrmoe study``."""


def run_named(
    name: str,
    given: Mapping[str, Any],
    out: Path,
    *,
    store: Path,
    jobs: int = 1,
    watch: Watch | None = None,
    catalog: Mapping[str, Entry] = CATALOG,
) -> StudyResult:
    """Carries out the study of that name.

    Args:
        name: a key of ``catalog``.
        given: settings that are not left at their default, by field.
        out: the study's folder.
        store: folder of the training runs that studies share.
        jobs: runs at a time, where the study has many of them.
        watch: asked for a progress display when a batch of work begins.
        catalog: the studies that there are.

    Raises:
        ValueError: naming what is wrong and the mend; nothing is written then.
    """
    entry = catalog[name]
    for field in given:
        if field not in entry.settings:
            raise ValueError(
                f"{field}={given[field]!r} is no setting of the study {name}; it has {', '.join(entry.settings)}"
            )
    return entry.run(given, out, store, jobs, watch)
