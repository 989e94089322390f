"""One self-contained HTML file of a run folder: styles, figures and plotly inside, nothing fetched when opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrmoe import moved
from lrmoe.report.index_entries import is_run_folder
from lrmoe.report.index_entry import Entry
from lrmoe.report.index_page import write_index_page
from lrmoe.report.index_records import (
    Fill,
    read_balance,
    read_comparison,
    read_plan,
    read_policies,
    read_study,
    read_training,
)
from lrmoe.report.page import write_run_page
from lrmoe.report.plan_page import write_plan_page
from lrmoe.report.replay_page import write_replay_page
from lrmoe.report.run_folder import read_object
from lrmoe.report.study_page import write_study_page

# What records raise that are JSON, but not what a command writes.
_DAMAGE = (KeyError, TypeError, AttributeError, IndexError, StopIteration, ArithmeticError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What a command leaves, for who looks at it.

    Attributes:
        write: writes the page of a folder of this kind, and returns its path.
        fill: reads its records for a row of the index.
    """

    write: Callable[[Path], Path]
    fill: Fill


def _elsewhere(verb: str) -> Kind:
    """Of a verb that left the package: the index lists what it left, and says what writes the page."""

    def write(folder: Path) -> Path:
        raise ValueError(moved.page(verb, str(folder)))

    def fill(entry: Entry, config: dict[str, Any], summary: dict[str, Any] | None) -> None:
        read_policies(entry, config, summary, "policies")

    return Kind(write=write, fill=fill)


KINDS: Mapping[str, Kind] = {
    "train": Kind(write=write_run_page, fill=read_training),
    "compare": Kind(write=write_run_page, fill=read_comparison),
    "balance": Kind(write=write_replay_page, fill=read_balance),
    "plan": Kind(write=write_plan_page, fill=read_plan),
    "study": Kind(write=write_study_page, fill=read_study),
    **{verb: _elsewhere(verb) for verb in moved.VERBS},
}
"""By ``command`` of a folder's ``config.json``."""


def write_report(run_dir: Path, kinds: Mapping[str, Kind] = KINDS) -> Path:
    """Writes ``report.html`` into a folder that a command wrote with ``--out``, replacing an old one; or an index into
    a folder of such folders, at most three levels down, with the pages that are missing or older than their records.

    The page opens offline in any current browser; it is about 5 MB, nearly all of it plotly. It is replaced in one
    move: whoever has it open never sees half of it, and a failure leaves the old page.

    Args:
        run_dir: the folder, with ``config.json`` and ``metrics.jsonl``; ``summary.json`` is absent while the run is
            unfinished. Or a folder of run folders, which has none of these itself.
        kinds: what each command leaves; a program with more commands than ``lrmoe`` gives theirs too.

    Returns:
        The path of the page.

    Raises:
        ValueError: if a file is missing or malformed; names the file and the line.
        ModuleNotFoundError: if plotly is not installed (the ``train`` extra has it).
    """
    run_dir = Path(run_dir)
    if run_dir.is_dir() and not is_run_folder(run_dir):
        fills = {command: kind.fill for command, kind in kinds.items()}
        return write_index_page(run_dir, fills, lambda folder: write_report(folder, kinds))
    try:
        return _write(run_dir, kinds)
    except _DAMAGE as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{run_dir / 'config.json'}, or another of the records beside it, is damaged or of another version of "
            f"lrmoe ({reason})"
        ) from error


def _write(run_dir: Path, kinds: Mapping[str, Kind]) -> Path:
    """The page of one folder, by the command that wrote it."""
    command = read_object(run_dir / "config.json").get("command") if run_dir.is_dir() else None
    if isinstance(command, str) and command in kinds:
        return kinds[command].write(run_dir)
    return write_run_page(run_dir)
