"""Figures of a comparison: a line a variant, with the range of its seeds.

Traces carry ``meta.variant``, the position of their variant, by which the page's legend hides and shows them.
"""

from __future__ import annotations

from collections.abc import Callable

from lrmoe.report import series
from lrmoe.report.charts import LOSS_UNIT, Figure, heat_map, layout, line
from lrmoe.report.palette import DEPTH, NEUTRAL, PALE, SEQUENCE, ZERO
from lrmoe.report.run_folder import Run, Training
from lrmoe.report.text import escape, short_layer_names
from lrmoe.report.variants import Look

MAX_LAYER_LINES = 8


def _bands(curve: series.Curve, look: Look) -> list[Figure]:
    """The area between the lowest and the highest seed, one polygon for each stretch without a gap; a bar at a point
    that stands alone, where a polygon has no area."""
    area: tuple[list[int | None], series.Values] = ([], [])
    bars: tuple[list[int | None], series.Values] = ([], [])
    stretch: list[int] = []
    for i in range(len(curve.steps) + 1):
        if i < len(curve.steps) and curve.low[i] is not None:
            stretch.append(i)
            continue
        x, y = bars if len(stretch) == 1 else area
        if stretch:
            x += [curve.steps[j] for j in stretch] + [curve.steps[j] for j in reversed(stretch)] + [None]
            y += [curve.high[j] for j in stretch] + [curve.low[j] for j in reversed(stretch)] + [None]
        stretch = []
    common: Figure = {"type": "scatter", "mode": "lines", "hoverinfo": "skip"}
    traces = []
    if area[0]:
        fill = {"fill": "toself", "fillcolor": look.fill(), "line": {"width": 0}}
        traces.append({**common, "x": area[0][:-1], "y": area[1][:-1], **fill})
    if bars[0]:
        traces.append({**common, "x": bars[0][:-1], "y": bars[1][:-1], "line": {"width": 8, "color": look.fill(0.3)}})
    return traces


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
        curve = curve.thinned(series.MAX_POINTS)
        traces = _bands(curve, looks[variant]) if curve.has_band else []
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


def loss_difference(run: Run, looks: dict[str, Look], baseline: str) -> Figure | None:
    """Validation loss minus that of the baseline of the same seed."""
    base = {training.seed: training.series("eval_loss") for training in run.of(baseline)}

    def curve_of(training: Training) -> tuple[list[int], series.Values]:
        return series.difference(*training.series("eval_loss"), *base.get(training.seed, ([], [])))

    frame = layout("optimizer step", "difference (nats per token)")
    frame["yaxis"] |= {"tickformat": "+.3~f", "zeroline": True, "zerolinecolor": ZERO}
    return variant_curves(run, looks, curve_of, frame, digits=4)


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


def _layer_heat(shown: list[tuple[str, series.Curve]], title: str) -> Figure | None:
    steps = sorted({step for _, curve in shown for step in curve.steps})
    rows = [dict(zip(curve.steps, curve.mean, strict=True)) for _, curve in shown]
    labels = [label for label, _ in shown]
    values = [[row.get(step) for step in steps] for row in rows]
    lowest = min(value for row in values for value in row if value is not None)
    low = min(lowest, 99.0)
    return heat_map(labels, steps, values, unit=title, colours=SEQUENCE, low=low, high=100.0, digits=2)
