"""What the pages of ``lrmoe plan`` and ``lrmoe balance`` with given loads share, as of whatever is planned on paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrmoe.report.frame import Frame, write_page
from lrmoe.report.run_folder import read_object
from lrmoe.report.text import escape


@dataclass(frozen=True, kw_only=True)
class Study:
    """``config.json`` and ``summary.json`` of a folder."""

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]

    @property
    def footer(self) -> str:
        """What the page is of, as HTML."""
        return (
            f"Written by LRMoE from {escape(self.path.resolve().name)}/. Everything here is arithmetic on paper: "
            "planners ran, nothing else did. A row is a token and one of the experts chosen for it."
        )


def write_paper_page(folder: Path, render: Callable[[Study], Frame]) -> Path:
    """Writes ``report.html``.

    Raises:
        ValueError: if a file is missing or damaged; names it, and leaves an old page alone.
    """
    study = Study(path=folder, config=read_object(folder / "config.json"), summary=read_object(folder / "summary.json"))
    try:
        frame = render(study)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, StopIteration) as error:
        name = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder / 'summary.json'} is damaged or of another version of lrmoe ({name})") from error
    return write_page(folder / "report.html", frame)
