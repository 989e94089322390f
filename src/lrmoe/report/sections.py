"""The parts of a report that hold charts: each a string of HTML, with the figures put into ``page.figures`` by name."""

from __future__ import annotations

from collections.abc import Callable

from lrmoe.report import charts
from lrmoe.report.comparison import seconds_a_step
from lrmoe.report.loads import load_maps
from lrmoe.report.text import counted, duration, escape
from lrmoe.report.variants import settings_of
from lrmoe.report.view import Page, card


def loss(page: Page) -> str:
    run = page.run
    if not run.is_comparison:
        figure = charts.single_loss(run.trainings[0]) if run.trainings else None
        note = f"Cross-entropy of the next token; lower is better. {_validation_text(page)}"
        body = card(
            page,
            "loss",
            "Training and validation loss",
            note,
            figure,
            "No finite loss was logged.",
            colours=charts.colours_of(figure),
            wide=True,
        )
        return f'<h2>Loss</h2><div class="grid">{body}</div>'
    band = " Line: mean over seeds; band: lowest to highest seed." if page.seeds > 1 else ""
    parts = [
        card(
            page,
            "train_loss",
            "Training loss, smoothed",
            "Moving average over a 25th of the run." + band,
            charts.smoothed_loss(run, page.looks),
            "No finite training loss was logged.",
        ),
        card(
            page,
            "eval_loss",
            "Validation loss",
            _validation_text(page) + band,
            charts.column_curves(
                run, page.looks, "eval_loss", charts.layout("optimizer step", charts.LOSS_UNIT), digits=4
            ),
            "No validation loss was logged.",
        ),
    ]
    if page.baseline is not None and page.many:
        note = f"Each variant minus {page.baseline} of the same seed, same start and same data; above zero is worse."
        figure = charts.loss_difference(run, page.looks, page.baseline)
        empty = "No step has a validation loss of both."
        parts.append(card(page, "difference", "What dropping cost", note + band, figure, empty, wide=True))
    return f'<h2>Loss</h2><div class="grid">{"".join(parts)}</div>'


def _validation_text(page: Page) -> str:
    if page.memorizes:
        return "This run memorises: validation is on the text that is trained on."
    return "The validation text is never trained on."


def kept(page: Page) -> str:
    run = page.run

    def per_layer(column: str, y_title: str, *, whole_range: bool) -> list[charts.Figure | None]:
        choices = [
            charts.share_per_layer(run.of(variant), column, y_title, whole_range=whole_range)
            for variant in run.variants
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
                charts.column_curves(
                    run, page.looks, "variance_share", charts.layout("optimizer step", "V*/ΣR"), digits=5
                )
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
    run = page.run
    page.loads = load_maps(run.trainings)
    frame = charts.layout("optimizer step", "largest load / mean load")
    spread = charts.column_curves(run, page.looks, "load_max_over_mean", frame, digits=3)
    parts = [_load_map(page)]
    parts.append(
        card(
            page,
            "load_spread",
            "Load of the busiest expert",
            "Pairs of the most loaded expert over the mean of its layer, averaged over layers; 1 is an even load. "
            "A value that keeps rising says that routing collapses onto few experts.",
            spread,
            "Not logged.",
            wide=True,
        )
    )
    return (
        "<h2>Load of the experts</h2>"
        '<p class="intro">Pairs routed to each expert in the forward. Dropping does not change the forward, '
        f'but what is learned from it changes the router.</p><div class="grid">{"".join(parts)}</div>'
    )


def _load_map(page: Page) -> str:
    title = "<h3>Load per expert and layer</h3>"
    if not page.loads:
        return f'<section class="card wide">{title}<p class="empty">No layer logged its loads.</p></section>'
    picker = ""
    if len(page.loads) > 1:
        first = next((i for i, one in enumerate(page.loads) if one["variant"] != escape(page.baseline)), 0)
        options = "".join(
            # The variant is escaped already.
            f'<option value="{i}"{" selected" if i == first else ""}>{one["variant"]}, seed {one["seed"]}</option>'
            for i, one in enumerate(page.loads)
        )
        picker = (
            '<label for="load-training">Variant and seed'
            f'<select id="load-training" autocomplete="off">{options}</select></label>'
        )
    thinned = max(page.loads, key=lambda one: one["logged"] - len(one["steps"]))
    note = (
        "Blue: fewer pairs than the mean of the layer; white: an even load; orange: more. One colour scale for the run."
    )
    if len(thinned["steps"]) < thinned["logged"]:
        note += (
            f" The slider stops at {len(thinned['steps'])} of {counted(thinned['logged'], 'logged step')}; "
            "the mean is over all of them."
        )
    return (
        f'<section class="card wide">{title}<p class="note">{note}</p><div class="controls">{picker}'
        '<label for="load-view">Show<select id="load-view" autocomplete="off">'
        '<option value="mean">Mean over the run</option><option value="last">Last logged step</option>'
        '<option value="step">One logged step</option></select></label>'
        '<label class="slider" id="load-step-label" for="load-step" hidden><span>Optimizer step '
        '<output id="load-step-value" for="load-step"></output></span>'
        '<input type="range" id="load-step" min="0" max="0" value="0" step="1" autocomplete="off"></label></div>'
        '<div class="plot" id="load-map" role="img" '
        'aria-label="Heat map of the load of each expert in each layer"></div></section>'
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
        figure = charts.time_bars(list(names), list(forwards), list(backwards))
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
