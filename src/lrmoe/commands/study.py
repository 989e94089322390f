"""``lrmoe study``: does the loss hold, and when; for the small models here or for one's own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from lrmoe import moved
from lrmoe.commands.options import add_fields, integers, need, path, words
from lrmoe.commands.pages import write_page
from lrmoe.commands.run_options import EXTRA, quiet_libraries, say_fallback
from lrmoe.config import require_count
from lrmoe.problems import Problems
from lrmoe.studies.study_config import NAMES, REGIMES, StudyConfig
from lrmoe.training.documents import check_text
from lrmoe.training.presets import check_model

if TYPE_CHECKING:
    from lrmoe.studies.catalog import Entry


def add_options(parser: argparse.ArgumentParser) -> None:
    """The study's name and its settings."""
    parser.add_argument("study", type=_still_here, choices=NAMES, metavar="NAME", help=f"which: {', '.join(NAMES)}")
    add_settings(parser)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The settings of a study."""
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="folder of this study's results")
    parser.add_argument(
        "--cells", type=path, metavar="DIR", help="folder of the training runs, which studies share (DIR/cells)"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time, with one thread each (1)")
    parser.add_argument("--seeds", type=integers, metavar="N,N,...", help="seeds of each variant (0,1,2)")
    parser.add_argument(
        "--regimes", type=words, metavar="NAME,...", help=f"of {', '.join(REGIMES)}; default: the study's own"
    )
    parser.add_argument(
        "--set",
        dest="more",
        action="append",
        metavar="FIELD=VALUE",
        help="a setting by its name, also one that only this study has; repeat for more",
    )
    plain = [field for field in fields(StudyConfig) if "help" in field.metadata]
    add_fields(parser, plain, choices={}, names={"model": "MODEL", "text": "PATH", "fine_tune_text": "PATH"})


def run(given: dict[str, Any]) -> int:
    """The verb."""
    return carry_out(given.pop("study"), given, _catalog)


def _still_here(name: str) -> str:
    """The name; says of a study that left the package where it is."""
    if name in moved.STUDIES:
        raise argparse.ArgumentError(None, moved.where(f"lrmoe study {name}", name))
    return name


def _catalog() -> Mapping[str, Entry]:
    from lrmoe.studies.catalog import CATALOG

    return CATALOG


def carry_out(
    name: str, given: dict[str, Any], catalog: Callable[[], Mapping[str, Entry]], *, is_shared: bool = True
) -> int:
    """Carries a study out and shows what it found.

    Args:
        name: of the study.
        given: what was typed, of :func:`add_settings`.
        catalog: imports the studies, by name; called when what is given has been checked as far as that is possible
            without torch.
        is_shared: the study has the settings of :class:`StudyConfig`, which are then checked here.
    """
    out = given.pop("out")
    store = given.pop("cells", out / "cells")
    jobs = given.pop("jobs", 1)
    _check(jobs, given, is_shared)
    need(*EXTRA)
    quiet_libraries()
    from lrmoe.studies.catalog import run_named
    from lrmoe.studies.results import show
    from lrmoe.terminal import console, print_table, progress_bar

    studies = catalog()
    more = _more(given.pop("more", []), studies[name].settings)
    for field in given.keys() & more:
        raise ValueError(f"--set {field}=... and --{field.replace('_', '-')} say the same; give one")
    given |= more
    console.print(studies[name].question, markup=False)
    if "model" in given and "model" in studies[name].settings:
        say_fallback(given["model"])
    with progress_bar(name) as steps:
        result = run_named(name, given, out, store=store, jobs=jobs, watch=steps.expect, catalog=studies)
    for table in result.tables:
        headings = [column.label for column in table.columns]
        cells = [[show(row.get(column.key), column.form) for column in table.columns] for row in table.rows]
        console.print(f"\n{table.title}", markup=False)
        print_table(headings, cells, table.note)
    for heading, sentences in (("What it says", result.conclusions), ("What you should do", result.advice)):
        console.print(f"\n{heading}", markup=False)
        for sentence in sentences:
            console.print(f"- {sentence}", markup=False, soft_wrap=False)
    console.print(f"\ntable:  {out / 'table.md'}", markup=False)
    write_page(out)
    return 0


def _check(jobs: int, given: Mapping[str, Any], is_shared: bool) -> None:
    """Raises ValueError with all that can be told to be wrong before torch is imported."""
    problems = Problems()
    with problems:
        require_count("jobs", jobs, least=1)
    plain = {field.name for field in fields(StudyConfig)}
    if is_shared:
        with problems:
            StudyConfig(**{field: value for field, value in given.items() if field in plain})
        with problems:
            if "model" in given:
                check_model(given["model"])
    for field in ("text", "fine_tune_text"):
        with problems:
            if field in given:
                check_text(given[field], field=field)
    problems.tell()


def _more(texts: list[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``--set``."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in settings:
            raise ValueError(f"--set {text!r} is not FIELD=VALUE with a field of {', '.join(settings)}")
        if name in found:
            raise ValueError(f"--set {name}=... is given twice; give one")
        if name in ("model", "text", "fine_tune_text"):
            found[name] = value  # A name, whatever it looks like.
            continue
        parts = [_value(part) for part in value.split(",")]
        found[name] = tuple(parts) if isinstance(settings[name], tuple) else parts[0] if len(parts) == 1 else value
    return found


def _value(text: str) -> Any:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return None if text.lower() == "none" else text
