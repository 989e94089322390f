"""The page in a real browser, where one is installed: every chart is drawn at any width and in either scheme.

The controls work, nothing is logged to the console, and a very long run opens fast.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import BROWSER
from devtools import Chromium, Tab
from long_run import long_run
from run_folders import compare_run, record, train_run
from test_report_run_page import guarded, on_ranks

pytest.importorskip("plotly")
from lrmoe.report import palette, write_report

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


def complaints(tab: Tab) -> list[str]:
    """What is wrong with an open page; text that is cut off or too small among it."""
    found = list(tab.console)
    if tab.is_wider:
        found.append("the page scrolls sideways")
    if tab.run("document.querySelectorAll('.plotly-notifier').length"):
        found.append("plotly complains")
    found += tab.run(
        """[...document.querySelectorAll(".plot svg text")].filter((text) => {
          const size = parseFloat(getComputedStyle(text).fontSize), box = text.getBoundingClientRect();
          const plot = text.closest(".plot").getBoundingClientRect();
          const outside = box.left < plot.left - 1 || box.right > plot.right + 1;
          return text.textContent && box.width > 0 && (size < 11 || outside);
        }).map((text) => `cut off or small: ${text.textContent}`)"""
    )
    return found


def paper(tab: Tab) -> list[str]:
    """The background of every chart."""
    return list(tab.run("[...document.querySelectorAll('.plot')].map((one) => one._fullLayout.paper_bgcolor)"))


def set_control(tab: Tab, identity: str, value: str, event: str) -> None:
    tab.run(
        f"(() => {{ const one = document.getElementById('{identity}'); one.value = '{value}';"
        f" one.dispatchEvent(new Event('{event}')); }})()"
    )


def other_way(tab: Tab) -> None:
    """A phone in the dark becomes a wide screen by day, while the page is open."""
    tab.set_dark(False)
    tab.set_width(1280)
    tab.wait(
        "[...document.querySelectorAll('.plot')].every((one) => Math.abs(one._fullLayout.width - one.clientWidth) < 2"
        f" && one._fullLayout.paper_bgcolor === '{palette.PAPER}')"
    )


def test_a_run_draws_every_chart(tmp_path: Path, browser: Chromium) -> None:
    lines = [{**a, **b} for a, b in zip(guarded(), on_ranks(), strict=True)]
    for line in lines:
        line["layers"][0]["name"] = "encoder.blocks.3.a_module_with_a_long_name.experts"
    tab = browser.open(write_report(train_run(tmp_path / "run", lines)), width=390, dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    curve = "document.querySelector('[data-figure=rank_loads]').data[1].line.color"
    assert complaints(tab) == []
    assert paper(tab) == [palette.NIGHT[palette.PAPER]] * 13
    assert tab.run(background) == "rgb(13, 17, 23)"
    assert tab.run(curve) == palette.NIGHT[palette.BLUE]
    assert tab.run("document.querySelector('[data-figure=loss]').data[0].y[0]") == lines[0]["loss"]
    other_way(tab)
    assert complaints(tab) == []
    assert tab.run(background) == "rgb(245, 246, 248)"
    assert tab.run(curve) == palette.BLUE
    tab.close()


def test_the_load_map_shows_the_step_of_its_slider(tmp_path: Path, browser: Chromium) -> None:
    lines = [record(10), record(20)]
    lines[0]["layers"][1]["load"] = lines[0]["layers"][1]["kept"] = [0, 0, 0, 0]
    tab = browser.open(write_report(train_run(tmp_path / "run", lines)))
    z = "document.getElementById('load-map').data[0].z"
    assert tab.run(f"{z}[0]") == pytest.approx([1.6, 1.2, 0.8, 0.4])
    set_control(tab, "load-view", "step", "change")
    set_control(tab, "load-step", "0", "input")
    tab.wait(f"{z}[1][0] === null")
    assert tab.run("document.getElementById('load-step-value').textContent") == "10"
    assert "no pairs in this layer" in tab.run("document.getElementById('load-map').textContent")
    assert complaints(tab) == []
    tab.close()


def test_a_comparison_draws_every_chart(tmp_path: Path, browser: Chromium) -> None:
    tab = browser.open(write_report(compare_run(tmp_path / "run")), width=390, dark=True)
    tab.run("document.querySelectorAll('.legend button')[2].click()")
    set_control(tab, "load-training", "1", "change")
    set_control(tab, "kept-variant", "0", "change")
    lines = "document.querySelector('[data-figure=eval_loss]').data.filter((one) => one.visible !== false && !one.fill)"
    tab.wait(f"{lines}.length === 2")
    assert complaints(tab) == []
    assert set(paper(tab)) == {palette.NIGHT[palette.PAPER]}
    other_way(tab)
    assert complaints(tab) == []
    tab.close()


@pytest.mark.slow
def test_ten_thousand_steps_of_48_layers_of_128_experts_open_fast(
    tmp_path: Path, browser: Chromium, capsys: pytest.CaptureFixture[str]
) -> None:
    run = long_run(tmp_path / "run")
    begin = time.process_time()
    page = write_report(run)
    written = time.process_time() - begin
    size = page.stat().st_size
    begin = time.monotonic()
    tab = browser.open(page)
    wall, busy = time.monotonic() - begin, tab.busy_seconds
    records = (run / "metrics.jsonl").stat().st_size / 1e6
    with capsys.disabled():
        print(
            f"\n{records:.0f} MB of records; the page written in {written:.1f} s of CPU time, {size / 1e6:.2f} MB; "
            f"drawn after {wall:.1f} s, {busy:.2f} s of them CPU time"
        )
    assert size < 8_000_000
    # On a machine that is doing nothing else it is the wall clock that stays below 3 s.
    assert busy < 6
    assert written < 30
    set_control(tab, "load-view", "step", "change")
    set_control(tab, "load-step", "30", "input")
    tab.wait("document.getElementById('load-map').data[0].z.length === 48")
    assert complaints(tab) == []
    tab.close()
