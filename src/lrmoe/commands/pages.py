"""The page of what a verb has written: runs leave records, and only the command line turns them into pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lrmoe.report.kinds import Kind


def write_page(out: Path, kinds: Mapping[str, Kind] | None = None) -> None:
    """Writes the page of a folder of records, and says where it is; ``kinds`` of a program with more verbs than
    ``lrmoe``."""
    from lrmoe.report.kinds import KINDS, write_report
    from lrmoe.terminal import console

    console.print(f"report: {write_report(out, KINDS if kinds is None else kinds)}", markup=False)
