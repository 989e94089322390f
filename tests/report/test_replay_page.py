"""The balancing page: what it holds, what it says, and that nothing of a user's ends up as markup."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from replay_folders import played, played_trace

pytest.importorskip("plotly")
from lrmoe.report import write_report
from lrmoe.report.loads import MAX_FRAMES
from lrmoe.report.replay_data import frames, read_played


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    loaded: dict[str, Any] = json.loads(found.group(1))
    return loaded


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)


def words(page: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", without_scripts(page))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return played(tmp_path_factory.mktemp("played") / "out")


def test_the_bars_are_the_plans_rows(folder: Path) -> None:
    data = data_of((folder / "report.html").read_text(encoding="utf-8"))["bars"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert data["frames"] == [[step, 0] for step in range(8)]
    assert data["drops"] == [0.0, 0.2]
    assert len(data["policies"]) == 10
    for line in lines:
        policy = next(policy for policy in data["policies"] if policy["label"] == line["policy"])
        shown = policy["drops"][data["drops"].index(line["drop"])]
        assert shown["rows"][0][line["step"]] == line["rows"]
        assert shown["kept"][0][line["step"]] == line["kept"]
    assert data["home"] == data["policies"][0]["drops"][0]["rows"]
    refused = next(policy for policy in data["policies"] if policy["label"] == "symi:slots=2")
    assert all("8 slots for 16 experts" in part["reason"] for part in refused["drops"])
    assert refused["drops"][0]["rows"] == [[[]] * 8]


def test_the_page_says_what_is_synthetic_and_who_does_worse(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    said = words(page)
    summary = json.loads((folder / "summary.json").read_text())
    assert "These loads are synthetic, burst, 512 tokens a rank" in said
    assert "Loads synthetic" in said
    assert "symi:slots=2 cannot run: policy 'symi' with slots=2 on 4 ranks has 8 slots for 16 experts" in said
    slower = [record for record in summary["policies"] if "slower than fixed" in record["verdict"]]
    assert slower, "large experts and few tokens"
    lead = said[: said.index("What you should do")]
    for record in slower:
        assert record["policy"] in lead
    assert said.count("Please note") == 1
    for drop, where in ((0.0, "Without a drop"), (0.2, "With 20 % of the backward dropped")):
        ran = [r for r in summary["policies"] if r["drop"] == drop and not r["reason"] and r["policy"] != "fixed"]
        best = min(ran, key=lambda r: r["against_fixed"])
        then = f"use {best['policy']}: " if best["against_fixed"] <= 0.97 else "leave balancing off"
        assert f"{where}, {then}" in said
    assert page.count('class="worse"') == len([r for r in summary["policies"] if r["verdict"] and not r["reason"]])
    assert "http://" not in without_scripts(page)
    assert "https://" not in without_scripts(page)
    assert len(re.findall(r"<script(?![^>]*json)[^>]*src=", page)) == 0
    # The table has all that was asked for, for every policy with and without the drop.
    assert page.count("<tr>") == 1 + 20
    data = data_of(page)
    skews = [max(rows) / sum(rows) for rows in data["bars"]["home"][0]]
    assert data["bars"]["start"] == skews.index(max(skews)), "it opens where the busiest rank is busiest"
    for heading in (
        "Forward",
        "Kept rows",
        "Replicas",
        "Weights",
        "Gradients",
        "Optimizer",
        "Held",
        "Planning",
        "MoE time",
    ):
        assert heading in said


def test_a_trace_with_names_that_look_like_markup(tmp_path: Path) -> None:
    out = played_trace(tmp_path)
    page = (out / "report.html").read_text(encoding="utf-8")
    data = data_of(page)["bars"]
    assert data["layers"] == ["layer 0", "layer 1"]
    assert data["frames"] == [[step, microbatch] for step in range(3) for microbatch in range(2)]
    assert "<b>run</b>" not in page
    assert "recorded, " in words(page)
    assert 'id="bars-layer"' in page
    assert "synthetic" not in words(page)


def test_long_runs_keep_an_even_choice_of_microbatches(tmp_path: Path) -> None:
    out = played_trace(tmp_path, steps=45)
    data = frames(read_played(out))
    assert len(data["frames"]) == MAX_FRAMES
    assert (data["frames"][0], data["frames"][-1], data["all"]) == ((0, 0), (44, 1), 90)
    assert "The slider stops at 60 of 90 microbatches." in words((out / "report.html").read_text(encoding="utf-8"))


def test_a_damaged_folder_is_named_and_leaves_the_old_page(tmp_path: Path) -> None:
    out = played_trace(tmp_path)
    before = (out / "report.html").read_bytes()
    metrics, summary = (out / "metrics.jsonl").read_text(), (out / "summary.json").read_text()
    for name, text, message in (
        (
            "metrics.jsonl",
            metrics.replace('"rows": [', '"rows": ["x", ', 1),
            r"metrics.jsonl, line 1: rows must be counts",
        ),
        ("metrics.jsonl", metrics.replace('"kept"', '"keep"', 1), r"metrics.jsonl, line 1: 'kept' is missing"),
        ("metrics.jsonl", metrics[:-9], r"metrics.jsonl, line \d+: not valid JSON"),
        ("summary.json", summary.replace('"produced"', '"made"'), "summary.json is damaged or of another version"),
        ("summary.json", summary.replace('"policies"', '"made"'), "summary.json: policies must be a list"),
    ):
        original = (out / name).read_text()
        (out / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            write_report(out)
        (out / name).write_text(original)
    assert (out / "report.html").read_bytes() == before
    write_report(out)
