"""The picture of the README: drawn from the files given, refused where they are not results of a comparison."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from run_folders import VARIANTS, compare_run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def figure() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "make_figure.py"
    spec = importlib.util.spec_from_file_location("make_figure", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_figure"] = module
    spec.loader.exec_module(module)
    return module


def texts(svg: Path) -> list[str]:
    return [element.text or "" for element in ET.parse(svg).getroot().iter(f"{SVG}text")]


def test_the_picture_shows_the_numbers_of_the_file(figure: ModuleType, tmp_path: Path) -> None:
    summary = compare_run(tmp_path / "run") / "summary.json"
    out = tmp_path / "images" / "overview.svg"
    assert figure.main([str(summary), "--out", str(out)]) == 0
    shown = texts(out)
    assert [text for text in shown if text.endswith("20 %")] == ["pps 20 %", "topq 20 %"]
    assert {"+0.005", "+0.300", "0.80 ×"} <= set(shown)
    assert any("± 0.040" in text for text in shown), "the spread of no drop"
    assert len(list(ET.parse(out).getroot().iter(f"{SVG}circle"))) == 6, "a dot for each variant and seed"
    assert [path.name for path in out.parent.iterdir()] == ["overview.svg"]


def test_the_mean_stands_where_the_axis_says(figure: ModuleType, tmp_path: Path) -> None:
    summary = compare_run(tmp_path / "run") / "summary.json"
    group = figure.read_group(summary, "x", "eval_loss")
    root = ET.fromstring(figure.draw([group], title="t", loss="eval_loss"))
    ticks = {e.text: float(e.attrib["x"]) for e in root.iter(f"{SVG}text") if e.attrib.get("text-anchor") == "middle"}
    topq = next(e for e in root.iter(f"{SVG}line") if e.attrib["stroke"] == figure.COLOURS["topq"])
    assert float(topq.attrib["x1"]) == pytest.approx(ticks["+0.30"], abs=0.2)


def test_several_files_are_several_groups(figure: ModuleType, tmp_path: Path) -> None:
    a = compare_run(tmp_path / "a") / "summary.json"
    b = compare_run(tmp_path / "b", seeds=(5,)) / "summary.json"
    out = tmp_path / "o.svg"
    assert figure.main([str(a), str(b), "--label", "From <scratch>", "--label", "Later", "--out", str(out)]) == 0
    assert {"From <scratch>", "Later"} <= set(texts(out))
    assert len([text for text in texts(out) if text == "pps 20 %"]) == 2


@pytest.mark.parametrize("not_finite", [float("nan"), "NaN"])
def test_a_diverged_seed_and_a_missing_time_are_said(
    figure: ModuleType, tmp_path: Path, not_finite: float | str
) -> None:
    summary = compare_run(tmp_path / "run") / "summary.json"
    told = json.loads(summary.read_text())
    told["rows"][2]["eval_loss_differences"][1] = not_finite
    told["rows"][1]["backward_ratio"] = None
    summary.write_text(json.dumps(told))
    out = tmp_path / "o.svg"
    assert figure.main([str(summary), "--out", str(out)]) == 0
    assert {"not finite for some seed", "not measured", "+0.005"} <= set(texts(out))


def _rename(told: dict[str, Any]) -> None:
    told["rows"][1]["variant"] = "mine"


def _no_baseline(told: dict[str, Any]) -> None:
    del told["baseline"]


def _only_baseline(told: dict[str, Any]) -> None:
    del told["rows"][1:]


@pytest.mark.parametrize(
    ("change", "said"),
    [(_rename, "'mine' must be named like 'C20 pps'"), (_no_baseline, "baseline"), (_only_baseline, "nothing to draw")],
)
def test_what_cannot_be_drawn_is_refused(
    figure: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, said: str
) -> None:
    summary = compare_run(tmp_path / "run", VARIANTS) / "summary.json"
    told = json.loads(summary.read_text())
    change(told)
    summary.write_text(json.dumps(told))
    out = tmp_path / "o.svg"
    assert figure.main([str(summary), "--out", str(out)]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not out.exists()


def test_a_missing_file_and_a_wrong_number_of_labels_are_refused(
    figure: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figure.main([str(tmp_path / "no.json"), "--out", str(tmp_path / "o.svg")]) == 2
    assert "no.json is missing" in capsys.readouterr().err
    summary = str(compare_run(tmp_path / "run") / "summary.json")
    assert figure.main([summary, "--label", "a", "--label", "b", "--out", str(tmp_path / "o.svg")]) == 2
    assert "2 labels for 1 files" in capsys.readouterr().err
