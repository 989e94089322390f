"""The table of a comparison, as HTML."""

from __future__ import annotations

from collections.abc import Callable

from lrmoe.report.comparison import Row
from lrmoe.report.text import DASH, duration, escape, fixed, percent, signed, size
from lrmoe.report.view import Page, swatch

Cell = Callable[[Row, bool], str]


def _loss(row: Row, _: bool) -> str:
    spread = row.get("eval_loss_spread")
    return fixed(row.get("eval_loss"), 4) + (f"<small>spread {fixed(spread, 4)}</small>" if spread is not None else "")


def _difference(row: Row, is_base: bool) -> str:
    if is_base:
        return DASH
    each = ", ".join(signed(value, 3) for value in row.differences)
    return signed(row.get("eval_loss_difference"), 4) + (f"<small>{each}</small>" if len(row.differences) > 1 else "")


def _train_loss(row: Row, is_base: bool) -> str:
    difference = row.get("train_loss_difference")
    small = f"<small>{signed(difference, 4)}</small>" if difference is not None and not is_base else ""
    return fixed(row.get("train_loss"), 4) + small


def _plain(column: str, show: Callable[[float | None], str]) -> Cell:
    return lambda row, _: show(row.get(column))


def _timed(which: str) -> Cell:
    def cell(row: Row, is_base: bool) -> str:
        ratio = row.get(f"{which}_ratio")
        small = f"<small>{fixed(ratio, 2)} ×</small>" if ratio is not None and not is_base else ""
        return duration(row.get(f"{which}_seconds")) + small

    return cell


# Heading, unit, the column that must be known for some variant to be shown, cell.
_COLUMNS: tuple[tuple[str, str, str, Cell], ...] = (
    ("Validation loss", "nats per token", "eval_loss", _loss),
    ("Minus no drop", "mean, each seed", "eval_loss_difference", _difference),
    ("Training loss", "last 50 steps, or all", "train_loss", _train_loss),
    ("Kept pairs", "", "kept_share", _plain("kept_share", percent)),
    ("Kept ΣR", "", "kept_importance_share", _plain("kept_importance_share", lambda v: percent(v, 2))),
    ("V*/ΣR", "", "variance_share", _plain("variance_share", lambda v: fixed(v, 4))),
    ("Load max/mean", "", "load_max_over_mean", _plain("load_max_over_mean", lambda v: fixed(v, 2))),
    ("Expert forward", "a step", "forward_seconds", _timed("forward")),
    ("Expert backward", "a step", "backward_seconds", _timed("backward")),
    ("Saved for backward", "MoE layers", "saved_bytes", _plain("saved_bytes", size)),
)
_NOTE = (
    "Means over seeds. Seed by seed, every variant starts from the same weights and reads the same data in the same "
    "order. Spread: highest minus lowest seed. Kept ΣR: share of the importance that the kept pairs hold. "
    "×: time against the variant without drop, paired by seed."
)


def table(page: Page) -> str:
    """The comparison, one row a variant; columns that no variant has are left out."""
    if not page.run.is_comparison:
        return ""
    columns = [column for column in _COLUMNS if any(row.get(column[2]) is not None for row in page.rows)]
    head = "".join(
        f'<th scope="col">{heading}{f"<span class=unit>{unit}</span>" if unit else ""}</th>'
        for heading, unit, *_ in columns
    )
    body = "".join(
        f'<tr><th scope="row"><span>{swatch(page.looks[row.variant])}{escape(row.variant)}</span></th>'
        + "".join(f"<td>{cell(row, row is page.base)}</td>" for *_, cell in columns)
        + "</tr>"
        for row in page.rows
    )
    return (
        f'<h2 id="results">Results</h2><section class="card"><p class="note">{_NOTE}</p>'
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="results">'
        f'<table><thead><tr><th scope="col">Variant</th>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div></section>"
    )
