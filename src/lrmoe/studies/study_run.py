"""Carries a study out: runs what is missing, then writes its tables, conclusions and page."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lrmoe.studies import ablation, error_budget, quota_spread, remainder, router_gradient, schedules
from lrmoe.studies.cells import Cell, missing, run_cells, steps_of
from lrmoe.studies.grid import Comparison, GridStudy, Rows, table
from lrmoe.studies.jobs import Progress
from lrmoe.studies.kept_run import check_weights
from lrmoe.studies.results import StudyResult, markdown
from lrmoe.studies.study_config import StudyConfig
from lrmoe.training.files import (
    check_can_be_made,
    check_entries,
    is_passing,
    locked,
    read_json,
    write_json,
    write_records,
    write_text,
)
from lrmoe.training.run import load, versions

STUDIES: Mapping[str, GridStudy] = {
    module.STUDY.name: module.STUDY
    for module in (ablation, router_gradient, quota_spread, error_budget, schedules, remainder)
}
# Told how many optimizer steps are to come; gives what is told of each.
Watch = Callable[[int], Progress]


def check(study: GridStudy, config: StudyConfig, out: Path, store: Path) -> None:
    """Checks what a user can get wrong, before anything is written or trained.

    Raises:
        ValueError: naming what is wrong and the mend.
    """
    check_folder(study.name, out, program=study.program)
    check_can_be_made(store, field="cells")
    cells = [cell for comparison in study.first(config) for cell in _cells(comparison, config)]
    # Damage is told before hours go into what is missing.
    for cell in cells:
        cell.check(store)
    for cell in missing(cells, store):
        if cell.start is not None:
            check_weights(cell.start.folder(store))
    check_runs(cells, config)


def check_runs(cells: Iterable[Cell], config: StudyConfig) -> None:
    """Raises ValueError if a run, or one that it starts from, could not load its text or its model."""
    loaded = set()
    for cell in cells:
        for one in (cell.start, cell):
            if one is None:
                continue
            # The text and the model are the same for all that share these.
            key = (one.config.model, one.config.text, one.config.memorize_bytes, one.config.seq)
            if key not in loaded:
                try:
                    load(one.config)
                except ValueError as error:
                    if config.fine_tune_text in (None, config.text) or one.config.text != config.fine_tune_text:
                        raise
                    raise ValueError(re.sub(r"\Atext=", "fine_tune_text=", str(error))) from None
            loaded.add(key)


def check_folder(name: str, out: Path, *, program: str = "lrmoe study") -> None:
    """Raises ValueError if ``out`` cannot take the study's results: it holds something else, or a folder where one of
    their files belongs."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file; give a folder")
    check_can_be_made(out)
    if (out / "config.json").exists():
        stored = read_json(out / "config.json")
        if stored.get("command") != "study" or stored.get("study") != name:
            raise ValueError(f"out={str(out)!r} was not written by {program} {name}; give another folder")
    elif out.is_dir() and any(entry.name != "cells" and not is_passing(entry.name) for entry in out.iterdir()):
        raise ValueError(f"out={str(out)!r} holds something else than a study; give another folder")
    check_entries(out)


def run_study(
    study: GridStudy, config: StudyConfig, out: Path, *, store: Path, jobs: int = 1, watch: Watch | None = None
) -> StudyResult:
    """Trains what ``store`` does not hold yet and writes ``config.json``, ``metrics.jsonl`` (a line a row),
    ``summary.json`` and ``table.md`` into ``out``.

    Runs that have finished are never done again, whichever study asked for them; an interrupted one goes on from its
    last checkpoint.

    Args:
        study: which.
        config: size, seeds and regimes.
        out: the study's folder.
        store: folder of the runs, which studies may share.
        jobs: runs at a time, with one thread each.
        watch: asked for a progress display when a batch of runs begins.

    Raises:
        ValueError: if another process works in one of the folders, or a run cannot be carried out.
    """
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        write_config(study.name, config.to_dict(), out)
        compared = study.first(config)
        rows = _carry_out(compared, config, store, jobs, watch)
        more = study.then(config, rows)
        rows |= _carry_out(more, config, store, jobs, watch)
        conclusions, advice = study.conclude(rows)
        cells = [cell for comparison in (*compared, *more) for cell in _cells(comparison, config)]
        result = StudyResult(
            study=study.name,
            title=study.title,
            question=study.question,
            tables=[table(comparison, rows[comparison.name]) for comparison in (*compared, *more)],
            figures=study.figures(compared, rows),
            conclusions=conclusions,
            advice=advice,
            provenance=provenance(study, config, cells, out, store, jobs),
        )
        write_result(result, out)
    return result


def write_config(name: str, settings: Mapping[str, Any], out: Path) -> None:
    """``config.json`` of a study's folder."""
    write_json(
        out / "config.json", {"command": "study", "study": name, "settings": dict(settings), "versions": versions()}
    )


def watched(watch: Watch | None, work: int) -> Progress:
    """The display of so much work; nothing where nobody watches."""
    return (lambda *_: None) if watch is None else watch(work)


def write_result(result: StudyResult, out: Path) -> None:
    """The files of a study's folder but ``config.json``."""
    lines = [{"table": one.name, **row} for one in result.tables for row in one.rows]
    write_records(out / "metrics.jsonl", lines)
    text = "\n".join(f"### {one.title}\n\n{markdown(one)}" for one in result.tables)
    write_text(out / "table.md", text + "".join(f"\n- {sentence}" for sentence in result.conclusions) + "\n")
    write_json(out / "summary.json", result.to_dict())


def provenance(
    study: GridStudy, config: StudyConfig, cells: list[Cell], out: Path, store: Path, jobs: int
) -> dict[str, Any]:
    """Where numbers come from: the command, what the runs were made with, the machine and the time they took."""
    made_with: dict[str, set[str]] = {}
    seconds = 0.0
    for cell in {cell.key: cell for cell in cells}.values():
        for package, version in cell.versions(store).items():
            made_with.setdefault(package, set()).add(version)
        seconds += cell.summary(store)["seconds"]
    return {
        "command": command(study.name, config.given(), out=out, store=store, jobs=jobs, program=study.program),
        "versions": {package: ", ".join(sorted(found)) for package, found in made_with.items()},
        "machine": machine(),
        "runs": len({cell.key for cell in cells}),
        "run_seconds": seconds,
    }


def command(
    name: str,
    given: Mapping[str, Any],
    *,
    out: Path,
    store: Path | None = None,
    jobs: int = 1,
    program: str = "lrmoe study",
) -> str:
    """The command line that makes the study with these settings, for a shell to read.

    Args:
        given: settings, by field.
        out: the study's folder.
        store: that of the training runs; None where it is the default, or the study has no such folder.
        jobs: runs at a time.
        program: what is typed before the study's name.
    """
    parts, options = [*program.split(), name], {field.name for field in fields(StudyConfig)}
    for field, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
        parts += _option(field.replace("_", "-"), text) if field in options else _option("set", f"{field}={text}")
    parts += _option("out", str(out))
    if store is not None and store != out / "cells":
        parts += _option("cells", str(store))
    return shlex.join([*parts, *(["--jobs", str(jobs)] if jobs != 1 else [])])


def _option(name: str, text: str) -> list[str]:
    """Two words, or one where the value would be taken for an option."""
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def machine() -> dict[str, Any]:
    """What a reader needs to know of the machine, without its name."""
    return {"system": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count()}


def _carry_out(
    compared: list[Comparison], config: StudyConfig, store: Path, jobs: int, watch: Watch | None
) -> dict[str, Rows]:
    cells = [cell for comparison in compared for cell in _cells(comparison, config)]
    # Seed by seed, so that what is interrupted has whole seeds.
    cells.sort(key=lambda cell: config.seeds.index(cell.config.seed))
    run_cells(cells, store, jobs=jobs, progress=watched(watch, steps_of(cells, store)))
    return {comparison.name: comparison.rows(store, config.seeds) for comparison in compared}


def _cells(comparison: Comparison, config: StudyConfig) -> list[Cell]:
    return [cell for cells in comparison.cells(config.seeds).values() for cell in cells]
