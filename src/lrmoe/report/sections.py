"""The parts of the page of a comparison that hold charts: each a string of HTML, with the figures put into
``page.figures`` by name. A single run's are in :mod:`lrmoe.report.run_sections`."""

from __future__ import annotations

from collections.abc import Callable

from lrmoe.report import charts, load_section
from lrmoe.report.comparison import seconds_a_step
from lrmoe.report.text import duration, escape
from lrmoe.report.variant_charts import column_curves, share_per_layer, smoothed_loss, time_bars
from lrmoe.report.variants import settings_of
from lrmoe.report.view import Page, card


def loss(page: Page) -> str:
    run = page.run
    band = " Line: mean over seeds; band: lowest to highest seed." if page.seeds > 1 else ""
    parts = [
        card(
            page,
            "train_loss",
            "Training loss, smoothed",
            "Moving average over a 25th of the run." + band,
            smoothed_loss(run, page.looks),
            "No finite training loss was logged.",
        ),
        card(
            page,
            "eval_loss",
            "Validation loss",
            _validation_text(page) + band,
            column_curves(run, page.looks, "eval_loss", charts.layout("optimizer step", charts.LOSS_UNIT), digits=4),
            "No validation loss was logged.",
        ),
    ]
    return f'<h2>Loss</h2><div class="grid">{"".join(parts)}</div>'


def _validation_text(page: Page) -> str:
    if page.memorizes:
        return "This run memorises: validation is on the text that is trained on."
    return "The validation text is never trained on."


def kept(page: Page) -> str:
    run = page.run

    def per_layer(column: str, y_title: str, *, whole_range: bool) -> list[charts.Figure | None]:
        choices = [
            share_per_layer(run.of(variant), column, y_title, whole_range=whole_range) for variant in run.variants
        ]
        return choices or [None]

    pairs = per_layer("kept_share", "kept pairs (%)", whole_range=True)
    importance = per_layer("kept_importance_share", "kept sum of R (%)", whole_range=False)
    seeds = " Mean over seeds." if page.seeds > 1 else ""
    empty = "Not logged for this variant." if run.is_comparison else "No layer logged this."
    parts = [
        card(
            page,
            "kept_pairs",
            "Kept pairs per layer",
            "Share of a layer's token-expert pairs whose backward was computed." + seeds,
            pairs,
            empty,
            colours=charts.colours_of(*pairs),
        ),
        card(
            page,
            "kept_importance",
            "Kept importance per layer",
            "Share of the sum of importance R that the kept pairs hold." + seeds,
            importance,
            empty,
            colours=charts.colours_of(*importance),
        ),
        card(
            page,
            "variance",
            "Sampling variance V*/ΣR",
            "The least variance that any unbiased choice of so many pairs has, in units of the sum of importance: the "
            "noise that dropping adds against the noise of the batch itself. Mean over layers.",
            _floored(
                column_curves(run, page.looks, "variance_share", charts.layout("optimizer step", "V*/ΣR"), digits=5)
            ),
            "Not logged.",
            wide=True,
        ),
    ]
    return (
        "<h2>What the backward kept</h2>"
        '<p class="intro">The forward computes every pair. '
        "The backward computes the kept ones and leaves out the rest.</p>"
        f'{_choice(page, "kept-variant", "kept_pairs kept_importance")}<div class="grid">{"".join(parts)}</div>'
    )


def _floored(figure: charts.Figure | None) -> charts.Figure | None:
    """The same figure with a value axis that starts at zero."""
    if figure is not None:
        figure["layout"]["yaxis"] |= {"rangemode": "tozero"}
    return figure


def _choice(page: Page, identity: str, names: str) -> str:
    if not page.many:
        return ""
    selected = next((i for i, variant in enumerate(page.run.variants) if variant != page.baseline), 0)
    options = "".join(
        f'<option value="{i}"{" selected" if i == selected else ""}>{escape(variant)}</option>'
        for i, variant in enumerate(page.run.variants)
    )
    return (
        f'<div class="controls"><label for="{identity}">Variant in the charts per layer'
        f'<select id="{identity}" data-for="{names}" autocomplete="off">{options}</select></label></div>'
    )


def loads(page: Page) -> str:
    figure = charts.layout("optimizer step", "busiest expert / mean expert")
    spread = column_curves(page.run, page.looks, "load_max_over_mean", figure, digits=3)
    return load_section.section(
        page,
        card(
            page,
            "load_spread",
            "Load of the busiest expert",
            "Pairs of the most loaded expert over the mean of its layer, averaged over layers; 1 is an even load. "
            "A value that keeps rising says that routing collapses onto few experts.",
            spread,
            "Not logged.",
            wide=True,
        ),
    )


def time(page: Page) -> str:
    run = page.run
    measured = []
    for row in page.rows:
        forward, backward = row.get("forward_seconds"), row.get("backward_seconds")
        if forward and backward:
            measured.append((row.variant if run.is_comparison else "this run", 1000 * forward, 1000 * backward))
    figure = None
    if measured:
        names, forwards, backwards = zip(*measured, strict=True)
        figure = time_bars(list(names), list(forwards), list(backwards))
    note = "Inside the experts of all MoE layers, one optimizer step: CPU time on one thread, wall clock on several."
    reference = page.baseline if run.is_comparison else next(iter(run.variants), None)
    whole = seconds_a_step(run.of(reference), "seconds") if reference is not None else None
    if whole is not None:
        of = f" of {reference}" if run.is_comparison else ""
        note += f" The whole step{of} took {duration(whole)} of wall clock."
    empty = "Not measured. The clock runs for layers on a CPU only: a GPU returns before its work is done."
    body = card(
        page,
        "time",
        "Forward and backward of the MoE layers",
        note,
        figure,
        empty,
        colours=charts.colours_of(figure),
        wide=True,
    )
    return f'<h2>Time</h2><div class="grid">{body}</div>'


_LIMITS = (
    "<b>Forward compute.</b> Every routed pair is computed, at every drop rate.",
    None,  # what is said of saved activations depends on the settings
    "<b>Everything that is not an expert.</b> Attention, dense layers, embeddings, the router and the optimizer step "
    "stay as they are, and so do weights, gradients and optimizer state in memory. Dropping 20 % of the pairs saves at "
    "most 20 % of the experts' backward, and a smaller share of a training step.",
    "<b>The exact gradient.</b> With any drop the gradient of the experts is an estimate. What that cost here holds "
    "for this model, text, rate and selector, and for no other.",
)


def limits(page: Page) -> str:
    """What recalibration leaves as it is, in the words of the settings this run had."""
    saves = {settings.get("save") for settings in settings_of(page.run).values()} - {None}
    preactivation = (
        'With <code>save="preactivation"</code> the activations saved for the backward, and with them the peak of the '
        "forward, are those of a backward that drops nothing."
    )
    saved_input = (
        'With <code>save="input"</code> only the layer\'s input and one number a pair are saved; the backward pays by '
        "running the up projection of the kept pairs once more."
    )
    memory = (
        saved_input if saves == {"input"} else f"{preactivation} {saved_input}" if "input" in saves else preactivation
    )
    items = [f"<b>Saved activations.</b> {memory}" if item is None else item for item in _LIMITS]
    return (
        '<h2>What this does not save</h2><section class="card"><ul class="plain">'
        + "".join(f"<li>{item}</li>" for item in items)
        + "</ul></section>"
    )


SECTIONS: tuple[Callable[[Page], str], ...] = (loss, kept, loads, time, limits)
