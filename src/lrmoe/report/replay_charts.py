"""Figures of the balancing page: how even the ranks are from step to step, and where the modelled time goes."""

from __future__ import annotations

from lrmoe.report.charts import Figure, axis, layout
from lrmoe.report.replay_data import Line, Played
from lrmoe.report.text import escape

COLOURS = {
    "fixed": "#525c6b",
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
    """Largest over mean forward rows of a rank, mean over a step's layers and microbatches, a line a policy."""
    data = []
    for label in played.labels:
        lines = played.lines.get((label, drop), [])
        if not lines:
            continue
        by_step: dict[int, list[float]] = {}
        for line in lines:
            by_step.setdefault(line["step"], []).append(_max_over_mean(line))
        values = [round(sum(each) / len(each), 4) for each in by_step.values()]
        system = played.of(label, drop)["system"]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(values) <= 60 else "lines",
                "x": list(by_step),
                "y": values,
                "name": escape(label),
                "line": {
                    "color": COLOURS.get(system, "#525c6b"),
                    "width": 2,
                    "dash": "dash" if system == "fixed" else "solid",
                },
                "marker": {"size": 4},
                "hovertemplate": "%{y:.3f}",
            }
        )
    if not data:
        return None
    frame = layout("optimizer step", "busiest rank / mean", height=360)
    return {"data": data, "layout": frame}


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
    frame = layout("milliseconds a step", "", hovermode="closest", barmode="stack", bargap=0.25)
    frame["height"] = 90 + 26 * len(names)
    frame["xaxis"] |= {"tickformat": ",~r"}
    frame["yaxis"] |= {"autorange": "reversed", "type": "category", "ticksuffix": " "}
    return {"data": data, "layout": frame}


def panel_frame() -> Figure:
    """The layout of one policy's bars; the page's script fills in ranges and the mean."""
    frame = layout("", "", hovermode="x unified", barmode="overlay", height=150)
    frame["margin"] = {"l": 8, "r": 8, "t": 6, "b": 8}
    frame["xaxis"] = axis(
        "", showgrid=False, zeroline=False, fixedrange=True, tickfont={"size": 11, "color": "#525c6b"}
    )
    frame["yaxis"] = axis("", fixedrange=True, nticks=4, tickformat="~s", tickfont={"size": 11, "color": "#525c6b"})
    for name in ("xaxis", "yaxis"):  # An empty title takes room, too.
        del frame[name]["title"]
    return frame


def _max_over_mean(line: Line) -> float:
    rows = line["rows"]
    return max(rows) * len(rows) / sum(rows) if any(rows) else 1.0
