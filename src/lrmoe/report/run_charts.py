"""Figures of one training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from lrmoe.report import series
from lrmoe.report.charts import LOSS_UNIT, Figure, heat_map, layout, limit_line, line, stacked_bar
from lrmoe.report.evidence import Limit, StepTime
from lrmoe.report.palette import ALARM, BLUE, GREEN, INK, LIMIT, NEUTRAL, ORANGE, PALE, PALE_BLUE, PAPER, SEQUENCE
from lrmoe.report.run_folder import GuardEvent, Training
from lrmoe.report.text import duration, escape, percent, short_layer_names, size
from lrmoe.report.variants import Look

# Marks of guard events that a chart shows; more would only cover each other.
MAX_MARKS = 400


def _solid(colour: str) -> Look:
    return Look(colour=colour, dash="solid")


def loss(training: Training) -> Figure | None:
    """Training loss as logged and smoothed, and validation loss."""
    steps, logged = training.series("loss")
    eval_steps, validation = training.series("eval_loss")
    data = []
    if any(value is not None for value in series.finite(logged)):
        smoothed = line(steps, series.smooth(logged), _solid(BLUE), "training loss", digits=4)
        if len(logged) >= 50:  # below that the smoothing window is one point
            data.append(line(steps, series.finite(logged), _solid(PALE_BLUE), "as logged", digits=4, width=1))
            smoothed["name"] = "training loss, smoothed"
        data.append(smoothed)
    if any(value is not None for value in series.finite(validation)):
        curve = line(eval_steps, series.finite(validation), _solid(ORANGE), "validation loss", digits=4)
        few = len(eval_steps) <= 60
        curve["mode"] = "lines+markers" if few else "lines"
        data.append(curve | {"marker": {"color": ORANGE, "size": 7, "symbol": "diamond"}})
    if not data:
        return None
    frame = layout("optimizer step", LOSS_UNIT, height=360)
    top = loss_top(training)
    if top is not None:
        lowest = min(value for trace in data for value in trace["y"] if value is not None)
        frame["yaxis"] |= {"range": [lowest - 0.05 * (top - lowest), top]}
    return {"data": data, "layout": frame}


def loss_top(training: Training) -> float | None:
    """Where the axis of the loss ends, if the first few of many values would take more than half of it; else None."""
    values = [value for column in ("loss", "eval_loss") for value in training.series(column)[1] if math.isfinite(value)]
    if len(values) < 100:
        return None
    ordered = sorted(values)
    lowest, most, highest = ordered[0], ordered[len(ordered) * 97 // 100], ordered[-1]
    top = most + 0.1 * (most - lowest)
    return top if top - lowest < 0.5 * (highest - lowest) else None


def dropped(training: Training) -> Figure | None:
    """The share of pairs that the backward might leave out, and the share that it did, of all and of the sequences
    that lost most and least, in percent."""
    schedule, kept = training.series("drop"), training.series("kept_share")
    data = []
    if kept[0]:
        left_out = [100 * (1 - value) for value in kept[1]]
        data.append(line(kept[0], series.finite(left_out), _solid(BLUE), "left out", digits=2, width=3))
    if schedule[0]:
        planned = series.finite(100 * value for value in schedule[1])
        data.append(line(schedule[0], planned, Look(colour=NEUTRAL, dash="dash"), "drop in effect", digits=2))
    for column, name in (("min", "of the sequence that lost most"), ("max", "of the one that lost least")):
        steps, shares = training.series(f"sequence_kept_share_{column}")
        if steps:
            lost = series.finite(100 * (1 - value) for value in shares)
            data.append(line(steps, lost, _solid(PALE_BLUE), name, digits=2, width=1.5))
    for trace in data:
        trace["hovertemplate"] += " %"
    frame = layout("optimizer step", "pairs left out (%)", height=300)
    highest = max((value for trace in data for value in trace["y"] if value is not None), default=0)
    frame["yaxis"] |= {"range": [-0.02 * max(highest, 5), 1.1 * max(highest, 5)]}
    return {"data": data, "layout": frame} if data else None


def kept_importance(training: Training, limit: Limit | None) -> Figure | None:
    """The share of the sum of R that was kept: mean over layers and the layer with least, in percent; the guard's limit
    as a line where it is about this."""
    figure = _mean_and_worst(training, "kept_importance_share", "kept sum of R (%)", min, "layer that kept least", 100)
    if figure is not None:
        values = [value for trace in figure["data"] for value in trace["y"] if value is not None]
        bottom = min(values) - max(0.2, 0.08 * (100 - min(values)))
        if limit is not None and limit.column == "kept_importance_share":
            floor = 100 * (1 - limit.value)
            bottom = min(bottom, floor - 0.2)
            figure["layout"] |= limit_line(floor, f"limit {floor:g} %", LIMIT, below=True)
        figure["layout"]["yaxis"] |= {"range": [bottom, 100 + 0.03 * (100 - bottom)]}
    return figure


def variance(training: Training, limit: Limit | None) -> Figure | None:
    """V*/sum R: mean over layers and the layer with most; the guard's limit as a line where it is about this."""
    figure = _mean_and_worst(training, "variance_share", "V*/ΣR", max, "layer with most", 1)
    if figure is not None:
        highest = max(value for trace in figure["data"] for value in trace["y"] if value is not None)
        # A limit far above all values would flatten them.
        if limit is not None and limit.column == "variance_share" and limit.value <= 6 * max(highest, 1e-12):
            # Where the word is least likely to lie on a curve.
            ends = [value for trace in figure["data"] if (value := trace["y"][-1]) is not None]
            below = min(ends, default=0.0) > limit.value
            figure["layout"] |= limit_line(limit.value, f"limit {limit.value:g}", LIMIT, below=below)
            highest = max(highest, limit.value)
        figure["layout"]["yaxis"] |= {"range": [0, 1.12 * (highest or 1)]}
    return figure


def _mean_and_worst(
    training: Training, column: str, unit: str, worst_of: Callable[[Iterable[float]], float], name: str, scale: float
) -> Figure | None:
    steps, means = training.series(column)
    worst = [
        (point.step, worst_of(values))
        for point in training.points
        if (values := [layer.values[column] for layer in point.layers.values() if column in layer.values])
    ]
    if not steps:
        return None
    data = []
    if len(training.layer_names) > 1 and worst:
        scaled = series.finite(scale * value for _, value in worst)
        data.append(line([step for step, _ in worst], scaled, _solid(ORANGE), name, digits=4, width=1.5))
    data.append(line(steps, series.finite(scale * value for value in means), _solid(BLUE), "mean of layers", digits=4))
    if all(value is None for trace in data for value in trace["y"]):
        return None
    return {"data": data, "layout": layout("optimizer step", unit, height=300)}


def layer_map(
    training: Training,
    column: str,
    unit: str,
    *,
    limit: Limit | None = None,
    events: Sequence[GuardEvent] = (),
) -> Figure | None:
    """A share of every layer at every logged step; where the guard acted, a mark.

    Args:
        column: ``variance_share``, or ``kept_importance_share``, which is shown in percent.
        limit: the end of the colours' harmless half, where it is about this column.
        events: of the guard.
    """
    names = training.layer_names
    steps = [point.step for point in training.points if any(column in layer.values for layer in point.layers.values())]
    if not steps:
        return None
    by_layer = [dict(zip(*training.layer_series(name, column), strict=True)) for name in names]
    percents = column == "kept_importance_share"
    scale = 100.0 if percents else 1.0
    rows = [series.finite(scale * found.get(step, math.nan) for step in steps) for found in by_layer]
    known = [value for row in rows for value in row if value is not None]
    if not known:
        return None
    labels = short_layer_names(names)
    if percents:
        low, high, colours = min(*known, 99.0), 100.0, SEQUENCE
    else:
        low, colours = 0.0, ALARM
        high = 2 * limit.value if limit is not None and limit.column == column else max(known) or 1.0
    digits = 2 if percents else 4
    figure = heat_map(labels, steps, rows, unit=unit, colours=colours, low=low, high=high, digits=digits)
    if figure is None:
        return None
    if max(known) > high:
        figure["data"][0]["colorbar"] |= {"ticksuffix": "", "tickvals": [0, high / 2, high]}
        figure["data"][0]["colorbar"]["ticktext"] = ["0", f"{high / 2:g}", f"≥ {high:g}"]
    label_of = dict(zip(names, labels, strict=True))
    for kind, inside, edge in (("stopped", INK, PAPER), ("resumed", PAPER, INK)):
        marks = [event for event in events if event.kind == kind and event.layer in label_of][:MAX_MARKS]
        if marks:
            figure["data"].append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [event.step for event in marks],
                    "y": [escape(label_of[event.layer]) for event in marks],
                    "name": f"guard {kind}",
                    "marker": {
                        "symbol": "x" if kind == "stopped" else "circle",
                        "size": 9,
                        "color": inside,
                        "line": {"width": 1.5, "color": edge},
                    },
                    "hovertemplate": f"%{{y}}, step %{{x:,d}}<br>guard {kind}<extra></extra>",
                }
            )
    return figure


_PARTS = (("experts' forward", PALE), ("experts' backward", BLUE), ("the rest of the step", PALE_BLUE))


def step_bar(time: StepTime) -> Figure:
    """One median optimizer step in its three parts."""
    values = (time.forward, time.backward, time.rest)
    parts = [
        (name, colour, value, f"{duration(value / 1000)}, {percent(value / time.whole)}")
        for (name, colour), value in zip(_PARTS, values, strict=True)
    ]
    return stacked_bar(parts, "milliseconds of one optimizer step (median)")


def step_times(lines: Sequence[tuple[int, float, float, float]]) -> Figure | None:
    """The three parts of a step, stacked, over the run."""
    if len(lines) < 2:
        return None
    steps = [line[0] for line in lines]
    data = []
    cut = series.parts(len(steps), series.MAX_POINTS)
    for i, (name, colour) in enumerate(_PARTS, start=1):
        means = [series.mean(lines[j][i] for j in part) for part in cut]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "step",
                "x": [steps[part[-1]] for part in cut],
                "y": means,
                "name": escape(name),
                "line": {"width": 0.5, "color": colour},
                "fillcolor": colour,
                "hovertemplate": "%{y:,.1f} ms",
            }
        )
    return {"data": data, "layout": layout("optimizer step", "milliseconds a step", height=300)}


def saved_bar(moe: float, model: float | None) -> Figure:
    """Bytes that one microbatch's forward keeps for its backward, in MiB."""
    parts = [("MoE layers", BLUE, moe / 2**20, size(moe))]
    if model is not None and model >= moe:
        parts.append(("the rest of the model", PALE, (model - moe) / 2**20, size(model - moe)))
    return stacked_bar(parts, "MiB saved by one microbatch")


def rank_loads(training: Training) -> Figure | None:
    """Largest over mean rows of a rank: with every expert at home, and as planned, forward and backward."""
    curves = (
        ("home_max_over_mean", "every expert at home", Look(colour=NEUTRAL, dash="dash")),
        ("forward_max_over_mean", "forward, as planned", _solid(BLUE)),
        ("backward_max_over_mean", "backward, as planned", Look(colour=ORANGE, dash="dot")),
    )
    data = []
    for column, name, look in curves:
        steps, values = parallel_series(training, column)
        if steps:
            data.append(line(steps, series.finite(values), look, name, digits=3))
    if not data:
        return None
    return {"data": data, "layout": layout("optimizer step", "busiest rank / mean rank", height=300)}


def replicas(training: Training) -> Figure | None:
    """Copies of experts away from home, and the rows that they computed in percent of all."""
    steps, copies = parallel_series(training, "replicas")
    if not steps:
        return None
    data = [line(steps, series.finite(copies), _solid(GREEN), "copies of experts a layer", digits=2)]
    frame = layout("optimizer step", "copies of experts a layer", height=300)
    frame["yaxis"] |= {"rangemode": "tozero"}
    return {"data": data, "layout": frame}


def sent_bytes(training: Training) -> list[tuple[str, float]]:
    """Bytes that the logging rank sent in one optimizer step, by purpose, most first: means over the run."""
    totals: dict[str, float] = {}
    for point in training.points:
        for purpose, value in point.sent_bytes.items():
            if math.isfinite(value):
                totals[purpose] = totals.get(purpose, 0.0) + value
    last = training.points[-1].step if training.points else 0
    if last == 0:
        return []
    return sorted(((purpose, value / last) for purpose, value in totals.items()), key=lambda pair: -pair[1])


def load_spread(training: Training) -> Figure | None:
    """Load of the busiest expert over the mean of its layer: mean over layers and the most uneven layer."""
    figure = _mean_and_worst(
        training, "load_max_over_mean", "busiest expert / mean expert", max, "most uneven layer", 1
    )
    if figure is not None:
        highest = max(value for trace in figure["data"] for value in trace["y"] if value is not None)
        figure["layout"]["yaxis"] |= {"range": [0, 1.1 * highest]}
    return figure


def parallel_series(training: Training, column: str) -> tuple[list[int], list[float]]:
    """Steps and values of one number of ``parallel``, where it was logged."""
    found = [(point.step, point.parallel[column]) for point in training.points if column in point.parallel]
    return [step for step, _ in found], [value for _, value in found]
