"""The pages of ``lrmoe plan`` and ``lrmoe pressure``: what they hold and say, and nothing of a user's as markup."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, opened
from paper_folders import planned, pressed

pytest.importorskip("plotly")
from lrmoe.report import write_report
from lrmoe.studies.published import THROUGHPUT

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


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(tmp_path_factory.mktemp("planned"))


@pytest.fixture(scope="module")
def pressure_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed(tmp_path_factory.mktemp("pressed"))


def test_the_plans_page_shows_every_setting_and_the_recommendation(plan_folder: Path) -> None:
    page = (plan_folder / "report.html").read_text(encoding="utf-8")
    summary = json.loads((plan_folder / "summary.json").read_text())
    said = words(page)
    assert summary["recommendation"] in said
    assert page.count('class="marked"') == 1
    figures = figures_of(page)
    assert figures["memory"]["data"][0]["x"] == [round(one["exact_bytes"] / 2**30, 4) for one in summary["options"]]
    assert figures["time"]["data"][0]["x"] == [round(one["over_fixed"], 4) for one in summary["options"]]
    assert len(summary["options"]) == 2 * 5
    for item in summary["memory"]["items"]:
        assert (item["name"] in said) == bool(item["bytes"])
    assert "<i>machine</i>" not in page
    assert "No router made these loads" in said
    assert len(re.findall(r"<script(?![^>]*json)[^>]*src=", page)) == 0


def test_the_pressures_page_shows_what_the_records_say(pressure_folder: Path) -> None:
    page = (pressure_folder / "report.html").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in (pressure_folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((pressure_folder / "summary.json").read_text())
    assert summary["policies"] == [{key: value for key, value in line.items() if key != "step"} for line in lines]
    assert len(lines) == 2 * 4 * 5
    figures = figures_of(page)
    for line in lines:
        figure = figures[f"{line['accounting']}-completes"]
        trace = next(trace for trace in figure["data"] if trace["name"] == line["policy"])
        assert trace["y"][trace["x"].index(line["pressure"])] == round(100 * line["completes"], 3)
    said = words(page)
    for share in THROUGHPUT.values():
        assert f"{100 * share:.1f} %" in said
    for heading in ("Definitions", "What the published figures would need", "Who is ahead of whom"):
        assert heading in said
    # Four ranks are not the paper's eight, and cannot be five times as busy as the mean.
    assert "The paper’s memory and backward beside ours" not in said
    assert "cannot be had" in said
    assert page.count(">yes<") + page.count(">no<") == 2 * 2 * sum(
        one["reason"] is None for one in summary["order"] if one["accounting"] == "kept"
    )
    assert "<i>machine</i>" not in page


def test_pages_are_written_again_and_damage_is_named(plan_folder: Path, pressure_folder: Path) -> None:
    for folder in (plan_folder, pressure_folder):
        before = (folder / "report.html").read_bytes()
        assert write_report(folder).read_bytes() == before
        summary = (folder / "summary.json").read_text()
        (folder / "summary.json").write_text(summary.replace('"produced"', '"made"'))
        with pytest.raises(ValueError, match=r"summary.json is damaged or of another version of lrmoe \(KeyError"):
            write_report(folder)
        (folder / "summary.json").write_text(summary)
        assert (folder / "report.html").read_bytes() == before


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize("width", [1280, pytest.param(500, marks=pytest.mark.slow)])
def test_both_pages_draw_themselves(plan_folder: Path, pressure_folder: Path, width: int, tmp_path: Path) -> None:
    for folder, figures in ((plan_folder, 2), (pressure_folder, 8)):
        copy = tmp_path / folder.parent.name
        copy.mkdir()
        page = copy / "report.html"
        page.write_text((folder / "report.html").read_text(encoding="utf-8"), encoding="utf-8")
        document, console = opened(page, copy / "profile", width, WIDTH)
        assert console == ""
        assert document.count('data-rendered="true"') == figures
        assert 'data-wider="false"' in document, "nothing makes the page scroll sideways"
