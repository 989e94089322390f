"""The balancing page in a real browser, where one is installed: it draws itself, and the slider moves every policy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import BROWSER, opened
from replay_folders import played, played_trace

pytest.importorskip("plotly")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium")

# What the page shows at first and after its controls were used, read off the charts themselves.
USE = """<script>addEventListener("load", () => {
  const set = (id, value, event) => {
    const element = document.getElementById(id);
    if (element) { element.value = value; element.dispatchEvent(new Event(event)); }
  };
  const seen = () => JSON.stringify([...document.querySelectorAll(".panel")].map((panel) => ({
    title: panel.querySelector("h3").textContent.trim(),
    empty: panel.querySelector(".empty").hidden ? null : panel.querySelector(".empty").textContent,
    bars: panel.querySelector(".plot").hidden ? null : panel.querySelector(".plot").data.map((trace) => trace.y),
  })));
  setTimeout(() => {
    document.body.dataset.first = seen();
    set("bars-layer", "1", "change"); set("bars-drop", "0", "change"); set("bars-step", STEP, "input");
    setTimeout(() => {
      document.body.dataset.then = seen();
      document.body.dataset.step = document.getElementById("bars-step-value").textContent;
      document.body.dataset.wider = document.documentElement.scrollWidth > window.innerWidth;
    }, 500);
  }, 300);
});</script></body>"""


def told(document: str, name: str) -> list[dict[str, object]]:
    found = re.search(rf'data-{name}="([^"]*)"', document)
    assert found is not None
    loaded: list[dict[str, object]] = json.loads(found.group(1).replace("&quot;", '"').replace("&amp;", "&"))
    return loaded


@pytest.mark.parametrize("width", [1280, 500])
def test_the_slider_moves_the_bars_of_every_policy(tmp_path: Path, width: int) -> None:
    out = played(tmp_path / "out")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    document, console = opened(out / "report.html", tmp_path / "profile", width, USE.replace("STEP", '"3"'))
    assert console == ""
    assert document.count('data-rendered="true"') == 9 + 2, "nine policies that run, and two charts"
    assert 'data-wider="false"' in document, "nothing makes the page scroll sideways"
    assert 'data-step="3"' in document

    def bars(policy: str, step: int, drop: float) -> list[object]:
        shown = next(line for line in lines if (line["policy"], line["step"], line["drop"]) == (policy, step, drop))
        home = next(line for line in lines if (line["policy"], line["step"], line["drop"]) == ("fixed", step, 0.0))
        return [home["rows"], shown["rows"], shown["kept"]]

    homes = [line["rows"] for line in lines if (line["policy"], line["drop"]) == ("fixed", 0.0)]
    skews = [max(rows) / sum(rows) for rows in homes]
    for name, step, drop in (("first", skews.index(max(skews)), 0.2), ("then", 3, 0.0)):
        panels = told(document, name)
        assert len(panels) == 10
        for panel in panels:
            title = str(panel["title"])
            policy = title.split()[0]
            if policy == "symi:slots=2":
                assert panel["bars"] is None
                assert "8 slots for 16 experts" in str(panel["empty"])
                continue
            assert panel["empty"] is None
            assert panel["bars"] == bars(policy, step, drop)
            rows = bars(policy, step, drop)[1]
            assert isinstance(rows, list)
            assert f"busiest / mean {max(rows) * 4 / sum(rows):.2f}, at home" in title
    assert told(document, "first")[2]["bars"] != told(document, "then")[2]["bars"]


def test_a_trace_with_layers_and_microbatches(tmp_path: Path) -> None:
    out = played_trace(tmp_path)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    document, console = opened(out / "report.html", tmp_path / "profile", 1280, USE.replace("STEP", '"5"'))
    assert console == ""
    assert 'data-step="2, microbatch 1"' in document
    shown = [
        line for line in lines if (line["step"], line["microbatch"], line["layer"]) == (2, 1, 1) and not line["drop"]
    ]
    panels = told(document, "then")
    for policy, panel in (("fixed", panels[0]), ("lrmoe", panels[1])):
        expected = next(line for line in shown if line["policy"] == policy)
        assert panel["bars"][1:] == [expected["rows"], expected["kept"]]  # type: ignore[index]
