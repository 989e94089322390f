"""The page of what a verb has written: runs leave records, and only the command line turns them into pages."""

from __future__ import annotations

from pathlib import Path


def write_page(out: Path) -> None:
    """Writes the page of a folder of records, and says where it is."""
    from lrmoe.report import write_report
    from lrmoe.terminal import console

    console.print(f"report: {write_report(out)}", markup=False)
