"""Figures of a study as plotly reads them: lines or points with the seeds' extremes, and a band to judge them by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lrmoe.report import palette
from lrmoe.report.charts import layout
from lrmoe.report.text import escape
from lrmoe.studies.results import Figure, Series

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "cross", "star")
_BASE = ("no drop", "drop=0", "drop 0", "dense", "fixed", "c0")


def colours(one: Figure) -> list[str]:
    """A colour a series: grey for the one that the others are held against, where its name says so."""
    chosen, cycle = [], 0
    for series in one.series:
        if series.name.strip().lower() in _BASE:
            chosen.append(palette.NEUTRAL)
        else:
            chosen.append(palette.SERIES[cycle % len(palette.SERIES)])
            cycle += 1
    return chosen


def key(one: Figure) -> list[tuple[str, str]]:
    """What the colours are, the band among them; nothing for one series without a band."""
    entries = [(colour, series.name) for colour, series in zip(colours(one), one.series, strict=True)]
    if len(entries) == 1 and one.band is None:
        return []
    return entries + ([(palette.PALE, one.band_label or "shaded range")] if one.band is not None else [])


def figure(one: Figure) -> dict[str, Any] | None:
    """The figure; None if no value of it can be drawn."""
    data = []
    cycle = dict.fromkeys((*palette.SERIES, palette.NEUTRAL), 0)
    offset = _offsets(one)
    for position, (colour, series) in enumerate(zip(colours(one), one.series, strict=True)):
        order = cycle[colour]
        cycle[colour] += 1
        y = [_drawable(value, one.log_y) for value in series.y]
        x = [value if isinstance(value, str) else _drawable(value, one.log_x) for value in series.x]
        shown = [a if b is not None else None for a, b in zip(y, x, strict=True)]
        if all(value is None for value in shown):
            continue
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": _mode(series, len(shown)),
            "x": [escape(value) if isinstance(value, str) else value for value in x],
            "y": shown,
            "name": escape(series.name),
            "line": {"color": colour, "width": 2, "dash": _DASHES[order % len(_DASHES)]},
            "marker": {
                "color": colour,
                "size": 7 if series.kind == "line" else 9,
                "symbol": _SYMBOLS[(position if series.kind == "points" else order) % len(_SYMBOLS)],
            },
            "hovertemplate": f"{escape(series.name)}<br>%{{y:.5~g}} at %{{x}}<extra></extra>",
        }
        bars = _bars(series, shown, one.log_y)
        if bars is not None:
            trace["error_y"] = {**bars, "color": palette.translucent(colour, 0.55), "thickness": 1.4, "width": 4}
        nudge = _nudge(one) * (position - (len(one.series) - 1) / 2)
        if nudge:
            # Bars of several series at one place are drawn side by side; what is told is the value itself.
            trace["text"] = [f"{value:.5g}" if isinstance(value, (int, float)) else None for value in x]
            trace["x"] = [value + nudge if isinstance(value, (int, float)) else value for value in x]
            trace["hovertemplate"] = f"{escape(series.name)}<br>%{{y:.5~g}} at %{{text}}<extra></extra>"
        if offset is not None:
            # Points of one category side by side, so that their bars can be told apart.
            trace["x"], trace["text"] = offset.places(position, series), [escape(value) for value in series.x]
            trace["hovertemplate"] = f"{escape(series.name)}<br>%{{y:.5~g}}, %{{text}}<extra></extra>"
        data.append(trace)
    if not data:
        return None
    return {"data": data, "layout": _frame(one, offset)}


def left_out(one: Figure) -> int:
    """Values that were given and cannot be drawn."""
    return sum(
        value is not None and _drawable(value, one.log_y) is None for series in one.series for value in series.y
    ) + sum(
        not isinstance(value, str) and _drawable(value, one.log_x) is None
        for series in one.series
        for value in series.x
    )


def _nudge(one: Figure) -> float:
    """How far series lie apart on a linear axis whose points have bars, else 0: a hundredth of its range, and all
    together no more than three, since a place on such an axis is a number."""
    barred = [series for series in one.series if series.low is not None and series.high is not None]
    values = [v for series in barred for v in series.x if not isinstance(v, str) and math.isfinite(v)]
    if one.log_x or len(barred) < 2 or len(values) != sum(len(series.x) for series in barred):
        return 0.0
    apart = min(0.01, 0.03 / (len(one.series) - 1))
    return apart * ((max(values) - min(values)) or abs(values[0]))


class _Offsets:
    """Categories as whole numbers, with the series of one category next to each other."""

    def __init__(self, categories: list[str], count: int) -> None:
        self.categories = categories
        self.step = 0.0 if count < 2 else min(0.12, 0.6 / (count - 1))
        self.middle = (count - 1) / 2

    def places(self, position: int, series: Series) -> list[float]:
        shift = (position - self.middle) * self.step
        return [self.categories.index(str(value)) + shift for value in series.x]


def _offsets(one: Figure) -> _Offsets | None:
    values = [value for series in one.series for value in series.x]
    if not values or not all(isinstance(value, str) for value in values):
        return None
    return _Offsets(list(dict.fromkeys(map(str, values))), len(one.series))


def _mode(series: Series, count: int) -> str:
    if series.kind == "points":
        return "markers"
    return "lines+markers" if count <= 40 else "lines"


def _drawable(value: float | None, log: bool) -> float | None:
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return value


def _bars(series: Series, y: Sequence[float | None], log: bool) -> dict[str, Any] | None:
    """From each point down to the lowest and up to the highest seed."""
    if series.low is None or series.high is None:
        return None
    down, up = [], []
    for value, low, high in zip(y, series.low, series.high, strict=True):
        drawn = _drawable(low, log), _drawable(high, log)
        down.append(0.0 if value is None or drawn[0] is None else max(0.0, value - drawn[0]))
        up.append(0.0 if value is None or drawn[1] is None else max(0.0, drawn[1] - value))
    if not any(down) and not any(up):
        return None
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down}


def _frame(one: Figure, offset: _Offsets | None) -> dict[str, Any]:
    frame = layout(_broken(one.x_label, 38), escape(one.y_label), hovermode="closest", height=340)
    frame["xaxis"] |= {"rangemode": "normal", "tickformat": ",~g"}
    frame["yaxis"] |= {"tickformat": ",~g", "zeroline": True, "zerolinecolor": palette.ZERO}
    if offset is not None:
        count = len(offset.categories)
        del frame["xaxis"]["tickformat"]
        frame["xaxis"] |= {
            "tickvals": list(range(count)),
            "ticktext": [_broken(name) for name in offset.categories],
            "range": [-0.5, count - 0.5],
            "showgrid": False,
        }
    if one.log_x and offset is None:
        frame["xaxis"] |= {"type": "log", "dtick": 1} if _decades(one) > 1.5 else {"type": "log"}
    places = {value for series in one.series for value in series.x}
    if _nudge(one) and len(places) == 1:
        # One place, drawn side by side: an axis of its own choice would magnify that.
        place = float(places.pop())
        frame["xaxis"] |= {"range": [place - 0.15 * abs(place), place + 0.15 * abs(place)]}
    if one.log_y:
        frame["yaxis"] |= {"type": "log"}
    if one.band is not None and all(math.isfinite(end) for end in one.band):
        low, high = sorted(one.band)
        frame["shapes"] = [
            {
                "type": "rect",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": low,
                "y1": high,
                "layer": "below",
                "line": {"width": 0},
                "fillcolor": palette.translucent(palette.PALE, 0.35),
            }
        ]
    return frame


def _decades(one: Figure) -> float:
    values = [v for series in one.series for v in series.x if not isinstance(v, str) and _drawable(v, True) is not None]
    return math.log10(max(values) / min(values)) if values else 0.0


def _broken(name: str, most: int = 14) -> str:
    """A name over two lines where it is longer than ``most`` signs, so that a phone shows it whole."""
    words = name.split()
    if len(name) <= most or len(words) < 2:
        return escape(name)
    cut = min(range(1, len(words)), key=lambda i: abs(len(" ".join(words[:i])) - len(" ".join(words[i:]))))
    return f"{escape(' '.join(words[:cut]))}<br>{escape(' '.join(words[cut:]))}"
