"""What a person sees while and after something runs: progress bars and tables, with rich."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the process with 1, which is that of a fault; who reads no more is met as everywhere.
        raise BrokenPipeError


console = _Console(highlight=False, soft_wrap=True)


# Seconds after which a log, in which nothing was said meanwhile, gets a line.
_SILENCE = 30.0


class Steps:
    """Told of every step and every record of the runs; ``name`` is empty where there is one run only."""

    def __init__(self, bar: Progress, task: TaskID, total: int) -> None:
        self._bar, self._task, self._total = bar, task, total
        self._done: dict[str, int] = {}
        self._since = self._spoke = time.monotonic()

    def expect(self, steps: int) -> Steps:
        """Says that so many more steps are to come; returns itself."""
        self._total += steps
        self._bar.update(self._task, total=self._total)
        return self

    def __call__(self, name: str, step: int, record: Mapping[str, Any] | None) -> None:
        self._done[name] = step
        done = sum(self._done.values())
        self._bar.update(self._task, completed=done)
        if record is None:
            if time.monotonic() - self._spoke > _SILENCE:
                self._say(f"step {step}: {name}{self._left(done)}")
            return
        state = _state(name, record)
        self._bar.update(self._task, state=escape(state))
        if "eval_loss" in record:
            self._say(f"step {step}: {state}{self._left(done) if len(self._done) > 1 else ''}")

    def _say(self, line: str) -> None:
        """A line where there is no bar."""
        if not console.is_terminal:
            console.print(escape(line.strip()))
            self._spoke = time.monotonic()

    def _left(self, done: int) -> str:
        """What a bar would say of the whole."""
        # From the first few steps, which wait for everything, nothing can be told.
        if not self._total / 50 <= done < self._total:
            return ""
        seconds = (time.monotonic() - self._since) * (self._total - done) / done
        return f"  ({100 * done / self._total:.0f} %, about {minutes(seconds)} left)"


def minutes(seconds: float) -> str:
    """A duration as a person says it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def progress_bar(label: str, total: int = 0) -> Iterator[Steps]:
    """A bar over all optimizer steps, with the time left and the last loss and kept share beside it.

    Where the output is no terminal, a line is printed for each validation instead, or after half a minute without one.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Steps(bar, bar.add_task(escape(label), total=total, state=""), total)


def _state(name: str, record: Mapping[str, Any]) -> str:
    parts = [name] if name else []
    for key, label, digits in (("loss", "loss", 3), ("eval_loss", "validation", 3)):
        if key in record:
            parts.append(f"{label} {record[key]:.{digits}f}")
    if "kept_share" in record:
        parts.append(f"kept {100 * record['kept_share']:.1f} %")
    return "  ".join(parts)


def print_summary(title: str, values: Sequence[tuple[str, str]]) -> None:
    """A two-column table."""
    table = Table(title=escape(title), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in values:
        table.add_row(escape(name), escape(value))
    console.print(table)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> None:
    """A table with its first column to the left and numbers to the right, and a note below.

    On a terminal too narrow for it, the columns go below each other in as many tables as it takes, each with the first
    column: a number that is cut or wrapped cannot be read.
    """
    widths = [max(map(len, column)) + 3 for column in zip(headings, *rows, strict=True)]
    if not console.is_terminal:
        console.width = max(console.width, sum(widths) + 1)
    for columns in column_groups(widths, console.width):
        table = Table(header_style="bold")
        for column in columns:
            table.add_column(escape(headings[column]), justify="right" if column else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(escape(row[column]) for column in columns))
        console.print(table)
    console.print(note, markup=False, soft_wrap=False)


def column_groups(widths: Sequence[int], available: int) -> list[list[int]]:
    """Columns by number, in groups that begin with column 0 and fit the available width where one column can."""
    groups: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        if len(groups[-1]) > 1 and sum(widths[c] for c in (*groups[-1], column)) + 1 > available:
            groups.append([0])
        groups[-1].append(column)
    return groups
