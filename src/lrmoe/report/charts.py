"""Figures as plotly reads them: plain ``{"data": [...], "layout": {...}}`` objects, no NaN inside.

Strings that come from the run are escaped here, because plotly shows a subset of HTML in names and labels. A trace that
belongs to a variant carries ``meta.variant`` (its position), which the page's legend uses to hide and show it.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from lrmoe.report import series
from lrmoe.report.palette import (
    AXIS,
    BLUE,
    BORDER,
    DEPTH,
    GRID,
    INK,
    MUTED,
    NEUTRAL,
    ORANGE,
    PALE,
    PALE_BLUE,
    PAPER,
    ZERO,
)
from lrmoe.report.run_folder import Run, Training
from lrmoe.report.text import escape, short_layer_names
from lrmoe.report.variants import Look

Figure = dict[str, Any]
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
MAX_LAYER_LINES = 8


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


def _band(curve: series.Curve, look: Look) -> Figure:
    """The area between the lowest and the highest seed, one polygon for each stretch without a gap."""
    x: list[int | None] = []
    y: series.Values = []
    stretch: list[int] = []
    for i in range(len(curve.steps) + 1):
        if i < len(curve.steps) and curve.low[i] is not None:
            stretch.append(i)
        elif stretch:
            x += [curve.steps[j] for j in stretch] + [curve.steps[j] for j in reversed(stretch)] + [None]
            y += [curve.high[j] for j in stretch] + [curve.low[j] for j in reversed(stretch)] + [None]
            stretch = []
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x[:-1],
        "y": y[:-1],
        "fill": "toself",
        "fillcolor": look.fill(),
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def variant_curves(
    run: Run,
    looks: dict[str, Look],
    curve_of: Callable[[Training], tuple[list[int], series.Values]],
    frame: Figure,
    *,
    digits: int,
) -> Figure | None:
    """One line (mean over seeds) and band (range over seeds) a variant; None if no variant has a value."""
    data: list[Figure] = []
    for position, variant in enumerate(run.variants):
        curve = series.over_seeds([curve_of(training) for training in run.of(variant)])
        if all(value is None for value in curve.mean):
            continue
        traces = [_band(curve, looks[variant])] if curve.has_band else []
        traces.append(line(curve.steps, curve.mean, looks[variant], variant, digits=digits))
        data += [{**trace, "meta": {"variant": position}} for trace in traces]
    return {"data": data, "layout": frame} if data else None


def column_curves(run: Run, looks: dict[str, Look], column: str, frame: Figure, *, digits: int) -> Figure | None:
    """:func:`variant_curves` of one logged column."""

    def curve_of(training: Training) -> tuple[list[int], series.Values]:
        steps, values = training.series(column)
        return steps, series.finite(values)

    return variant_curves(run, looks, curve_of, frame, digits=digits)


def smoothed_loss(run: Run, looks: dict[str, Look]) -> Figure | None:
    """Training loss, smoothed per seed, of every variant."""

    def curve_of(training: Training) -> tuple[list[int], series.Values]:
        steps, values = training.series("loss")
        return steps, series.smooth(values)

    return variant_curves(run, looks, curve_of, layout("optimizer step", LOSS_UNIT), digits=4)


LOSS_UNIT = "loss (nats per token)"


def loss_difference(run: Run, looks: dict[str, Look], baseline: str) -> Figure | None:
    """Validation loss minus that of the baseline of the same seed."""
    base = {training.seed: training.series("eval_loss") for training in run.of(baseline)}

    def curve_of(training: Training) -> tuple[list[int], series.Values]:
        return series.difference(*training.series("eval_loss"), *base.get(training.seed, ([], [])))

    frame = layout("optimizer step", "difference (nats per token)")
    frame["yaxis"] |= {"tickformat": "+.3~f", "zeroline": True, "zerolinecolor": ZERO}
    return variant_curves(run, looks, curve_of, frame, digits=4)


def single_loss(training: Training) -> Figure | None:
    """Training loss as logged and smoothed, and validation loss, of one run."""
    steps, loss = training.series("loss")
    eval_steps, eval_loss = training.series("eval_loss")
    train, valid = Look(colour=BLUE, dash="solid"), Look(colour=ORANGE, dash="solid")
    data = []
    if any(value is not None for value in series.finite(loss)):
        smoothed = line(steps, series.smooth(loss), train, "training loss", digits=4)
        if len(loss) >= 50:  # below that the smoothing window is one point
            logged = line(
                steps, series.finite(loss), Look(colour=PALE_BLUE, dash="solid"), "as logged", digits=4, width=1
            )
            data.append(logged)
            smoothed["name"] = "training loss, smoothed"
        data.append(smoothed)
    if any(value is not None for value in series.finite(eval_loss)):
        curve = line(eval_steps, series.finite(eval_loss), valid, "validation loss", digits=4)
        data.append(
            curve | {"mode": "lines+markers", "marker": {"color": valid.colour, "size": 7, "symbol": "diamond"}}
        )
    if not data:
        return None
    return {
        "data": data,
        "layout": layout("optimizer step", LOSS_UNIT, height=360),
    }


def share_per_layer(trainings: list[Training], column: str, y_title: str, *, whole_range: bool) -> Figure | None:
    """A share in percent, one line a layer (mean over seeds); a heat map where there are too many layers for lines."""
    names = list(dict.fromkeys(name for training in trainings for name in training.layer_names))
    curves = []
    for name in names:
        seeds = [training.layer_series(name, column) for training in trainings]
        percent = [(steps, series.finite(100 * value for value in values)) for steps, values in seeds]
        curves.append(series.over_seeds(percent))
    shown = [
        (label, curve)
        for label, curve in zip(short_layer_names(names), curves, strict=True)
        if any(value is not None for value in curve.mean)
    ]
    if not shown:
        return None
    if len(shown) > MAX_LAYER_LINES:
        return _layer_heat(shown, y_title)
    data = []
    for i, (label, curve) in enumerate(shown):
        look = Look(colour=DEPTH[round(i * (len(DEPTH) - 1) / max(1, len(shown) - 1))], dash="solid")
        # Layers with the same share lie on top of each other: earlier lines are wider, so that all stay visible.
        width = 1.75 + 1.5 * (len(shown) - 1 - i)
        data.append(line(curve.steps, curve.mean, look, label, digits=2, width=width))
        data[-1]["hovertemplate"] += " %"
    frame = layout("optimizer step", y_title)
    lowest = min(value for _, curve in shown for value in curve.mean if value is not None)
    bottom = 0.0 if whole_range else lowest - max(0.2, 0.08 * (100 - lowest))
    # A little room above 100 %, so that a line there is seen whole.
    frame["yaxis"] |= {"range": [bottom, 100 + 0.03 * (100 - bottom)]}
    return {"data": data, "layout": frame}


def _layer_heat(shown: list[tuple[str, series.Curve]], title: str) -> Figure:
    steps = sorted({step for _, curve in shown for step in curve.steps})
    rows = [dict(zip(curve.steps, curve.mean, strict=True)) for _, curve in shown]
    labels = [escape(label) for label, _ in shown]
    frame = layout("optimizer step", "", hovermode="closest", height=max(320, 14 * len(shown) + 80))
    frame["yaxis"] |= {"autorange": "reversed", "type": "category"}
    return {
        "data": [
            {
                "type": "heatmap",
                "x": steps,
                "y": labels,
                "z": [[row.get(step) for step in steps] for row in rows],
                "colorscale": "Cividis",
                "colorbar": {"title": {"text": "%", "side": "top"}, "thickness": 12, "outlinewidth": 0},
                "hovertemplate": f"%{{y}}, step %{{x}}<br>%{{z:.2f}} %<extra>{title}</extra>",
                "hoverongaps": False,
            }
        ],
        "layout": frame,
    }


def time_bars(names: list[str], forward: list[float], backward: list[float]) -> Figure:
    """Milliseconds a step in the forward and the backward of the MoE layers, one pair of bars a name."""
    labels = [escape(name) for name in names]

    def bars(values: list[float], name: str, colour: str) -> Figure:
        return {
            "type": "bar",
            "orientation": "h",
            "y": labels,
            "x": values,
            "name": name,
            "marker": {"color": colour},
            "text": [f"{value:,.1f} ms" for value in values],
            "textposition": "auto",
            "insidetextanchor": "end",
            "textfont": {"size": 12},
            "hovertemplate": f"%{{y}}<br>{name}: %{{x:,.2f}} ms a step<extra></extra>",
        }

    longest = max(*forward, *backward)
    frame = layout("milliseconds a step", "")
    frame |= {"barmode": "group", "bargap": 0.3, "bargroupgap": 0.08, "hovermode": "closest"}
    frame["height"] = 110 + 64 * len(names)
    frame["xaxis"] |= {"range": [0, 1.05 * longest], "tickformat": ",~r"}
    frame["yaxis"] |= {"autorange": "reversed", "type": "category", "ticksuffix": "  "}
    return {"data": [bars(forward, "forward", PALE), bars(backward, "backward", NEUTRAL)], "layout": frame}
