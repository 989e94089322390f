"""The page of one run: each part from its records, the table as the lines have it, hostile names as text."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from long_run import long_run
from run_folders import record, records, summary_of, train_config, train_run, unpacked, write

pytest.importorskip("plotly")
from lrmoe.report import palette
from lrmoe.report.page import render
from lrmoe.report.run_folder import read_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror='alert(2)'> &amp; \"q\""


def guarded() -> list[dict[str, Any]]:
    """A run whose guard stopped one layer at step 20 and let it drop again at step 50."""
    lines = records()
    name = "model.layers.1.mlp.experts"
    event = {"step": 20, "layer": name, "kind": "stopped", "value": 0.31, "limit": 0.1}
    lines[1]["guard_events"] = [event]
    lines[4]["guard_events"] = [{**event, "step": 50, "kind": "resumed", "value": None}]
    for line in lines:
        held = 20 <= line["step"] < 50
        line["guarded_layers"] = int(held)
        line["layers"][1]["guarded"] = held
    return lines


def on_ranks() -> list[dict[str, Any]]:
    lines = records()
    for line in lines:
        line["parallel"] = {
            "plans": 20,
            "home_max_over_mean": 1.5,
            "forward_max_over_mean": 1.05,
            "backward_max_over_mean": 1.06,
            "replicas": 0.5,
            "moved_rows": 10.0,
            "rows": 100.0,
            "extra_dropped": 0.0,
            "sent_bytes": {"tokens to experts": 10 * 2**20, HOSTILE: 2**10},
        }
    lines[0]["saved_bytes"] = {"moe": 3 * 2**20, "model": 9 * 2**20}
    return lines


def body(run: Path) -> str:
    return render(read_run(run)).body


def words(html: str) -> str:
    return " ".join(unescape(re.sub("<[^>]*>", " ", html)).split())


def test_the_table_is_what_the_lines_say(tmp_path: Path) -> None:
    lines = guarded()
    table = body(train_run(tmp_path / "run", lines)).partition('id="steps"')[2].partition("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", table)]
    assert [cell.partition("<")[0] for cell in rows[0]] == [
        *("Step", "Training loss", "Validation loss", "Drop", "Kept pairs", "Kept ΣR", "V*/ΣR", "Guarded"),
        "Load max/mean",
    ]
    for row, line in zip(rows[1:], lines, strict=True):
        validated = f"{line['eval_loss']:.4f}" if "eval_loss" in line else "–"
        assert [words(cell) for cell in row] == [
            str(line["step"]),
            f"{line['loss']:.4f}",
            validated,
            *("20.0 %", "80.0 %", "98.00 %", "0.0250"),
            str(line["guarded_layers"]),
            "1.60",
        ]


def test_the_guard_is_told_and_marked(tmp_path: Path) -> None:
    page = render(read_run(train_run(tmp_path / "run", guarded())))
    assert "The guard stopped the dropping once in 1 of 2 layers, first at step 20, where 0.310" in words(page.body)
    assert "The guard stopped layers from dropping once: layer 1 (from step 20)" in words(page.head)
    heat, stopped, resumed = page.figures["variance_map"]["data"]
    assert (stopped["x"], stopped["y"], stopped["marker"]["symbol"]) == ([20], ["layer 1"], "x")
    assert (resumed["x"], resumed["y"]) == ([50], ["layer 1"])
    assert heat["y"] == ["layer 0", "layer 1"]
    assert heat["x"] == [10, 20, 30, 40, 50, 60]
    assert unpacked(heat["z"]) == pytest.approx([0.025] * 12)


def test_the_limit_is_a_line_where_values_are_near_it(tmp_path: Path) -> None:
    lines = records(drop=0.4)
    config = train_config(recalibration={"drop": 0.4, "selector": "pps", "guard_variance": 0.06})
    page = render(read_run(write(tmp_path / "run", config, lines, summary_of(lines))))
    (line,) = page.figures["variance"]["layout"]["shapes"]
    assert line["y0"] == line["y1"] == 0.06
    assert "The limit is 0.06: the guard stops a layer that is above it" in words(page.body)
    assert page.figures["variance_map"]["data"][0]["zmax"] == pytest.approx(0.12)


def test_ranks_and_bytes_are_drawn_where_they_were_logged(tmp_path: Path) -> None:
    page = render(read_run(train_run(tmp_path / "run", on_ranks())))
    assert page.figures["rank_loads"]["data"][0]["y"] == [1.5] * 6
    assert [trace["name"] for trace in page.figures["rank_loads"]["data"]] == [
        *("every expert at home", "forward, as planned", "backward, as planned")
    ]
    assert page.figures["replicas"]["data"][0]["y"] == [0.5] * 6
    assert [trace["x"] for trace in page.figures["saved"]["data"]] == [[3.0], [6.0]]
    told = words(page.body)
    assert "tokens to experts 1.00 MiB" in told
    assert "They computed 10.0 % of all rows" in told
    assert "Ranks" not in body(train_run(tmp_path / "alone"))


def test_hostile_names_of_layers_events_and_purposes_stay_text(tmp_path: Path) -> None:
    lines = on_ranks()
    for line in lines:
        line["layers"][1]["name"] = HOSTILE
    lines[1]["guard_events"] = [{"step": 20, "layer": HOSTILE, "kind": "stopped", "value": 0.3, "limit": 0.1}]
    page = render(read_run(train_run(tmp_path / "<i>run", lines)))
    everything = page.head + page.body + page.footer + page.lead
    assert "<img" not in everything
    assert "<script" not in everything
    assert "<i>run" not in everything
    assert HOSTILE in unescape(everything)
    figures = json.dumps(page.figures) + json.dumps(page.data["loads"])
    assert "<script" not in figures
    assert "<img" not in figures


def test_every_colour_of_the_page_has_one_for_the_night(tmp_path: Path) -> None:
    page = render(read_run(train_run(tmp_path / "run", [*guarded()[:3], *on_ranks()[3:]])))
    used = set(re.findall("#[0-9a-fA-F]{6}", json.dumps(page.figures) + json.dumps(dict(page.data))))
    assert used <= set(palette.NIGHT)
    assert "#" not in re.sub("&#[x0-9a-f]+;", "", page.body), "HTML takes colours by name"


def test_every_chart_says_how_to_read_it(tmp_path: Path) -> None:
    html = body(train_run(tmp_path / "run", on_ranks()))
    cards = re.findall(r'<section class="card[^"]*"><h3>.*?</section>', html)
    assert len(cards) == 14
    assert all(len(words(card.partition('<p class="reading">')[2])) > 40 for card in cards)


def test_a_long_loss_shows_its_end_and_says_what_is_above(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 9.0 if step == 1 else 2.0 + 1 / step} for step in range(1, 201)]
    page = render(read_run(train_run(tmp_path / "run", [{**record(line["step"]), **line} for line in lines])))
    low, high = page.figures["loss"]["layout"]["yaxis"]["range"]
    assert low < 2.005 < high < 3
    assert "below some values (up to 9.00)" in words(page.body)


def test_many_logged_steps_are_thinned_and_that_is_said(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", lines=3000, every=1, layers=2, experts=3)
    page = render(read_run(run))
    assert "Curves show the lowest and the highest of every 5 logged steps" in words(page.body)
    assert all(len(trace["x"]) <= 1300 for trace in page.figures["loss"]["data"])
    heat = page.figures["variance_map"]["data"][0]
    assert (len(heat["x"]), heat["x"][-1]) == (150, 3000)
    assert "A column is the mean of up to 20 logged steps" in words(page.body)
    (one,) = page.data["loads"]
    assert (len(one["steps"]), one["logged"]) == (60, 3000)
    assert "12 of 300 lines with a validation, evenly spread, the last among them" in words(page.body)
