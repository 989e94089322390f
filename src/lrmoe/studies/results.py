"""What a study leaves: tables, figures and conclusions, as plain records that a page or a file is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Value = float | int | str | None
# How a column's numbers are written: plain text, digits after the point, signed digits, or a share as per cent.
Form = Literal["text", "integer", "2", "3", "4", "+3", "+4", "percent", "ratio"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table. ``key`` is the rows' key, ``label`` the heading with its unit, ``meaning`` a phrase that
    explains it to who has not met it."""

    key: str
    label: str
    form: Form
    meaning: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Records of one kind.

    Args:
        name: letters, digits and dashes; unique in the study.
        title: what is compared, and where.
        settings: what all rows share, as a reader needs it (model, steps, bytes a step, ...).
        columns: in order.
        rows: a value for each column's key; more keys may be there for figures and later readers.
        note: one or more sentences on how to read it, with the spread to hold differences against.
    """

    name: str
    title: str
    settings: Mapping[str, Value]
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A line (drawn through its points in order) or a cloud of points. ``low`` and ``high``, where given, are the
    ends of each point's bar (the seeds' extremes)."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    kind: Literal["line", "points"] = "line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A plot. ``reading`` is a sentence on how to read it; axis labels carry units; ``band`` is a (low, high) range of
    y to shade, such as the spread of the seeds, with ``band_label`` saying what it is."""

    name: str
    title: str
    reading: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    band: tuple[float, float] | None = None
    band_label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult:
    """The outcome of a study.

    Args:
        study: its name on the command line.
        title: in words.
        question: what it asks.
        tables, figures: what was found.
        conclusions: plain sentences that follow from the tables.
        advice: what a user should do, in the imperative, following from the numbers.
        provenance: command, versions, machine, commit, seconds.
    """

    study: str
    title: str
    question: str
    tables: Sequence[Table]
    figures: Sequence[Figure]
    conclusions: Sequence[str]
    advice: Sequence[str]
    provenance: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``summary.json``."""
        return {"command": "study", **asdict(self)}


def show(value: Value, form: Form) -> str:
    """A value of a table as it is written."""
    if value is None:
        return "-"
    if isinstance(value, str) or form == "text":
        return str(value)
    if form == "integer":
        return f"{value:,.0f}"
    if form == "percent":
        return f"{100 * value:.1f} %"
    if form == "ratio":
        return f"{value:.2f} x"
    sign, digits = ("+", form[1:]) if form.startswith("+") else ("", form)
    return f"{value:{sign}.{digits}f}"


def markdown(table: Table) -> str:
    """The table with its note, for a text page."""
    lines = [[column.label for column in table.columns]]
    lines.append(["---" if column.form == "text" else "---:" for column in table.columns])
    lines += [[show(row.get(column.key), column.form) for column in table.columns] for row in table.rows]
    text = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
    return f"{text}\n\n{table.note}\n" if table.note else f"{text}\n"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|")
