"""The page of ``python -m paper pressure``: what it holds and says, and what ``lrmoe report`` makes of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER
from page_checks import draws_itself, figures_of, words, written_again
from paper_folders import planned, small_machine, small_model

from lrmoe.cli import main as lrmoe
from lrmoe.report.kinds import write_report
from paper.__main__ import PAPER, main
from paper.kinds import KINDS
from paper.pressure.config import PressureConfig
from paper.pressure.published import THROUGHPUT
from paper.pressure.run import pressure


def pressed(folder: Path, **options: Any) -> Path:
    """What ``python -m paper pressure`` writes."""
    settings = {"ep": 4, "seq": 256, "draws": 1, "floor": 1, "budget_gib": 0.008, "pressures": "1,2,4,8,16", **options}
    pressure(PressureConfig(model=small_model(folder), hardware=small_machine(folder), **settings), folder / "out")
    write_report(folder / "out", KINDS)
    return folder / "out"


@pytest.fixture(scope="module")
def pressure_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pressed(tmp_path_factory.mktemp("pressed"))


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


def test_the_page_is_written_again_and_damage_is_named(
    pressure_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written_again(pressure_folder, lambda folder: write_report(folder, KINDS))
    before = (pressure_folder / "report.html").read_bytes()
    assert main(["report", str(pressure_folder)], PAPER) == 0
    assert (pressure_folder / "report.html").read_bytes() == before
    assert lrmoe(["report", str(pressure_folder)]) == 2
    assert f"python -m paper report {pressure_folder}, in a clone of LRMoE, writes its page" in capsys.readouterr().err
    assert (pressure_folder / "report.html").read_bytes() == before


def test_an_index_lists_the_folder_and_says_who_writes_its_page(tmp_path: Path) -> None:
    folder = pressed(tmp_path)
    planned(tmp_path / "more")
    assert "largest batch that fits whole: " in words(write_report(tmp_path, KINDS).read_text(encoding="utf-8"))
    index = words(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "fixed; symi; ultraep; lrmoe" in index
    assert "python -m paper" not in index
    (folder / "report.html").unlink()
    index = words(write_report(tmp_path).read_text(encoding="utf-8"))
    assert f"python -m paper report {folder}, in a clone of LRMoE, writes its page" in index


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize("width", [1280, pytest.param(500, marks=pytest.mark.slow)])
def test_the_page_draws_itself(pressure_folder: Path, width: int, tmp_path: Path) -> None:
    draws_itself(pressure_folder, tmp_path, width=width, figures=8)
