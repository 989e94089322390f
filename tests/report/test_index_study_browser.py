"""The index, a study's page and that of given loads in a browser: all charts drawn, tables sorted, nothing logged."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import BROWSER
from devtools import Chromium
from run_folders import compare_run, records, summary_of, train_config, train_run, write
from study_folders import study_folder
from test_index_page import HOSTILE

pytest.importorskip("plotly")
from lrmoe.report import write_report
from lrmoe.studies.balance_config import BalanceConfig
from lrmoe.studies.balance_run import balance

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium")

ROWS = "[...document.querySelectorAll('#trainings + .card tbody tr')]"
COLUMN = f"{ROWS}.map((row) => row.cells[5].querySelector('data').value)"
PLOTS = "document.querySelectorAll('.plot .main-svg').length > 0 && document.querySelectorAll('.plot').length"


def test_pages_draw_themselves_on_a_desk_and_a_phone(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    train_run(root / HOSTILE)
    compare_run(root / "compared")
    for name, cost in (("low", -0.5), ("high", 0.5)):
        lines = records(cost=cost)
        write(root / name, train_config(steps=120), lines, summary_of(lines))
    write(root / "begun", train_config(), records()[:1], None)
    study_folder(root / "study")
    balance(BalanceConfig(skew=2.0, experts=16, ranks=4, tokens=512, top_k=2, floor=1, dim=64), root / "loads")
    index = write_report(root)
    study, loads = (root / "study" / "report.html", 3), (root / "loads" / "report.html", 2)
    with Chromium(tmp_path / "profile") as browser:
        for width, pages in ((1280, ((index, 2), loads)), (390, ((index, 2), study))):
            for page, plots in pages:
                tab = browser.open(page, width=width, dark=width < 500)
                assert tab.console == []
                assert not tab.is_wider, f"{page} scrolls sideways at {width}"
                assert tab.run(PLOTS) == plots
                if page is index:
                    sorts(tab, width)
                    tab.run(f"document.querySelector('a[href*=\"{HOSTILE[2:4].replace(chr(34), '%22')}\"]').click()")
                    tab.wait("document.title.includes('training run')")
                tab.close()


def sorts(tab: object, width: int) -> None:
    """Presses the heading of the validation loss twice; what is not known stays at the end."""
    run = tab.run  # type: ignore[attr-defined]
    press = "document.querySelectorAll('#trainings + .card thead button')[5].click()"
    for sign in (1, -1):
        run(press)
        values = run(COLUMN)
        assert values[-1] == ""
        known = [float(value) for value in values[:-1]]
        assert known == sorted(known, reverse=sign < 0)
        assert len(known) == 4
    label = run("document.querySelector('#trainings + .card tbody td:nth-child(6)').dataset.label")
    assert label == "Validation loss, nats per token"
    shown = run("getComputedStyle(document.querySelector('#trainings + .card tbody tr')).display")
    assert shown == ("block" if width < 500 else "table-row"), "a row is a card on a phone"
