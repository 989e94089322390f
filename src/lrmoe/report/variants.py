"""How each variant of a comparison looks: one colour and one dash, the same in every chart, table and legend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lrmoe.report.run_folder import Run

# Dark enough for thin lines on white and told apart with the common colour vision deficiencies (after Okabe and Ito);
# rates within a colour differ by dash as well, so that nothing depends on colour alone.
NEUTRAL = "#3b4252"
_BY_WORD = {
    "pps": "#0067b1",
    "topq": "#c8500a",
    "random": "#00805f",
    "auto": "#a23b84",
    "grad_norm": "#8a6d00",
    "abs_grad": "#7a2230",
    "alpha_grad": "#5b4bb7",
    "forward": "#4f772d",
}
_CYCLE = list(_BY_WORD.values())
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Colour (hex) and plotly dash of a variant's lines."""

    colour: str
    dash: str

    def fill(self, opacity: float = 0.15) -> str:
        """The colour as a translucent CSS value, for bands."""
        red, green, blue = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{opacity})"


def settings_of(run: Run) -> dict[str, dict[str, Any]]:
    """The recalibration settings of every variant that ``config.json`` describes: the common ones and its own."""
    train = run.config.get("train")
    common = (train if isinstance(train, dict) else run.config).get("recalibration")
    common = common if isinstance(common, dict) else {}
    told = run.config.get("variants")
    own = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    described = {one["name"]: {**common, **one} for one in own if isinstance(one.get("name"), str)}
    return {variant: described.get(variant, {} if described else common) for variant in run.variants}


def find_baseline(run: Run) -> str | None:
    """The variant the others are compared with: the summary's, else the first that dropped nothing at any logged
    step; None if there is none."""
    told = (run.summary or {}).get("baseline")
    if isinstance(told, str) and told in run.variants:
        return told
    for variant in run.variants:
        drops = [value for training in run.of(variant) for value in training.series("drop")[1]]
        if drops and max(drops) == 0.0:
            return variant
    return None


def looks(run: Run, baseline: str | None) -> dict[str, Look]:
    """A look for every variant: grey for the baseline, else the colour of its metric or selector, as the settings or
    else the name tell it, else the next colour of the cycle. Variants of one colour differ by dash, in their order."""
    taken: dict[str, int] = {}
    chosen: dict[str, Look] = {}
    cycle = 0
    for variant, settings in settings_of(run).items():
        metric = settings.get("metric", "lrm")
        words = [word for word in _BY_WORD if word == (settings.get("selector") if metric == "lrm" else metric)]
        if not words:
            # The longest word first: "random" and "forward" are parts of ordinary names.
            named = [word for word in _BY_WORD if word in variant.lower().replace("-", "_")]
            words = sorted(named, key=len, reverse=True)
        if variant == baseline:
            colour = NEUTRAL
        elif words:
            colour = _BY_WORD[words[0]]
        else:
            colour = _CYCLE[cycle % len(_CYCLE)]
            cycle += 1
        order = taken.get(colour, 0)
        taken[colour] = order + 1
        chosen[variant] = Look(colour=colour, dash=_DASHES[order % len(_DASHES)])
    return chosen
