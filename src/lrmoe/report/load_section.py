"""The part of a page that shows which experts the tokens went to."""

from __future__ import annotations

from lrmoe.report.loads import load_maps
from lrmoe.report.text import counted, escape
from lrmoe.report.view import Page


def section(page: Page, spread: str) -> str:
    """The load map of every training, put into ``page.loads``, and below it ``spread``, a card with the load of the
    busiest expert."""
    page.loads = load_maps(page.run.trainings)
    return (
        "<h2>Load of the experts</h2>"
        '<p class="intro">Pairs routed to each expert in the forward. Dropping does not change the forward, '
        f'but what is learned from it changes the router.</p><div class="grid">{_load_map(page)}{spread}</div>'
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
        "A row a layer, a column an expert. Blue: fewer pairs than the mean of the layer; in between: an even load; "
        "orange: more. One colour scale for the run. A column that is blue in its row throughout is an expert that "
        "hardly learns."
    )
    if len(thinned["steps"]) < thinned["logged"]:
        note += (
            f" The slider stops at {len(thinned['steps'])} of {counted(thinned['logged'], 'logged step')}; "
            "the mean is over all of them."
        )
    return (
        f'<section class="card wide">{title}<div class="controls">{picker}'
        '<label for="load-view">Show<select id="load-view" autocomplete="off">'
        '<option value="mean">Mean over the run</option><option value="last">Last logged step</option>'
        '<option value="step">One logged step</option></select></label>'
        '<label class="slider" id="load-step-label" for="load-step" hidden><span>Optimizer step '
        '<output id="load-step-value" for="load-step"></output></span>'
        '<input type="range" id="load-step" min="0" max="0" value="0" step="1" autocomplete="off"></label></div>'
        '<div class="plot" id="load-map" role="img" '
        f'aria-label="Heat map of the load of each expert in each layer"></div><p class="reading">{note}</p></section>'
    )
