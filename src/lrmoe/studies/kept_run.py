"""Training runs that a comparison or a study keeps, a folder each, and reads back when all are done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrmoe.studies.cell_file import MAYBE_NUMBER, NUMBER, Kind, read_whole, require
from lrmoe.studies.compare_table import MEANS
from lrmoe.training.checkpoints import newest_checkpoint
from lrmoe.training.files import check_out_folder, read_records

FINISHED = "summary.json"
"""The file that a run writes last."""
_SUMMARY: dict[str, Kind] = {
    "seconds": NUMBER,
    **dict.fromkeys(MEANS, MAYBE_NUMBER),
    "diverged_at": MAYBE_NUMBER,
    "saved_bytes": (
        "null or an object with the numbers moe and model",
        lambda value: (
            value is None or (isinstance(value, dict) and all(NUMBER[1](value.get(k)) for k in ("moe", "model")))
        ),
    ),
}


def is_finished(folder: Path) -> bool:
    """Whether the run has its result."""
    return (folder / FINISHED).exists()


def mend(folder: Path) -> str:
    """What a user can do about a damaged run."""
    return f"delete the folder {folder}, and the run is done again"


def read_kept(folder: Path, name: str, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """A file of the run that holds one object with values of these kinds.

    Raises:
        ValueError: if it is damaged; says how to mend it.
    """
    return read_whole(folder / name, lambda found: require(found, kinds), mend=mend(folder))


def read_summary(folder: Path) -> dict[str, Any]:
    """What ``summary.json`` of a finished run holds; raises as :func:`read_kept`."""
    return read_kept(folder, FINISHED, _SUMMARY)


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of the run; raises as :func:`read_kept`."""
    try:
        return read_records(folder / "metrics.jsonl")
    except ValueError as error:
        raise ValueError(f"{error}; {mend(folder)}") from None


def check_kept(folder: Path) -> None:
    """Checks what there is of the run, finished or interrupted; writes nothing.

    Raises:
        ValueError: if it is damaged; says how to mend it.
    """
    if is_finished(folder):
        read_summary(folder)
    elif (folder / "config.json").exists():
        try:
            check_out_folder(folder, command="train", resume=True, overwrite=False)
        except ValueError as error:
            raise ValueError(f"{error}; {mend(folder)}") from None
        read_lines(folder)


def check_weights(folder: Path) -> None:
    """Checks that others can go on from the run, if it is finished.

    Raises:
        ValueError: if its weights are gone; says how to mend it.
    """
    if is_finished(folder) and newest_checkpoint(folder) is None:
        raise ValueError(f"{folder} has no weights left to go on from; {mend(folder)}")
