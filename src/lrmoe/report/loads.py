"""The load heat map: tokens routed to every expert of every layer, by step and over the whole run.

The figure itself is drawn in the page, which holds the counts and shows the step its slider stands on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from lrmoe.evenness import max_over_mean
from lrmoe.report.binary import counts
from lrmoe.report.charts import Figure, axis, clipped, layout
from lrmoe.report.run_folder import Point, Training
from lrmoe.report.text import escape, short_layer_names

# Counts kept in a page, over all trainings: a page stays below a few MB beside plotly itself.
MAX_COUNTS = 400_000
MAX_FRAMES = 60


def load_maps(trainings: list[Training]) -> list[dict[str, Any]]:
    """One object for each training that logged loads, JSON-able::

    {"variant": str, "seed": int,         # variant escaped
     "layers": [str], "names": [str],     # short and whole names, escaped; short ones cut for the side of a chart
     "steps": [int],                      # of the frames
     "widths": [int],                     # experts of each layer
     "frames": {"dtype": str, "bdata": str},  # frame by frame, layer by layer, pairs of each expert since the log
                                          # before (0 where not logged), see lrmoe.report.binary.counts
     "total": [[int]],                    # layer, expert: pairs over all logged steps
     "top": float,                        # the largest load over its layer's mean, in any frame and in total
     "logged": int}                       # logged steps, of which the frames are an even choice
    """
    loaded = [(training, _points(training)) for training in trainings]
    loaded = [(training, points) for training, points in loaded if points]
    maps = []
    for training, points in loaded:
        names = [name for name in training.layer_names if any(_load(point, name) for point in points)]
        widths = {name: max(len(_load(point, name)) for point in points) for name in names}
        a_frame = sum(widths.values())
        frames = max(2, min(MAX_FRAMES, MAX_COUNTS // (len(loaded) * max(1, a_frame))))
        chosen = _evenly(points, frames)
        shown: list[list[Sequence[int]]] = [[_load(point, name) for name in names] for point in chosen]
        total: list[Sequence[int]] = [_total(points, name, widths[name]) for name in names]
        flat = array("q")
        for row in shown:
            for name, load in zip(names, row, strict=True):
                flat.extend(load)
                flat.extend([0] * (widths[name] - len(load)))
        maps.append(
            {
                "variant": escape(training.variant),
                "seed": training.seed,
                "layers": [escape(clipped(name)) for name in short_layer_names(names)],
                "names": [escape(name) for name in names],
                "steps": [point.step for point in chosen],
                "widths": list(widths.values()),
                "frames": counts(flat),
                "total": total,
                "top": max(max_over_mean(load) or 0.0 for layers in [*shown, total] for load in layers),
                "logged": len(points),
            }
        )
    return maps


def load_frame() -> Figure:
    """The layout that the script of the page completes."""
    frame = layout("", "", hovermode="closest", margin={"l": 8, "r": 12, "t": 8, "b": 52})
    return frame | {
        "xaxis": axis("", showgrid=False, zeroline=False),
        "yaxis": axis("", showgrid=False, zeroline=False),
    }


def _points(training: Training) -> list[Point]:
    return [point for point in training.points if any(layer.load for layer in point.layers.values())]


def _load(point: Point, name: str) -> Sequence[int]:
    layer = point.layers.get(name)
    return [] if layer is None or layer.load is None else layer.load


def _total(points: list[Point], name: str, width: int) -> list[int]:
    total = [0] * width
    for point in points:
        load = _load(point, name)
        total = [a + b for a, b in zip(total, [*load, *[0] * (width - len(load))], strict=True)]
    return total


def _evenly(points: list[Point], count: int) -> list[Point]:
    """At most ``count`` points, the first and the last among them."""
    if len(points) <= count:
        return points
    return [points[round(i * (len(points) - 1) / (count - 1))] for i in range(count)]
