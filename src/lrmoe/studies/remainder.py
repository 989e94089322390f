"""What stands for dropped pairs in the gradients of the experts' weights: nothing, or a row of means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lrmoe.studies.grid import Comparison, GridStudy, Row, Rows, difference_series, gap, in_regimes, of, told
from lrmoe.studies.results import Figure
from lrmoe.studies.study_config import REGIMES, StudyConfig

RATE = 50
# A row a recipe: name and settings. At a lower rate there is too little left to gain for a few seeds to show it.
RECIPES = {
    "sum rule": "",
    "exact router": "router_grad=exact",
    "remainder": "remainder=mean",
    "remainder, exact router": "remainder=mean router_grad=exact",
    "remainder, exact router, pooled": "remainder=mean router_grad=exact quota=pooled",
    "random": "selector=random",
}
# Each with what it is held against: the same without the one thing.
PAIRS = (
    ("remainder", "sum rule", 'remainder="mean"'),
    ("remainder, exact router", "exact router", 'remainder="mean" with router_grad="exact"'),
    ("remainder, exact router, pooled", "remainder, exact router", 'quota="pooled" beside both'),
)


def comparisons(config: StudyConfig) -> list[Comparison]:
    """Each recipe at one rate."""
    return in_regimes(config, [f"{_name(recipe)}: drop={RATE / 100} {text}" for recipe, text in RECIPES.items()])


def _name(recipe: str) -> str:
    return f"C{RATE} {recipe}"


def _found(table: Rows) -> dict[str, Row]:
    """The rows that were run, by recipe."""
    return {recipe: row for recipe in RECIPES if (row := of(table, _name(recipe)))}


def conclude(rows: Mapping[str, Rows]) -> tuple[list[str], list[str]]:
    """What each addition brings, and the best recipe."""
    said, advice = [], []
    for name, table in rows.items():
        found = _found(table)
        said.append(
            f"At {RATE} % {REGIMES[name]}: " + "; ".join(f"{recipe} {told(row)}" for recipe, row in found.items()) + "."
        )
        for recipe, without, what in PAIRS:
            beyond = gap(found.get(recipe), found.get(without))
            if beyond is None:
                continue
            doubt = "" if beyond.sign else ", not told from nothing"
            said.append(f"{what} changes the loss by {beyond} over {beyond.seeds} paired seeds{doubt}.")
            if beyond.sign:
                advice.append(f"At {RATE} % {what} {'loses less' if beyond.sign < 0 else 'costs more'}: {beyond}.")
    return said, advice or [f"At {RATE} % nothing here is told from leaving dropped pairs out."]


def figures(compared: Sequence[Comparison], rows: Mapping[str, Rows]) -> list[Figure]:
    """A point a recipe: all of them leave out as much."""
    found = []
    for comparison in compared:
        shown = _found(rows[comparison.name])
        found.append(
            Figure(
                name=comparison.name,
                title=f"{comparison.title}: loss above no drop",
                reading="Each point is the mean over seeds, its bar reaches from the lowest to the highest seed. The "
                "seeds are paired: what tells two recipes apart is their difference seed by seed, in the sentences.",
                x_label="what stands for dropped pairs",
                y_label="loss minus no drop, nats a token",
                series=[difference_series(f"{RATE} % dropped", list(shown), list(shown.values()))],
            )
        )
    return found


STUDY = GridStudy(
    name="remainder",
    title="What stands for dropped pairs",
    question="Does a row of means in place of the dropped pairs take off some of what dropping half of them costs?",
    first=comparisons,
    conclude=conclude,
    figures=figures,
)
