"""The page of a study: its tables and figures are those of the records, and a damaged one is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from study_folders import EVIL, study_folder, study_result
from test_index_page import figures_of, markup, words

pytest.importorskip("plotly")
from lrmoe.report import write_report
from lrmoe.report.study_charts import figure
from lrmoe.report.study_page import study_of
from lrmoe.studies.results import Series, show


def test_records_survive_the_file() -> None:
    result = study_result()
    read = study_of(json.loads(json.dumps(result.to_dict())))
    assert json.dumps(read.to_dict()) == json.dumps(result.to_dict())


def test_the_page_holds_what_the_records_say(tmp_path: Path) -> None:
    page = write_report(study_folder(tmp_path / "study")).read_text(encoding="utf-8")
    result, said = study_result(), words(page)
    order = [result.question, *result.advice, *result.conclusions, *(table.title for table in result.tables)]
    places = [said.index(text) for text in order]
    assert places == sorted(places), "the question first, then what to do, what was found, and what it rests on"
    tables = re.findall(r"<table>.*?</table>", page, re.DOTALL)
    for table, drawn in zip(result.tables, tables, strict=True):
        rows = re.findall(r"<tr.*?</tr>", drawn, re.DOTALL)[1:]
        for row, cells in zip(table.rows, rows, strict=True):
            shown = [unescape(re.sub(r"<[^>]*>", "", one)) for one in re.findall(r"<t[hd].*?</t[hd]>", cells)]
            expected = [show(row.get(column.key), column.form) for column in table.columns]
            assert [one.replace("−", "-").replace("not finite", "nan") for one in shown] == expected
    for text in ("seed spread of no drop", "mean of the paired differences", "qwen3-moe-nano", "Run time 21 minutes"):
        assert text in said
    assert "“Error against batches” leaves out 1 value" in said
    assert EVIL not in markup(page)
    assert EVIL in said


def test_figures_carry_bars_band_and_categories(tmp_path: Path) -> None:
    figures = figures_of(write_report(study_folder(tmp_path / "study")).read_text(encoding="utf-8"))
    rate, regime, error = (figures[f"figure-{i}"] for i in range(3))
    bars = rate["data"][0]["error_y"]
    assert bars["array"] == pytest.approx([0.009, 0.008, 0.02])
    assert bars["arrayminus"] == pytest.approx([0.001, 0.012, 0.01])
    assert "error_y" not in rate["data"][1]
    assert rate["data"][1]["y"] == [0.004, 0.01, None]
    (band,) = rate["layout"]["shapes"]
    assert (band["y0"], band["y1"]) == (-0.015, 0.015)
    assert rate["layout"]["xaxis"]["title"]["text"] == "pairs left out, %"
    assert regime["layout"]["xaxis"]["ticktext"][0] == "from scratch<br>with warm-up"
    assert [trace["mode"] for trace in regime["data"]] == ["markers"] * 3
    first = [trace["x"][0] for trace in regime["data"]]
    assert first == sorted(set(first)), "side by side"
    assert error["data"][0]["y"] == [1.0, 0.3, None]
    assert error["layout"]["xaxis"]["type"] == error["layout"]["yaxis"]["type"] == "log"


def test_a_damaged_study_is_refused_and_the_old_page_stays(tmp_path: Path) -> None:
    folder = study_folder(tmp_path / "study")
    before = write_report(folder).read_bytes()
    told = json.loads((folder / "summary.json").read_text())
    ragged = json.loads(json.dumps(told))
    ragged["figures"][0]["series"][0]["y"] = [1.0]
    for changed in ({**told, "tables": 3}, {**told, "advice": [3]}, ragged, {"command": "study"}):
        (folder / "summary.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"summary\.json is damaged or of another version of lrmoe"):
            write_report(folder)
    (folder / "summary.json").unlink()
    with pytest.raises(ValueError, match="the study is unfinished"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == before


def test_bars_at_one_place_are_drawn_side_by_side() -> None:
    series = [Series(name=name, x=[20.0, 50.0], y=[0.1, 0.2], low=[0.0, 0.1], high=[0.2, 0.3]) for name in "ab"]
    one = replace(study_result().figures[0], series=series)
    drawn = figure(one)
    assert drawn is not None
    assert [trace["x"] for trace in drawn["data"]] == [[19.85, 49.85], [20.15, 50.15]]
    assert [trace["text"] for trace in drawn["data"]] == [["20", "50"]] * 2
    alone = figure(replace(one, series=series[:1]))
    assert alone is not None
    assert alone["data"][0]["x"] == [20.0, 50.0]
