"""What the verbs' options have in common."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

TYPES = {"int": int, "float": float, "str": str}


def path(text: str) -> Path:
    """A folder's name."""
    # An empty name, say of a shell variable that is not set, would otherwise mean the current folder.
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; give a folder")
    return Path(text)


def integers(text: str) -> tuple[int, ...]:
    """A list of integers, separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 0,1,2") from None


def words(text: str) -> tuple[str, ...]:
    """A list of names, separated by commas."""
    found = tuple(part.strip() for part in text.split(","))
    # An empty list would mean the default without saying so.
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names with commas between them")
    return found


def number_or_none(text: str) -> float | None:
    """A number, or None for the word none."""
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from None


def need(*packages: str) -> None:
    """Looks for packages before anything is written; what is missing is reported by :func:`lrmoe.cli.main`."""
    for package in packages:
        importlib.import_module(package)


def add_out(parser: argparse.ArgumentParser, command: str) -> None:
    """``--out`` and ``--overwrite``."""
    parser.add_argument("--out", type=path, metavar="DIR", help="folder to write the records to")
    parser.add_argument("--overwrite", action="store_true", help=f"delete what {command} wrote to --out before")


def add_fields(
    parser: argparse.ArgumentParser,
    settings: Iterable[Field[Any]],
    *,
    choices: Mapping[str, Sequence[str]],
    names: Mapping[str, str],
) -> None:
    """An option for each field of a config whose metadata has a ``help``; what is not given is left to the config.

    Args:
        choices: values of a field, where there are few.
        names: what stands for the value in the help, where it is neither number nor file.
    """
    for field in settings:
        kind = str(field.type).partition(" ")[0]
        if kind == "bool":
            parser.add_argument(
                "--" + field.name.replace("_", "-"), action="store_true", help=field.metadata["help"].replace("%", "%%")
            )
            continue
        default = "" if field.default is None else f" ({field.default:g})" if kind == "float" else f" ({field.default})"
        shown = names.get(field.name, {"int": "N", "float": "X"}.get(kind, "FILE"))
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=TYPES.get(kind, str),
            choices=choices.get(field.name),
            metavar=None if field.name in choices else shown,
            help=field.metadata["help"].replace("%", "%%") + default,
        )


def only_of(others: str, given: Mapping[str, Any], config: type) -> None:
    """ValueError for an option that ``config`` does not have."""
    known = {field.name for field in fields(config)}
    for name in given:
        if name not in known:
            raise ValueError(f"--{name.replace('_', '-')} is for {others}")
