"""``python -m paper report``: what ``lrmoe report`` does, for the paper's folders too."""

from __future__ import annotations

from typing import Any

from lrmoe.commands.options import need
from lrmoe.commands.report import add_options, folder_of

__all__ = ["add_options", "run"]


def run(given: dict[str, Any]) -> int:
    """The verb."""
    folder = folder_of(given)
    need("plotly")
    from lrmoe.report.kinds import write_report
    from paper.kinds import KINDS

    print(write_report(folder, KINDS))
    return 0
