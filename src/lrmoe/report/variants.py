"""How each variant of a comparison looks: one colour and one dash, the same in every chart, table and legend."""

from __future__ import annotations

from dataclasses import dataclass

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


def find_baseline(run: Run) -> str | None:
    """The first variant that dropped nothing at any logged step, or None."""
    for variant in run.variants:
        drops = [value for training in run.of(variant) for value in training.series("drop")[1]]
        if drops and max(drops) == 0.0:
            return variant
    return None


def looks(variants: list[str], baseline: str | None) -> dict[str, Look]:
    """A look for every variant: grey for the baseline, else the colour of the selector or metric that the name
    speaks of, else the next colour of the cycle. Variants of one colour differ by dash, in the order they come."""
    taken: dict[str, int] = {}
    chosen: dict[str, Look] = {}
    cycle = 0
    for variant in variants:
        if variant == baseline:
            colour = NEUTRAL
        else:
            words = [word for word in _BY_WORD if word in variant.lower().replace("-", "_")]
            # "random" and "forward" are weaker hints than a longer name that contains the variant's metric.
            colour = _BY_WORD[max(words, key=len)] if words else _CYCLE[cycle % len(_CYCLE)]
            cycle += not words
        order = taken.get(colour, 0)
        taken[colour] = order + 1
        chosen[variant] = Look(colour=colour, dash=_DASHES[order % len(_DASHES)])
    return chosen
