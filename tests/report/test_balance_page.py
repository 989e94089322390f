"""The page of given loads: its bars, its table and its advice are the records'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_index_page import figures_of, words

pytest.importorskip("plotly")
from lrmoe.report import write_report
from lrmoe.studies.balance_config import BalanceConfig
from lrmoe.studies.balance_run import balance

SMALL: dict[str, Any] = {"experts": 16, "ranks": 4, "tokens": 512, "top_k": 2, "floor": 1}


def test_bars_and_table_are_the_records(tmp_path: Path) -> None:
    out = tmp_path / "<b>out</b>"
    result = balance(BalanceConfig(skew=2.0, **SMALL), out)
    page = write_report(out).read_text(encoding="utf-8")
    figures, said = figures_of(page), words(page)
    for trace, column in zip(figures["even"]["data"], ("forward_home", "forward", "backward"), strict=True):
        assert trace["x"] == [round(one[column], 4) for one in result.policies]
    for one, trace in zip(result.break_even, figures["pays"]["data"], strict=True):
        sizes = [each for each in one["sizes"] if each["replicas"]]
        assert trace["x"] == [each["tokens"] for each in sizes]
        assert trace["y"] == pytest.approx([each["planned"] / each["home"] for each in sizes], rel=1e-3, abs=1e-4)
    for one in result.policies:
        assert f"{one['forward']:.3f}" in said
        assert f"{one['moved_rows']:,}" in said
    tokens = [one["tokens"] for one in result.break_even]
    assert min(tokens) > 512
    assert f"Leave replicas off (slots=0) at 512 tokens a rank: they pay from about {round(min(tokens)):,} on." in said
    assert "<b>out" not in page
    assert "these are synthetic" in said


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps([500, 200, 100, 200]))
    config = BalanceConfig(loads=str(loads), ranks=4, top_k=1, capacity=200.0, floor=1)
    result = balance(config, tmp_path / "out")
    said = words(write_report(tmp_path / "out").read_text(encoding="utf-8"))
    unfit = [one for one in result.policies if not one["fits"]]
    assert unfit
    for one in unfit:
        assert f"{one['policy']} does not fit: " in said
    assert "Choose among what fits the capacity" in said
    assert "ynthetic" not in said
    before = (tmp_path / "out" / "report.html").read_bytes()
    assert write_report(tmp_path / "out").read_bytes() == before
