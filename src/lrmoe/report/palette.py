"""The colours of all pages, by day and by night: one table that the styles, the figures and the page's script share.

Figures are written with the day's colours. In dark mode the script of the page replaces each by its partner, so a
colour that is not in the table stays what it is. HTML takes colours through :func:`paint`.
"""

from __future__ import annotations

INK, MUTED, PAPER, GROUND = "#1c2430", "#525c6b", "#ffffff", "#f5f6f8"
GRID, AXIS, BORDER, ZERO = "#e4e8ee", "#aeb6c2", "#c3cad5", "#8791a1"
# Lines and bars. Dark enough for thin lines on white and told apart with the common colour vision deficiencies (after
# Okabe and Ito).
BLUE, ORANGE, GREEN, PINK = "#0067b1", "#c8500a", "#00805f", "#a23b84"
OCHRE, WINE, VIOLET, OLIVE = "#8a6d00", "#7a2230", "#5b4bb7", "#4f772d"
# For series that have no colour of their own, in the order in which they are taken.
SERIES = (BLUE, ORANGE, GREEN, PINK, OCHRE, VIOLET, WINE, OLIVE)
NEUTRAL, PALE, PALE_BLUE, LIMIT = "#3b4252", "#a9b4c4", "#b3cde0", "#b42318"
# Light to dark, apart in lightness as well as hue; the deepest layer is the darkest.
DEPTH = ("#e0a100", "#d1752b", "#bd4f5a", "#974584", "#6b469a", "#454a9c", "#254a86", "#0b3c5d")
# From little to much.
SEQUENCE = ("#f1f5fa", "#bfd6ea", "#7fb0d9", "#3d84bd", "#0b4f8a", "#072f56")
# From harmless to alarming; its middle is the limit where there is one.
ALARM = ("#f3f6f4", "#d5e3dc", "#f6d9a8", "#e08a3c", "#b8430f", "#6d1f06")
# Less than even, even, more.
DIVERGING = ("#0b4f8b", "#7fb0d8", "#f6f6f4", "#f2b36b", "#cf6a1a", "#7a2f00")

NIGHT = {
    INK: "#e6eaf0",
    MUTED: "#a7b1be",
    PAPER: "#161b22",
    GROUND: "#0d1117",
    GRID: "#29313c",
    AXIS: "#4b5664",
    BORDER: "#3d4754",
    ZERO: "#7d8896",
    BLUE: "#58a9ee",
    ORANGE: "#f08a4b",
    GREEN: "#3fbf95",
    PINK: "#da80c2",
    OCHRE: "#d4b13f",
    WINE: "#e68494",
    VIOLET: "#a69af5",
    OLIVE: "#97c466",
    NEUTRAL: "#bcc5d2",
    PALE: "#5d6978",
    PALE_BLUE: "#2f5775",
    LIMIT: "#ff8a7a",
    **dict(
        zip(
            DEPTH,
            ("#f5c542", "#f0975a", "#ea7f89", "#d383c2", "#ae8fe0", "#949bec", "#7fb2ef", "#a8daf2"),
            strict=True,
        )
    ),
    **dict(zip(SEQUENCE, ("#1c2530", "#22405c", "#2d6491", "#4389c2", "#7db6e8", "#cde6fb"), strict=True)),
    **dict(zip(ALARM, ("#1b2421", "#27362f", "#5c4620", "#a8631f", "#e8833a", "#ffc9a0"), strict=True)),
    **dict(zip(DIVERGING, ("#62b2f2", "#2c6699", "#242b34", "#8a5420", "#d9822e", "#ffc681"), strict=True)),
    # Of the balancing and the planning pages.
    "#8a3b94": "#cf86d9",
    "#0f7b55": "#43b98c",
    "#b8860b": "#dcb04a",
    "#c2335a": "#ee7f9c",
    "#3f6f8f": "#82b4d4",
    "#6b6f1f": "#b5ba5c",
    "#6f87a6": "#7d97b8",
    "#d3d9e2": "#38424f",
    "#2f7fc1": "#4d9ade",
    "#0b3c66": "#a9d3f7",
    "#0b5cad": "#6db3f2",
}


def paint(colour: str) -> str:
    """A colour of the table as a CSS value that follows the reader's scheme."""
    return f"var(--c{colour[1:]})" if colour in NIGHT else colour


def variables() -> str:
    """The custom properties behind :func:`paint`, as CSS."""
    day = "".join(f"--c{colour[1:]}:{colour};" for colour in NIGHT)
    night = "".join(f"--c{colour[1:]}:{other};" for colour, other in NIGHT.items())
    return f":root{{{day}}}\n@media (prefers-color-scheme: dark){{:root{{{night}}}}}\n"


def translucent(colour: str, opacity: float) -> str:
    """A hex colour as a translucent CSS value, which the page's script knows how to replace as well."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def scale(colours: tuple[str, ...]) -> list[list[float | str]]:
    """Evenly spaced stops, as plotly reads a colour scale."""
    return [[i / (len(colours) - 1), colour] for i, colour in enumerate(colours)]
