"""Tables on narrow terminals, and names that look like markup."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrmoe import terminal


@given(st.lists(st.integers(3, 40), min_size=2, max_size=12), st.integers(20, 200))
def test_columns_are_shown_once_beside_the_first_and_fit(widths: list[int], available: int) -> None:
    groups = terminal.column_groups(widths, available)
    assert [c for group in groups for c in group[1:]] == list(range(1, len(widths)))
    for group in groups:
        assert group[0] == 0
        assert len(group) == 2 or sum(widths[c] for c in group) + 1 <= available


def test_no_number_is_cut_or_wrapped() -> None:
    headings = ["variant", *(f"a long heading {i}" for i in range(9))]
    rows = [["[red]name[/red]", *(f"{i}.123456789" for i in range(9))]]
    with terminal.console.capture() as shown:
        terminal.print_table(headings, rows, "[bold]note[/bold]")
    text = shown.get()
    for cell in (*headings, *rows[0], "[bold]note[/bold]"):
        assert cell in text


def test_progress_without_a_terminal_prints_validations() -> None:
    with terminal.console.capture() as shown, terminal.progress_bar("run [x]", 10) as steps:
        steps("", 1, None)
        steps("", 5, {"loss": 2.0})
        steps("C0 [red], seed 0", 10, {"loss": 1.0, "eval_loss": 1.5, "kept_share": 0.8})
    assert shown.get() == "step 10: C0 [red], seed 0  loss 1.000  validation 1.500  kept 80.0 %\n"


def test_a_log_that_was_silent_for_long_gets_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.console.capture() as shown, terminal.progress_bar("run", 100) as steps:
        for step, now[0] in ((10, 110.0), (25, 140.0), (26, 145.0)):
            steps("one-device-seed-0", step, None)
    assert shown.get() == "step 25: one-device-seed-0  (25 %, about 2 min left)\n"
