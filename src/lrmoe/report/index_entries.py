"""The run folders below a folder, each as a row of the index."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lrmoe.report.index_entry import Entry
from lrmoe.report.index_records import Fill, check
from lrmoe.report.run_folder import read_object
from lrmoe.training.files import OWN_ENTRIES

DEPTH = 3
"""Levels below the folder that are looked into."""
_RECORDS = ("config.json", "metrics.jsonl", "summary.json")
# What a run keeps inside its own folder is listed with that run.
_INSIDE = frozenset(OWN_ENTRIES)


def is_run_folder(folder: Path) -> bool:
    """Whether a run's records, or what is left of them, are in the folder."""
    # Unlike Path.exists, also for a folder that may not be entered.
    return any(os.path.exists(folder / name) for name in _RECORDS)


def read_entries(root: Path, fills: Mapping[str, Fill]) -> tuple[list[Entry], bool]:
    """Every run folder below ``root``, in the order of their names, and whether folders lie deeper than
    :data:`DEPTH` levels and were left out.

    A folder that cannot be read is an entry with a problem. A folder that is none of this project's, such as a
    checkpoint, is left out.

    Args:
        root: the folder.
        fills: for each command that writes run folders, what reads its records.
    """
    found: list[Entry] = []
    deeper = False
    seen = {root.resolve()}

    def visit(folder: Path, level: int) -> None:
        nonlocal deeper
        inside = is_run_folder(folder) if level else False
        if inside and (entry := read_entry(folder, root, fills)) is not None:
            found.append(entry)
        try:
            children = sorted(child for child in folder.iterdir() if child.is_dir() and child.name[0] != ".")
        except OSError as error:
            found.append(Entry(path=folder, name=_name(folder, root), problem=f"cannot be opened: {error.strerror}"))
            return
        for child in children:
            # Cells are runs that studies share, beside their folders or in them.
            if child.name == "cells" or (inside and child.name in _INSIDE):
                continue
            if level == DEPTH:
                deeper = True
                return
            # A link to a folder above would go round for ever.
            if (real := child.resolve()) not in seen:
                seen.add(real)
                visit(child, level + 1)

    visit(root, 0)
    return found, deeper


def read_entry(folder: Path, root: Path, fills: Mapping[str, Fill]) -> Entry | None:
    """What an index says of a folder; None if no command of this project wrote it."""
    entry = Entry(path=folder, name=_name(folder, root), changed=_changed(folder))
    path = folder / "config.json"
    try:
        if not path.exists():
            raise ValueError("config.json is missing: the command was stopped before it could write it")
        config = read_object(path)
        if "command" not in config and not (folder / "metrics.jsonl").exists():
            return None
        command = config.get("command")
        if not isinstance(command, str) or command not in fills:
            raise ValueError(f"config.json: command={command!r} is none of {', '.join(fills)}")
        entry.command = command
        summary_path = folder / "summary.json"
        summary = read_object(summary_path) if summary_path.exists() else None
        fills[entry.command](entry, config, summary)
        check(entry)
    except (ValueError, OSError) as error:
        entry.problem = _in_folder(error, folder)
    except (KeyError, TypeError, AttributeError, IndexError, StopIteration, ArithmeticError) as error:
        entry.problem = f"damaged or of another version of lrmoe ({type(error).__name__}: {error})"
    if entry.problem is not None:
        entry.results = []
    return entry


def _in_folder(error: Exception, folder: Path) -> str:
    """The message, without the path of the folder that it is listed under."""
    return str(error).replace(f"{folder}{os.sep}", "")


def _name(folder: Path, root: Path) -> str:
    return folder.relative_to(root).as_posix()


def _changed(folder: Path) -> float:
    """When the records were last written, seconds since 1970."""
    times = []
    for name in _RECORDS:
        # A run that is going on replaces its files.
        with suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times, default=0.0)
