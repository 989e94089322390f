"""What only a comparison's page has: its dots are the seeds' differences, and its advice follows from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from run_folders import VARIANTS, compare_run
from test_index_page import figures_of, markup, words

pytest.importorskip("plotly")
from lrmoe.report import write_report


def page_of(folder: Path, **options: Any) -> str:
    return write_report(compare_run(folder, **options)).read_text(encoding="utf-8")


def test_dots_are_the_seeds_and_their_means(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    figure = figures_of(page)["cost"]
    base, *others = summary["rows"]
    mean = sum(base["eval_losses"]) / 3
    assert figure["data"][0]["x"] == pytest.approx([loss - mean for loss in base["eval_losses"]])
    for place, row in enumerate(others, start=1):
        seeds, middle = (trace for trace in figure["data"] if trace["y"][0] == place)
        assert seeds["x"] == row["eval_loss_differences"]
        assert middle["x"] == pytest.approx([row["eval_loss_difference"]])
        assert seeds["meta"] == {"variant": place}
    (band,) = figure["layout"]["shapes"]
    assert (band["x0"], band["x1"]) == (-base["eval_loss_spread"], base["eval_loss_spread"])
    low, high = figure["layout"]["xaxis"]["range"]
    assert low < band["x0"]
    assert high > others[-1]["eval_loss_difference"]
    kept = figures_of(page)["kept_by_variant"]["data"]
    assert kept[0]["x"] == pytest.approx([100 * row["kept_share"] for row in summary["rows"]])
    assert kept[1]["x"] == pytest.approx([100 * row["kept_importance_share"] for row in summary["rows"]])
    assert figures_of(page)["variance_by_variant"]["data"][0]["x"] == [row["variance_share"] for row in summary["rows"]]


def test_three_seeds_recommend_what_is_within_the_spread_and_faster(tmp_path: Path) -> None:
    said = words(page_of(tmp_path / "run"))
    box = said[said.index("What you should do") : said.index("It rests on")]
    assert "Use “C20 pps” (+0.005 nats; seed spread 0.040)" in box
    assert "although every seed leans to worse" in box
    assert "Do not use “C20 topq” (+0.300 nats; seed spread 0.040)" in box
    assert "13 % less time (52.0 ms against 60.0 ms a step)" in box
    assert "Expect 5.3 % of a whole step (150 ms)" in box


def test_one_seed_cannot_tell(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", seeds=(0,))
    said = words(page)
    assert "one seed cannot tell" in said
    assert "shapes" not in figures_of(page)["cost"]["layout"]
    assert "Use “" not in said


def test_a_seed_that_is_not_finite_and_a_name_that_is_markup(tmp_path: Path) -> None:
    name = "C20 <b>pps</b> & 'q'"
    run = compare_run(tmp_path / "run", variants={"C0": VARIANTS["C0"], name: VARIANTS["C20 pps"]})
    summary = json.loads((run / "summary.json").read_text())
    row = summary["rows"][1]
    row["eval_loss_differences"][1] = row["eval_loss_difference"] = math.nan
    (run / "summary.json").write_text(json.dumps(summary))
    page = write_report(run).read_text(encoding="utf-8")
    assert f"Look at the curves of “{name}”" in words(page)
    assert "<b>pps</b>" not in markup(page)
    assert len([trace for trace in figures_of(page)["cost"]["data"] if trace["y"][0] == 1]) == 1, "seeds, and no mean"


def test_a_comparison_whose_exact_variant_has_no_loss(tmp_path: Path) -> None:
    run = compare_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    summary["rows"][0]["eval_loss"] = math.nan
    (run / "summary.json").write_text(json.dumps(summary))
    assert "Get “C0” to train first" in words(write_report(run).read_text(encoding="utf-8"))
