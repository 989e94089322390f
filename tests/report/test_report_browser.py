"""The page in a real browser, where one is installed: every chart is drawn, the controls work, nothing is logged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import BROWSER, opened
from run_folders import compare_run, record, train_run

pytest.importorskip("plotly")
from lrmoe.report import write_report

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium")

PLOT = r'<div class="plot [^>]*>|<div class="plot"[^>]*>'

# Uses every control once the page has drawn itself.
USE = """<script>addEventListener("load", () => {
  const set = (id, value, event) => {
    const element = document.getElementById(id);
    if (element) { element.value = value; element.dispatchEvent(new Event(event)); }
  };
  set("load-training", "1", "change"); set("load-view", "step", "change"); set("load-step", "1", "input");
  set("kept-variant", "0", "change");
  document.querySelectorAll(".legend button")[2]?.click();
  setTimeout(() => {
    const traces = document.querySelector('[data-figure="eval_loss"]')?.data ?? [];
    document.body.dataset.visible = traces.filter((trace) => trace.visible !== false && !trace.fill).length;
    document.body.dataset.wider = document.documentElement.scrollWidth > window.innerWidth;
  }, 500);
});</script></body>"""


@pytest.mark.parametrize("width", [1200, 500])
def test_a_comparison_draws_every_chart(tmp_path: Path, width: int) -> None:
    document, console = opened(write_report(compare_run(tmp_path / "run")), tmp_path / "profile", width, USE)
    assert console == ""
    plots = re.findall(PLOT, document)
    assert len(plots) == 9
    assert all('data-rendered="true"' in plot for plot in plots)
    assert document.count('class="plotly-notifier"') == 0
    assert re.search(r'<output id="load-step-value"[^>]*>20<', document)
    assert 'data-visible="2"' in document, "the third variant is switched off"
    assert 'data-wider="false"' in document, "nothing makes the page scroll sideways"


def test_a_single_step_draws_every_chart(tmp_path: Path) -> None:
    lines = [record(10)]
    lines[0]["layers"][1]["load"] = lines[0]["layers"][1]["kept"] = [0, 0, 0, 0]
    document, console = opened(write_report(train_run(tmp_path / "run", lines)), tmp_path / "profile", 1200, USE)
    assert console == ""
    plots = re.findall(PLOT, document)
    assert len(plots) == 7
    assert all('data-rendered="true"' in plot for plot in plots)
    assert "no pairs in this layer" in document
