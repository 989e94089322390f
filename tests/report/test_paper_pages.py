"""The page of ``lrmoe plan``: what it holds and says, and nothing of a user's as markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import BROWSER
from page_checks import draws_itself, figures_of, words, written_again
from paper_folders import planned


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(tmp_path_factory.mktemp("planned"))


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


def test_the_page_is_written_again_and_damage_is_named(plan_folder: Path) -> None:
    written_again(plan_folder)


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize("width", [1280, pytest.param(500, marks=pytest.mark.slow)])
def test_the_page_draws_itself(plan_folder: Path, width: int, tmp_path: Path) -> None:
    draws_itself(plan_folder, tmp_path, width=width, figures=2)
