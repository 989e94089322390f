"""The parts of a report that hold charts: each a string of HTML, with the figures put into ``figures`` by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lrmoe.report import charts
from lrmoe.report.comparison import seconds_a_step
from lrmoe.report.loads import load_maps
from lrmoe.report.run_folder import Run
from lrmoe.report.text import counted, escape, short_layer_names
from lrmoe.report.variants import Look


@dataclass(kw_only=True, slots=True)
class Page:
    """What is being written: the run, how its variants look, and what the script of the page gets."""

    run: Run
    baseline: str | None
    looks: dict[str, Look]
    figures: dict[str, Any] = field(default_factory=dict)
    loads: list[dict[str, Any]] = field(default_factory=list)

    @property
    def many(self) -> bool:
        """Whether there are variants to tell apart."""
        return len(self.run.variants) > 1

    @property
    def seeds(self) -> int:
        return len({training.seed for training in self.run.trainings})

    def name(self, variant: str) -> str:
        return variant if self.run.is_comparison else "this run"


def swatch(look: Look) -> str:
    """A short sample of a variant's line. Colours and dashes are ours, nothing of the user's is in here."""
    pattern = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4"}[look.dash]
    return (
        '<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">'
        f'<line x1="1" y1="5" x2="25" y2="5" stroke="{look.colour}" stroke-width="3" stroke-dasharray="{pattern}"/></svg>'
    )


def legend(page: Page) -> str:
    """Buttons that show and hide a variant in every chart."""
    if not page.many:
        return ""
    buttons = "".join(
        f'<button type="button" data-variant="{position}" aria-pressed="true" title="{escape(variant)}">'
        f"{swatch(page.looks[variant])}<b>{escape(variant)}</b></button>"
        for position, variant in enumerate(page.run.variants)
    )
    return f'<nav class="legend" aria-label="Variants shown in the charts"><span>Show</span>{buttons}</nav>'


def card(page: Page, name: str, title: str, note: str, figure: object, empty: str, *, wide: bool = False) -> str:
    """One chart with its heading and note, or what ``empty`` says where there is no figure (or no choice has one)."""
    choices = figure if isinstance(figure, list) else [figure]
    drawn = any(choices)
    missing = f'<p class="empty"{" hidden" if choices[0] else ""}>{escape(empty)}</p>'
    if not drawn or len(choices) == 1:
        missing = "" if drawn else missing
    plot = ""
    if drawn:
        page.figures[name] = figure
        plot = f'<div class="plot" data-figure="{name}" role="img" aria-label="{escape(title)}. {escape(note)}"></div>'
    return (
        f'<section class="card{" wide" if wide else ""}"><h3>{escape(title)}</h3><p class="note">{escape(note)}</p>'
        f"{plot}{missing}</section>"
    )


def loss(page: Page) -> str:
    run = page.run
    if not run.is_comparison:
        figure = charts.single_loss(run.trainings[0]) if run.trainings else None
        note = "Cross-entropy of the next token; lower is better. The validation text is never trained on."
        body = card(page, "loss", "Training and validation loss", note, figure, "No finite loss was logged.", wide=True)
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
            "On text that is never trained on." + band,
            charts.column_curves(run, page.looks, "eval_loss", charts.layout("optimizer step", charts.LOSS_UNIT), digits=4),
            "No validation loss was logged.",
        ),
    ]
    if page.baseline is not None and page.many:
        note = f"Each variant minus {page.baseline} of the same seed, same start and same data; above zero is worse."
        figure = charts.loss_difference(run, page.looks, page.baseline)
        empty = "No step has a validation loss of both."
        parts.append(card(page, "difference", "What dropping cost", note + band, figure, empty, wide=True))
    return f'<h2>Loss</h2><div class="grid">{"".join(parts)}</div>'


def kept(page: Page) -> str:
    run = page.run

    def per_layer(column: str, y_title: str, *, whole_range: bool) -> list[charts.Figure | None]:
        choices = [
            charts.share_per_layer(run.of(variant), column, y_title, whole_range=whole_range) for variant in run.variants
        ]
        return choices or [None]

    seeds = " Mean over seeds." if page.seeds > 1 else ""
    empty = "Not logged for this variant." if run.is_comparison else "No layer logged this."
    parts = [
        card(
            page,
            "kept_pairs",
            "Kept pairs per layer",
            "Share of a layer's token-expert pairs whose backward was computed." + seeds,
            per_layer("kept_share", "kept pairs (%)", whole_range=True),
            empty,
        ),
        card(
            page,
            "kept_importance",
            "Kept importance per layer",
            "Share of the sum of importance R that the kept pairs hold." + seeds,
            per_layer("kept_importance_share", "kept sum of R (%)", whole_range=False),
            empty,
        ),
        card(
            page,
            "variance",
            "Sampling variance V*/ΣR",
            "The least variance any unbiased choice of that many pairs can have, against the batch's own noise. Mean over layers.",
            _floored(charts.column_curves(run, page.looks, "variance_share", charts.layout("optimizer step", "V*/ΣR"), digits=5)),
            "Not logged.",
            wide=True,
        ),
    ]
    return (
        "<h2>What the backward kept</h2>"
        '<p class="intro">The forward computes every pair. The backward computes the kept ones and leaves out the rest.</p>'
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
    note = "Blue: fewer pairs than the mean of the layer; white: an even load; orange: more. One colour scale for the run."
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
        '<div class="plot" id="load-map" role="img" aria-label="Heat map of the load of each expert in each layer"></div>'
        "</section>"
    )


def time(page: Page) -> str:
    run = page.run
    measured = []
    for variant in run.variants:
        seconds = [seconds_a_step(run.of(variant), column) for column in ("forward_seconds", "backward_seconds")]
        if all(value is not None for value in seconds) and any(seconds):
            measured.append((page.name(variant), *(1000 * (value or 0.0) for value in seconds)))
    figure = None
    if measured:
        names, forward, backward = zip(*measured, strict=True)
        figure = charts.time_bars(list(names), list(forward), list(backward))
    note = "Host time inside the experts of all MoE layers, mean of one optimizer step. It says nothing about the rest of the step."
    empty = "Not measured. The clock runs for layers on a CPU only: a GPU returns before its work is done."
    body = card(page, "time", "Forward and backward of the MoE layers", note, figure, empty, wide=True)
    return f'<h2>Time</h2><div class="grid">{body}</div>'


def limits(page: Page) -> str:
    """What recalibration leaves as it is, in the words of the settings this run had."""
    saves = sorted(set(find_all(page.run.config, "save")))
    both = "preactivation" in saves and "input" in saves
    preactivation = (
        "With <code>save=\"preactivation\"</code> the activations saved for the backward, and with them the peak of the "
        "forward, are those of a backward that drops nothing."
    )
    saved_input = (
        "With <code>save=\"input\"</code> only the layer's input and one number a pair are saved; the backward pays by "
        "running the up projection of the kept pairs once more."
    )
    memory = saved_input if saves == ["input"] else f"{preactivation} {saved_input}" if both else preactivation
    items = [
        "<b>Forward compute.</b> Every routed pair is computed, at every drop rate.",
        f"<b>Saved activations.</b> {memory}",
        "<b>Everything that is not an expert.</b> Attention, dense layers, embeddings, the router, the optimizer step and "
        "the weights, gradients and optimizer state in memory stay as they are. Dropping 20 % of the pairs therefore "
        "saves about 20 % of the experts' backward, and a smaller share of a training step.",
        "<b>Accuracy in general.</b> Above no drop the gradient is an estimate. What it cost here holds for this model, "
        "text, rate and selector.",
    ]
    return (
        '<h2>What this does not save</h2><section class="card"><ul class="plain">'
        + "".join(f"<li>{item}</li>" for item in items)
        + "</ul></section>"
    )


def find_all(value: object, key: str) -> list[str]:
    """Every string under ``key`` anywhere in nested settings."""
    found: list[str] = []
    if isinstance(value, dict):
        if isinstance(value.get(key), str):
            found.append(value[key])
        for inner in value.values():
            found += find_all(inner, key)
    elif isinstance(value, list):
        for inner in value:
            found += find_all(inner, key)
    return found


def shape(page: Page) -> str | None:
    """``2 layers × 32 experts`` of the first training that logged loads."""
    for training in page.run.trainings:
        for point in training.points:
            experts = [len(layer.load) for layer in point.layers.values() if layer.load]
            if experts:
                same = len(set(experts)) == 1
                count = str(experts[0]) if same else f"{min(experts)}–{max(experts)}"
                return f"{counted(len(experts), 'layer')} × {count} experts"
    return None


SECTIONS: tuple[Callable[[Page], str], ...] = (loss, kept, loads, time, limits)
__all__ = ["SECTIONS", "Page", "find_all", "legend", "shape", "short_layer_names", "swatch"]
