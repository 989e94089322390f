"""What holds of the page of anything that is planned on paper."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from browser import opened

from lrmoe.report import write_report

WIDTH = """<script>addEventListener("load", () => setTimeout(() => {
  document.body.dataset.wider = document.documentElement.scrollWidth > window.innerWidth;
}, 300));</script></body>"""


def figures_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    figures: dict[str, Any] = json.loads(found.group(1))["figures"]
    return figures


def words(page: str) -> str:
    text = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", text)))


def written_again(folder: Path, write: Callable[[Path], Path] = write_report) -> None:
    """The page comes out the same again; of a damaged summary it is not written, and the old one stays."""
    before = (folder / "report.html").read_bytes()
    assert write(folder).read_bytes() == before
    summary = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text(summary.replace('"produced"', '"made"'))
    with pytest.raises(ValueError, match=r"summary.json is damaged or of another version of lrmoe \(KeyError"):
        write(folder)
    (folder / "summary.json").write_text(summary)
    assert (folder / "report.html").read_bytes() == before


def draws_itself(folder: Path, tmp_path: Path, *, width: int, figures: int) -> None:
    """A browser of this width shows all figures without a word on its console."""
    copy = tmp_path / folder.parent.name
    copy.mkdir()
    page = copy / "report.html"
    page.write_text((folder / "report.html").read_text(encoding="utf-8"), encoding="utf-8")
    document, console = opened(page, copy / "profile", width, WIDTH)
    assert console == ""
    assert document.count('data-rendered="true"') == figures
    assert 'data-wider="false"' in document, "nothing makes the page scroll sideways"
