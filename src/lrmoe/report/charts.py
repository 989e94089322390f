"""Figures as plotly reads them: plain ``{"data": [...], "layout": {...}}`` objects, no NaN inside.

Strings that come from the run are escaped here, because plotly shows a subset of HTML in names and labels. A trace that
belongs to a variant carries ``meta.variant`` (its position), which the page's legend uses to hide and show it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from lrmoe.report import series
from lrmoe.report.binary import packed
from lrmoe.report.palette import AXIS, BORDER, GRID, INK, MUTED, PAPER, scale
from lrmoe.report.text import escape
from lrmoe.report.variants import Look

Figure = dict[str, Any]
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
LOSS_UNIT = "loss (nats per token)"
# Columns and rows of a heat map that a screen shows apart.
MAX_COLUMNS, MAX_LABELS, MAX_LABEL = 150, 24, 22


def axis(title: str, **more: Any) -> Figure:
    return {
        "title": {"text": title, "font": {"size": 13, "color": MUTED}, "standoff": 12},
        "gridcolor": GRID,
        "zerolinecolor": GRID,
        "linecolor": AXIS,
        "tickfont": {"size": 12, "color": MUTED},
        "automargin": True,
        **more,
    }


def layout(x_title: str, y_title: str, **more: Any) -> Figure:
    """The frame all charts share; x is an optimizer step unless ``xaxis`` says otherwise.

    The title of y, with its unit, stands above the axis and reads across: beside it, it would take a narrow screen's
    width.
    """
    above = {"text": y_title, "font": {"size": 13, "color": MUTED}, "automargin": False}
    above |= {"x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top"}
    return {
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "title": {**above, "pad": {"t": 6, "l": 2}},
        "margin": {"l": 8, "r": 12, "t": 30 if y_title else 12, "b": 40},
        "height": 320,
        "hovermode": "x unified",
        "hoverlabel": {"font": {"size": 12, "color": INK}, "bgcolor": PAPER, "bordercolor": BORDER},
        "showlegend": False,
        "xaxis": axis(x_title, tickformat=",d", rangemode="tozero"),
        "yaxis": axis(""),
        **more,
    }


def colours_of(*figures: Figure | None) -> list[tuple[str, str]]:
    """Colour and plain name of each named trace of the first figure there is, for the key above a chart."""
    traces: list[Figure] = next((figure["data"] for figure in figures if figure is not None), [])
    return [
        ((trace["marker"] if trace["type"] == "bar" else trace["line"])["color"], html.unescape(trace["name"]))
        for trace in traces
        if trace["type"] in ("scatter", "bar") and "name" in trace
    ]


def line(steps: list[int], values: series.Values, look: Look, name: str, *, digits: int, width: float = 2) -> Figure:
    """A curve, thinned by :func:`lrmoe.report.series.thin` where it is long."""
    steps, values = series.thin(steps, values)
    # A curve of a few points would be invisible, or look measured where it is not, without its markers.
    known = sum(value is not None for value in values)
    return {
        "type": "scatter",
        "mode": "lines+markers" if known <= 12 else "lines",
        "x": steps,
        "y": values,
        "name": escape(name),
        "line": {"color": look.colour, "width": width, "dash": look.dash},
        "marker": {"color": look.colour, "size": 6},
        "hovertemplate": f"%{{y:.{digits}f}}",
    }


def limit_line(value: float, text: str, colour: str, *, below: bool) -> Figure:
    """What ``layout`` takes to draw a horizontal limit with a word on it, above the line or ``below``; ``text`` is
    plain."""
    mark = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
    word = {"xref": "paper", "x": 1, "xanchor": "right", "y": value, "yanchor": "top" if below else "bottom"}
    return {
        "shapes": [{**mark, "line": {"color": colour, "width": 1.5, "dash": "dash"}}],
        "annotations": [{**word, "showarrow": False, "text": escape(text), "font": {"size": 12, "color": colour}}],
    }


def below(text: str) -> Figure:
    """The title of the horizontal axis, placed by hand: plotly sets it on top of the labels of a heat map."""
    place = {"xref": "paper", "yref": "paper", "x": 0.5, "y": 0, "yanchor": "top", "yshift": -26}
    return {**place, "text": text, "showarrow": False, "font": {"size": 13, "color": MUTED}}


def heat_map(
    labels: Sequence[str],
    steps: Sequence[int],
    rows: Sequence[series.Values],
    *,
    unit: str,
    colours: tuple[str, ...],
    low: float,
    high: float,
    digits: int,
) -> Figure | None:
    """One row a label, one column a step; where there are many steps, a column for the mean of several.

    Args:
        labels: plain text, no two alike.
        steps: of the values; ``rows``: a value a step each, None where there is none.
        unit: what the colours say, with its unit.
        colours, low, high: the scale and its ends.
        digits: decimals in the hover.
    """
    if not any(value is not None for row in rows for value in row):
        return None
    cut = series.parts(len(steps), MAX_COLUMNS)
    means = [series.mean([row[i] for i in part]) for row in rows for part in cut]
    names = [escape(label) for label in labels]
    frame = layout("", "", hovermode="closest", annotations=[below("optimizer step")])
    frame["margin"] |= {"b": 52}
    frame["height"] = 112 + len(labels) * min(34, max(8, 480 // len(labels)))
    frame["xaxis"] |= {"rangemode": "normal", "showgrid": False}
    ticks = list(range(0, len(labels), math.ceil(len(labels) / MAX_LABELS)))
    frame["yaxis"] |= {"type": "category", "range": [len(labels) - 0.5, -0.5], "showgrid": False, "ticksuffix": " "}
    frame["yaxis"] |= {"tickvals": ticks, "ticktext": [escape(clipped(labels[i])) for i in ticks]}
    bar = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "len": 0.7, "thickness": 10}
    bar |= {"xpad": 0, "ypad": 4, "outlinewidth": 0, "tickfont": {"size": 12, "color": MUTED}, "nticks": 4}
    # The bar makes room for itself above the chart, and carries the unit.
    bar |= {"title": {"text": unit, "side": "top", "font": {"size": 13, "color": MUTED}}}
    many = "mean up to step" if len(cut) < len(steps) else "step"
    return {
        "data": [
            {
                "type": "heatmap",
                "x": [steps[part[-1]] for part in cut],
                "y": names,
                "z": packed(means, (len(labels), len(cut))),
                "zmin": low,
                "zmax": high,
                "colorscale": scale(colours),
                "colorbar": bar,
                "hovertemplate": f"%{{y}}, {many} %{{x:,d}}<br>%{{z:.{digits}f}}<extra></extra>",
                "hoverongaps": False,
            }
        ],
        "layout": frame,
    }


def stacked_bar(parts: Sequence[tuple[str, str, float, str]], x_title: str) -> Figure:
    """One bar of parts: name, colour, length and what is written of it; names and words are plain."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [""],
            "x": [length],
            "name": escape(name),
            "marker": {"color": colour},
            "hovertemplate": f"{escape(name)}: {escape(word)}<extra></extra>",
        }
        for name, colour, length, word in parts
    ]
    frame = layout(x_title, "", hovermode="closest", barmode="stack", height=120)
    frame["xaxis"] |= {"tickformat": ",~r", "range": [0, sum(length for _, _, length, _ in parts) or 1]}
    frame["yaxis"] |= {"showticklabels": False, "showgrid": False}
    return {"data": data, "layout": frame}


def clipped(label: str) -> str:
    """A label short enough for the side of a chart on a phone: the end of a long one, which tells layers apart."""
    return label if len(label) <= MAX_LABEL else f"…{label[1 - MAX_LABEL :]}"
