"""The result in words and numbers: the sentence on top, the figures beside it, and the table of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable

from lrmoe.report import series
from lrmoe.report.comparison import Row, comparison_rows, seconds_a_step
from lrmoe.report.sections import Page, swatch
from lrmoe.report.text import counted, duration, escape, fixed, percent, signed, size, whole

_DEFAULT_TEXT = "the source of the Python standard library"


def setting(page: Page, key: str) -> object:
    """A value of ``config.json``, at the top or in one of its sections, or None."""
    config = page.run.config
    if config.get(key) is not None:
        return config[key]
    return next((part[key] for part in config.values() if isinstance(part, dict) and part.get(key) is not None), None)


def model_name(page: Page) -> str:
    model = setting(page, "model")
    return model if isinstance(model, str) and model else "a model"


def steps(page: Page) -> int:
    value = setting(page, "steps")
    return value if isinstance(value, int) and not isinstance(value, bool) else page.run.last_step


def title(page: Page) -> str:
    """What ran, as plain text."""
    run = page.run
    if not run.is_comparison:
        return f"{model_name(page)}, {counted(steps(page), 'step')}"
    return (
        f"{model_name(page)}: {counted(len(run.variants), 'variant')}, {counted(page.seeds, 'seed')}, "
        f"{counted(steps(page), 'step')} each"
    )


def text_name(page: Page) -> str:
    text = setting(page, "text")
    return text if isinstance(text, str) and text else _DEFAULT_TEXT


def lead(page: Page) -> str:
    """The result in a few plain sentences, as HTML."""
    return " ".join(_compared(page) if page.run.is_comparison else _trained(page))


def _trained(page: Page) -> list[str]:
    text = f"{escape(model_name(page))} was trained on {escape(text_name(page))}."
    if not page.run.trainings:
        return [text, "Nothing has been logged yet."]
    training = page.run.trainings[0]
    sentences = [text]
    known = [value for value in series.finite(training.series("eval_loss")[1]) if value is not None]
    if len(known) > 1:
        sentences.append(f"Validation loss went from {fixed(known[0], 3)} to {fixed(known[-1], 3)} nats per token.")
    elif known:
        sentences.append(f"Validation loss ended at {fixed(known[0], 3)} nats per token.")
    row = comparison_rows(page.run, page.baseline)[0]
    share, importance = row.get("kept_share"), row.get("kept_importance_share")
    if share is not None and share < 1:
        held = f", which hold {percent(importance)} of the importance" if importance is not None else ""
        sentences.append(f"The backward computed {percent(share)} of the token-expert pairs{held}.")
    elif share is not None:
        sentences.append("The backward computed every token-expert pair: nothing was dropped.")
    return sentences


def _compared(page: Page) -> list[str]:
    rows = comparison_rows(page.run, page.baseline)
    base = next((row for row in rows if row.variant == page.baseline), None)
    if base is None or base.get("eval_loss") is None:
        why = "No variant without drop was trained" if base is None else f"{escape(base.variant)} has no validation loss"
        return [f"{why}, so the variants can only be compared with each other."]
    spread = base.get("eval_loss_spread") if page.seeds > 1 else None
    apart = f", its {counted(page.seeds, 'seed')} {fixed(spread, 3)} apart" if spread is not None else ""
    sentences = [f"<b>{escape(base.variant)}</b> ended at a validation loss of {fixed(base.get('eval_loss'), 3)} nats per token{apart}."]
    if spread is None:
        sentences.append("One seed shows no spread to compare a difference with.")
    return sentences + _verdicts([row for row in rows if row is not base], spread)


def _verdicts(rows: list[Row], spread: float | None) -> list[str]:
    """The other variants, sorted by whether the seeds of the baseline lie as far apart as the difference."""
    sides: dict[str, list[str]] = {"Within that spread": [], "Worse": [], "Better": [], "Without a loss to compare": []}
    for row in rows:
        difference = row.get("eval_loss_difference")
        name = f"<b>{escape(row.variant)}</b>"
        if difference is None or not math.isfinite(difference):
            sides["Without a loss to compare"].append(name)
        elif spread is not None and abs(difference) <= spread:
            sides["Within that spread"].append(f"{name} ({signed(difference, 3)})")
        else:
            sides["Worse" if difference > 0 else "Better"].append(f"{name} ({signed(difference, 3)})")
    return [f"{side}: {', '.join(names)}." for side, names in sides.items() if names]


def facts(page: Page, layers: str | None) -> str:
    """What ran, as a list of terms."""
    items: list[tuple[str, str]] = [("Model", model_name(page)), ("Text", text_name(page).removeprefix("the source of the ")), ("Steps", whole(steps(page)))]
    if page.run.is_comparison:
        items.append(("Seeds", ", ".join(dict.fromkeys(str(t.seed) for t in page.run.trainings))))
    else:
        items += [
            (label, str(value))
            for label, key in (("Selector", "selector"), ("Seed", "seed"))
            if (value := setting(page, key)) is not None
        ]
        drop = setting(page, "drop")
        if isinstance(drop, (int, float)) and not isinstance(drop, bool):
            items.insert(3, ("Drop", percent(float(drop), 0)))
    batch, seq = setting(page, "batch"), setting(page, "seq")
    if isinstance(batch, int) and isinstance(seq, int):
        accumulated = setting(page, "grad_accum")
        tokens = batch * seq * (accumulated if isinstance(accumulated, int) else 1)
        items.append(("Tokens a step", whole(tokens)))
    if layers is not None:
        items.append(("MoE layers", layers))
    terms = "".join(f"<div><dt>{term}</dt><dd>{escape(value)}</dd></div>" for term, value in items)
    return f'<dl class="facts">{terms}</dl>'


def tiles(page: Page) -> str:
    """The four numbers of a single run."""
    if page.run.is_comparison or not page.run.trainings:
        return ""
    training = page.run.trainings[0]
    row = comparison_rows(page.run, page.baseline)[0]
    loss_steps, loss = training.series("loss")
    forward = seconds_a_step([training], "forward_seconds")
    tiles = [
        ("Validation loss", fixed(row.get("eval_loss"), 3), "nats per token, last validation"),
        ("Training loss", fixed(loss[-1] if loss else None, 3), f"nats per token, step {whole(loss_steps[-1])}" if loss else ""),
        ("Kept pairs", percent(row.get("kept_share")), f"with {percent(row.get('kept_importance_share'))} of the sum of R"),
        ("Expert backward", duration(row.get("backward_seconds") or None), f"a step; forward {duration(forward or None)}"),
    ]
    return '<div class="tiles">' + "".join(
        f'<div class="card"><p class="label">{label}</p><p class="value">{value}</p><p class="detail">{detail}</p></div>'
        for label, value, detail in tiles
    ) + "</div>"


Cell = Callable[[Row, Row | None], str]


def _loss_cell(row: Row, _: Row | None) -> str:
    spread = row.get("eval_loss_spread")
    return fixed(row.get("eval_loss"), 4) + (f"<small>spread {fixed(spread, 4)}</small>" if spread is not None else "")


def _difference_cell(row: Row, base: Row | None) -> str:
    if base is None or row is base:
        return "–"
    each = ", ".join(signed(value, 3) for value in row.differences)
    return signed(row.get("eval_loss_difference"), 4) + (f"<small>{each}</small>" if len(row.differences) > 1 else "")


def _plain(column: str, show: Callable[[float | None], str]) -> Cell:
    return lambda row, _: show(row.get(column))


def _ratio(column: str, show: Callable[[float | None], str]) -> Cell:
    def cell(row: Row, base: Row | None) -> str:
        mine, reference = row.get(column), base.get(column) if base else None
        ratio = f"<small>{fixed(mine / reference, 2)} ×</small>" if mine and reference and row is not base else ""
        return show(mine) + ratio

    return cell


# Heading, unit, the summary column that must be there for the column to be shown, cell.
_COLUMNS: tuple[tuple[str, str, str, Cell], ...] = (
    ("Validation loss", "nats per token", "eval_loss", _loss_cell),
    ("Difference to no drop", "mean, each seed", "eval_loss_difference", _difference_cell),
    ("Kept pairs", "", "kept_share", _plain("kept_share", percent)),
    ("Kept ΣR", "", "kept_importance_share", _plain("kept_importance_share", lambda v: percent(v, 2))),
    ("V*/ΣR", "", "variance_share", _plain("variance_share", lambda v: fixed(v, 4))),
    ("Load max/mean", "", "load_max_over_mean", _plain("load_max_over_mean", lambda v: fixed(v, 2))),
    ("Expert forward", "a step", "forward_seconds", _ratio("forward_seconds", duration)),
    ("Expert backward", "a step", "backward_seconds", _ratio("backward_seconds", duration)),
    ("Saved for backward", "peak", "saved_bytes", _ratio("saved_bytes", size)),
)


def table(page: Page) -> str:
    """The comparison table; columns that no variant has are left out."""
    if not page.run.is_comparison:
        return ""
    rows = comparison_rows(page.run, page.baseline)
    base = next((row for row in rows if row.variant == page.baseline), None)
    columns = [column for column in _COLUMNS if any(row.get(column[2]) is not None for row in rows)]
    head = "".join(
        f'<th scope="col">{heading}{f"<span class=unit>{unit}</span>" if unit else ""}</th>' for heading, unit, _, _ in columns
    )
    body = "".join(
        f'<tr><th scope="row"><span>{swatch(page.looks[row.variant])}{escape(row.variant)}</span></th>'
        + "".join(f"<td>{cell(row, base)}</td>" for *_, cell in columns)
        + "</tr>"
        for row in rows
    )
    return (
        '<h2 id="results">Results</h2><div class="card"><div class="scroll" tabindex="0" role="region" aria-labelledby="results">'
        "<table><caption>Every variant starts from the same weights and reads the same data in the same order, seed by seed. "
        "× is against the variant without drop.</caption>"
        f'<thead><tr><th scope="col">Variant</th>{head}</tr></thead><tbody>{body}</tbody></table></div></div>'
    )
