"""``lrmoe report``: the page of a run folder, or the index of a folder of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lrmoe.commands.options import need, path


def add_options(parser: argparse.ArgumentParser) -> None:
    """The folder."""
    parser.add_argument(
        "run", type=path, metavar="DIR", help="what a command wrote with --out, or a folder of such folders"
    )


def folder_of(given: dict[str, Any]) -> Path:
    """What was given; ValueError if it is no folder."""
    folder: Path = given["run"]
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give what a command wrote with --out, or a folder of such folders")
    return folder


def run(given: dict[str, Any]) -> int:
    """The verb."""
    folder = folder_of(given)
    need("plotly")
    from lrmoe.report import write_report

    print(write_report(folder))
    return 0
