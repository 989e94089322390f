"""All studies by name, whatever they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrmoe.studies.results import StudyResult
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.study_run import STUDIES, Watch, check, run_study

# What each asks, for who lists them.
CATALOG: Mapping[str, str] = {name: study.question for name, study in STUDIES.items()}


def run_named(
    name: str, given: Mapping[str, Any], out: Path, *, store: Path, jobs: int = 1, watch: Watch | None = None
) -> StudyResult:
    """Carries out a study with settings as a user gives them.

    Raises:
        ValueError: naming what is wrong and the mend; nothing is written then.
    """
    study = STUDIES[name]
    config = StudyConfig(**given)
    check(study, config, out)
    return run_study(study, config, out, store=store, jobs=jobs, watch=watch)
