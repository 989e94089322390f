"""What ran and what came of it, in words and a few numbers: the top of the page."""

from __future__ import annotations

import math

from lrmoe.report import frame, series
from lrmoe.report.comparison import Row
from lrmoe.report.text import counted, duration, escape, fixed, percent, signed, whole
from lrmoe.report.view import Page
from lrmoe.training.summary import LAST_STEPS


def model_name(page: Page) -> str:
    model = page.settings.get("model")
    return model if isinstance(model, str) and model else "a model"


def text_name(page: Page) -> str:
    text = page.settings.get("text")
    if text is None:
        text = page.settings.get("source")
    return text if isinstance(text, str) and text else "a text"


def steps(page: Page) -> int:
    return page.whole("steps") or page.run.last_step


def title(page: Page) -> str:
    """What ran, as plain text."""
    run = page.run
    if not run.is_comparison:
        return f"{model_name(page)}, {counted(steps(page), 'step')}"
    return (
        f"{model_name(page)}: {counted(len(run.variants), 'variant')}, {counted(page.seeds, 'seed')}, "
        f"{counted(steps(page), 'step')} each"
    )


def lead(page: Page) -> str:
    """The result in a few plain sentences, as HTML."""
    return " ".join(_compared(page) if page.run.is_comparison else _trained(page))


def _trained(page: Page) -> list[str]:
    sentences = [f"{escape(model_name(page))} was trained on {escape(text_name(page))}."]
    if not page.rows:
        return [*sentences, "Nothing has been logged yet."]
    training, row = page.run.trainings[0], page.rows[0]
    known = [value for value in series.finite(training.series("eval_loss")[1]) if value is not None]
    if len(known) > 1:
        sentences.append(
            f"The {_loss_name(page)} went from {fixed(known[0], 3)} to {fixed(known[-1], 3)} nats per token."
        )
    elif known:
        sentences.append(f"The {_loss_name(page)} ended at {fixed(known[0], 3)} nats per token.")
    share, importance = row.get("kept_share"), row.get("kept_importance_share")
    if share is not None and share < 1:
        held = f", which hold {percent(importance)} of the importance" if importance is not None else ""
        sentences.append(f"The backward computed {percent(share)} of the token-expert pairs{held}.")
    elif share is not None:
        sentences.append("The backward computed every token-expert pair: nothing was dropped.")
    return sentences


def _loss_name(page: Page) -> str:
    return "loss on its training text" if page.memorizes else "validation loss"


def _compared(page: Page) -> list[str]:
    base = page.base
    if base is None:
        return ["No variant without drop was trained, so the variants can only be compared with each other."]
    name = f"<b>{escape(base.variant)}</b>"
    loss = base.get("eval_loss")
    if loss is None or not math.isfinite(loss):
        return [f"{name} has no finite validation loss to compare the others with."]
    spread = base.get("eval_loss_spread")
    apart = f", its {counted(page.seeds, 'seed')} {fixed(spread, 3)} apart" if spread is not None else ""
    sentences = [
        f"{name}, which drops nothing, ended at a {_loss_name(page)} of {fixed(loss, 3)} nats per token{apart}."
    ]
    if spread is None:
        sentences.append("One seed shows no spread to hold a difference against.")
    return sentences + _verdicts([row for row in page.rows if row is not base], spread)


def _verdicts(rows: list[Row], spread: float | None) -> list[str]:
    """The other variants, sorted by whether the seeds of the baseline lie as far apart as the difference."""
    # Without a spread nothing says whether a difference means anything.
    above, below = ("Worse", "Better") if spread is not None else ("Higher", "Lower")
    sides: dict[str, list[str]] = {"Within that spread": [], above: [], below: [], "Without a loss to compare": []}
    for row in rows:
        difference = row.get("eval_loss_difference")
        name = f"<b>{escape(row.variant)}</b>"
        if difference is None or not math.isfinite(difference):
            sides["Without a loss to compare"].append(name)
        elif spread is not None and abs(difference) <= spread:
            sides["Within that spread"].append(f"{name} ({signed(difference, 3)})")
        else:
            sides[above if difference > 0 else below].append(f"{name} ({signed(difference, 3)})")
    return [f"{side}: {', '.join(names)}." for side, names in sides.items() if names]


def facts(page: Page) -> str:
    """What ran, as a list of terms."""
    settings = page.settings
    items: list[tuple[str, str]] = [
        ("Model", model_name(page)),
        ("Text", text_name(page)),
        ("Steps", whole(steps(page))),
    ]
    if page.whole("pretrain_steps"):
        items.append(("Pretrained", f"{whole(page.whole('pretrain_steps') or 0)} steps without drop"))
    if page.run.is_comparison:
        items.append(("Seeds", ", ".join(dict.fromkeys(str(training.seed) for training in page.run.trainings))))
    else:
        drop = settings.get("drop")
        if isinstance(drop, (int, float)) and not isinstance(drop, bool):
            items.append(("Drop", percent(float(drop), 0)))
        items += [
            (label, str(settings[key]))
            for label, key in (("Selector", "selector"), ("Seed", "seed"))
            if key in settings
        ]
    ranks = page.whole("ep") or 1
    if ranks > 1:
        items.append(("Ranks", f"{ranks}, balanced by {settings.get('policy')}"))
    batch, seq = page.whole("batch"), page.whole("seq")
    if batch is not None and seq is not None:
        items.append(("Tokens a step", whole(batch * seq * (page.whole("grad_accum") or 1))))
    experts = _experts(page)
    if experts is not None:
        items.append(("MoE layers", experts))
    parameters = (page.run.summary or {}).get("parameters")
    if isinstance(parameters, int):
        items.append(("Parameters", whole(parameters)))
    return frame.facts(items)


def _experts(page: Page) -> str | None:
    """``2 layers × 32 experts`` of the first point that logged loads."""
    for training in page.run.trainings:
        for point in training.points:
            experts = [len(layer.load) for layer in point.layers.values() if layer.load]
            if experts:
                count = str(experts[0]) if len(set(experts)) == 1 else f"{min(experts)}–{max(experts)}"
                return f"{counted(len(experts), 'layer')} × {count} experts"
    return None


def tiles(page: Page) -> str:
    """The four numbers of a single run."""
    if page.run.is_comparison or not page.rows:
        return ""
    row = page.rows[0]
    loss_steps, loss = page.run.trainings[0].series("loss")
    train = row.get("train_loss")
    last = counted(min(LAST_STEPS, loss_steps[-1] if loss_steps else LAST_STEPS), "step")
    over = f"last {last}" if train is not None else f"step {whole(loss_steps[-1])}" if loss else "not logged"
    four = [
        ("Validation loss", fixed(row.get("eval_loss"), 3), "nats per token, last validation"),
        (
            "Training loss",
            fixed(train if train is not None else loss[-1] if loss else None, 3),
            f"nats per token, {over}",
        ),
        (
            "Kept pairs",
            percent(row.get("kept_share")),
            f"with {percent(row.get('kept_importance_share'))} of the sum of R",
        ),
        (
            "Expert backward",
            duration(row.get("backward_seconds")),
            f"a step; forward {duration(row.get('forward_seconds'))}",
        ),
    ]
    return frame.tiles(four)
