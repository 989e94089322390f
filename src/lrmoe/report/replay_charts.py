"""Figures of the balancing page: how even the ranks are from step to step, and where the modelled time goes."""

from __future__ import annotations

from lrmoe.evenness import max_over_mean
from lrmoe.report.charts import Figure, axis, layout
from lrmoe.report.palette import MUTED, PALE
from lrmoe.report.replay_data import Played
from lrmoe.report.text import escape

COLOURS = {
    "fixed": MUTED,
    "ultraep": "#c8500a",
    "lrmoe": "#0067b1",
    "symi": "#8a3b94",
    "laer": "#0f7b55",
    "flexmoe": "#b8860b",
    "smartmoe": "#c2335a",
    "fastermoe": "#3f6f8f",
    "eplb": "#6b6f1f",
}
PARTS = (
    ("compute", "computing", "#6f87a6"),
    ("tokens", "rows to other ranks", "#a9b4c4"),
    ("copies", "copies around layers", "#e08a3c"),
    ("step", "around the optimizer step", "#8a3b94"),
)


def evenness(played: Played, drop: float) -> Figure | None:
    """Largest over mean forward rows of a rank, mean over a step's layers and microbatches, a line a policy. Fixed
    ownership, LRMoE and the most even policy stand out; the others are thin and pale, so that a reader sees through."""
    data = []
    curves = _curves(played, drop)
    bold = _bold(curves)
    # What stands out is drawn last, on top.
    for label in sorted(curves, key=lambda one: one in bold):
        steps, values = curves[label]
        system, stands_out = played.of(label, drop)["system"], label in bold
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if stands_out and len(values) <= 60 else "lines",
                "x": steps,
                "y": values,
                "name": escape(label),
                "line": {
                    "color": COLOURS.get(system, MUTED) if stands_out else PALE,
                    "width": 2.5 if stands_out else 1.2,
                    "dash": "dash" if system == "fixed" else "solid",
                },
                "marker": {"size": 4},
                "hovertemplate": f"{escape(label)}: %{{y:.3f}}<extra></extra>",
            }
        )
    if not data:
        return None
    return {"data": data, "layout": layout("optimizer step", "busiest rank’s rows over the mean (×)", height=360)}


def evenness_key(played: Played, drop: float) -> list[tuple[str, str]]:
    """What the colours of :func:`evenness` are."""
    curves = _curves(played, drop)
    bold = _bold(curves)
    entries = [
        (COLOURS.get(played.of(label, drop)["system"], MUTED), label + (" (dashed)" if label == "fixed" else ""))
        for label in curves
        if label in bold
    ]
    others = [label for label in curves if label not in bold]
    return entries + ([(PALE, ", ".join(others))] if others else [])


def _curves(played: Played, drop: float) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of every policy that ran."""
    found = {}
    for label in played.labels:
        by_step: dict[int, list[float]] = {}
        for line in played.lines.get((label, drop), []):
            ratio = max_over_mean(line["rows"])
            # A record without rows is neither even nor uneven.
            if ratio is not None:
                by_step.setdefault(line["step"], []).append(ratio)
        if by_step:
            found[label] = list(by_step), [round(sum(each) / len(each), 4) for each in by_step.values()]
    return found


def _bold(curves: dict[str, tuple[list[int], list[float]]]) -> set[str]:
    """Fixed ownership, LRMoE as it is without options, and whichever of the rest is the most even."""
    rest = [label for label in curves if label not in ("fixed", "lrmoe")]
    best = min(rest, key=lambda label: sum(curves[label][1]) / len(curves[label][1]), default=None)
    return {label for label in curves if label in ("fixed", "lrmoe", best)}


def time_bars(played: Played) -> Figure | None:
    """Modelled milliseconds of all MoE layers in a step, a stacked bar a policy and drop."""
    records = [record for record in played.records if record["reason"] is None]
    if not records:
        return None
    names = [escape(record["policy"] + (f", {record['drop']:.0%}" if record["drop"] else "")) for record in records]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": [round(record["time_ms"][part], 4) for record in records],
            "name": title,
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}<br>{title}: %{{x:,.3~g}} ms a step<extra></extra>",
        }
        for part, title, colour in PARTS
    ]
    frame = layout("modelled time of a step (ms)", "", hovermode="closest", barmode="stack", bargap=0.25)
    frame["height"] = 90 + 26 * len(names)
    frame["xaxis"] |= {"tickformat": ",~r"}
    frame["yaxis"] |= {"autorange": "reversed", "type": "category", "ticksuffix": " "}
    return {"data": data, "layout": frame}


def panel_frame() -> Figure:
    """The layout of one policy's bars; the page's script fills in ranges and the mean."""
    frame = layout("", "", hovermode="x unified", barmode="overlay", height=150)
    frame["margin"] = {"l": 8, "r": 8, "t": 6, "b": 8}
    frame["xaxis"] = axis("", showgrid=False, zeroline=False, fixedrange=True, tickfont={"size": 11, "color": MUTED})
    frame["yaxis"] = axis("", fixedrange=True, nticks=4, tickformat="~s", tickfont={"size": 11, "color": MUTED})
    for name in ("xaxis", "yaxis"):  # An empty title takes room, too.
        del frame[name]["title"]
    return frame
