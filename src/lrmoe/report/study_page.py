"""The page of a study: its question, what to do, what was found, the tables and figures it rests on, and where from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrmoe import strict_json
from lrmoe.report import study_charts
from lrmoe.report.frame import Frame, advice, chart, facts, notices, table, write_page
from lrmoe.report.run_folder import read_object
from lrmoe.report.text import MINUS, counted, duration, escape
from lrmoe.studies.results import Column, Figure, Series, StudyResult, Table, Value, show


def write_study_page(folder: Path) -> Path:
    """Writes ``report.html`` into the folder of a study, from its ``summary.json``.

    Raises:
        ValueError: if ``summary.json`` is missing, or is not what :meth:`StudyResult.to_dict` gives; names what is
            wrong and leaves an old page alone.
    """
    path = folder / "summary.json"
    if not path.exists():
        raise ValueError(
            f"{path} is missing: the study is unfinished; give the same command again, which goes on where it stopped"
        )
    told = read_object(path)
    try:
        result = study_of(told)
        frame = study_frame(result, folder.resolve().name)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        name = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged or of another version of lrmoe ({name})") from error
    return write_page(folder / "report.html", frame)


def study_of(told: Mapping[str, Any]) -> StudyResult:
    """The inverse of :meth:`StudyResult.to_dict`.

    Raises:
        KeyError, TypeError, ValueError: for what is missing or of another kind.
    """
    return StudyResult(
        study=_text(told["study"], "study"),
        title=_text(told["title"], "title"),
        question=_text(told["question"], "question"),
        tables=[
            Table(**{**one, "columns": [Column(**column) for column in one["columns"]], "rows": _rows(one)})
            for one in told["tables"]
        ],
        figures=[Figure(**{**one, "series": [_series(each) for each in one["series"]]}) for one in told["figures"]],
        conclusions=[_text(one, "conclusions") for one in told["conclusions"]],
        advice=[_text(one, "advice") for one in told["advice"]],
        provenance=dict(told["provenance"]),
    )


def study_frame(result: StudyResult, source: str) -> Frame:
    """What the page holds.

    Args:
        result: of the study.
        source: the folder it was read from.
    """
    figures = {f"figure-{i}": study_charts.figure(one) for i, one in enumerate(result.figures)}
    return Frame(
        kind="Study",
        title=result.title,
        lead=f"<b>{escape(result.question)}</b>",
        head=advice(result.advice or ["Nothing follows from this study alone."], basis=_basis(result)) + _notes(result),
        body=_conclusions(result) + _charts(result, figures) + "".join(map(_table, result.tables)) + _origin(result),
        footer=f"Written by LRMoE from {escape(source)}/summary.json.",
        figures={name: one for name, one in figures.items() if one is not None},
        styles=("index.css",),
    )


def _rows(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = one["rows"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"rows of table {one.get('name')!r} must be a list of objects")
    return rows


def _series(told: Mapping[str, Any]) -> Series:
    one = Series(**told)
    lengths = {len(values) for values in (one.x, one.y, one.low, one.high) if values is not None}
    if len(lengths) > 1:
        raise ValueError(f"series {one.name!r}: x, y, low and high must be of one length, found {sorted(lengths)}")
    return one


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string")
    return value


def _basis(result: StudyResult) -> str:
    rows = sum(len(one.rows) for one in result.tables)
    return (
        f"It follows from {counted(rows, 'row')} of {counted(len(result.tables), 'table')} below, and holds for the "
        "models, texts and steps that they name."
    )


def _notes(result: StudyResult) -> str:
    said = []
    for one in result.figures:
        count = study_charts.left_out(one)
        if count:
            said.append(
                f"“{one.title}” leaves out {counted(count, 'value')} that {'is' if count == 1 else 'are'} not "
                f"finite{' or, on a logarithmic axis, not above zero' if one.log_x or one.log_y else ''}."
            )
    return notices(said)


def _conclusions(result: StudyResult) -> str:
    items = "".join(f"<li>{escape(one)}</li>" for one in result.conclusions)
    if not items:
        return ""
    return f'<h2>What was found</h2><section class="card"><ul class="plain">{items}</ul></section>'


def _charts(result: StudyResult, figures: Mapping[str, Any]) -> str:
    cards = ""
    for (name, drawn), one in zip(figures.items(), result.figures, strict=True):
        wide = len(result.figures) % 2 == 1 and name == "figure-0"
        cards += chart(
            name,
            one.title,
            one.reading,
            figure=drawn,
            empty="No value of this chart is finite.",
            colours=study_charts.key(one) if drawn else (),
            wide=wide,
        )
    return f'<h2>Figures</h2><div class="grid">{cards}</div>' if cards else ""


def cell(value: Value, form: str) -> str:
    """A value as a text page has it, with a true minus sign, as HTML."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    shown = show(value, form)  # type: ignore[arg-type]
    return escape(f"{MINUS}{shown[1:]}" if isinstance(value, (int, float)) and shown.startswith("-") else shown)


def _table(one: Table) -> str:
    first, *rest = one.columns
    rows = [
        [
            cell(row.get(first.key), first.form),
            *(
                f'<span class="text">{cell(row.get(column.key), column.form)}</span>'
                if column.form == "text"
                else cell(row.get(column.key), column.form)
                for column in rest
            ),
        ]
        for row in one.rows
    ]
    headings = [
        (f'<span class="words">{escape(column.label)}</span>' if column.form == "text" else escape(column.label), "")
        for column in one.columns
    ]
    meanings = [(column.label, column.meaning) for column in one.columns if column.meaning]
    words = "".join(f"<dt>{escape(label)}</dt><dd>{escape(meaning)}</dd>" for label, meaning in meanings)
    legend = (
        f'<details><summary>What the columns say</summary><dl class="columns">{words}</dl></details>' if words else ""
    )
    shared = facts([(name, _plain(value)) for name, value in one.settings.items()])
    note = f'<p class="reading">{escape(one.note)}</p>' if one.note else ""
    identity = f"table-{escape(one.name)}"
    drawn = table(identity, headings, rows, title=one.title)
    # The rest goes into the table's card, under it.
    return f'<div class="study">{drawn.removesuffix("</section>")}{note}{shared}{legend}</section></div>'


def _plain(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return str(value)


def _origin(result: StudyResult) -> str:
    items = []
    for name, value in result.provenance.items():
        if isinstance(value, (dict, list)) and not all(isinstance(one, (str, int, float)) for one in value):
            shown = strict_json.dumps(value, ensure_ascii=False)
        elif isinstance(value, dict):
            shown = ", ".join(f"{key} {each}" for key, each in value.items())
        elif name.endswith("seconds") and isinstance(value, (int, float)):
            shown = _long(float(value))
        else:
            shown = _plain(value)
        items.append((name.replace("_seconds", " time").replace("_", " ").capitalize(), shown))
    if not items:
        return ""
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(shown)}</dd>" for name, shown in items)
    return f'<h2>Where this comes from</h2><section class="card"><dl class="origin">{terms}</dl></section>'


def _long(seconds: float) -> str:
    if not math.isfinite(seconds) or seconds < 120:
        return duration(seconds)
    return f"{seconds / 60:,.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"
