"""Charts of an index: validation loss against kept pairs and against MoE time, among runs of the same thing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lrmoe.report import palette
from lrmoe.report.charts import Figure, layout
from lrmoe.report.index_entry import Entry, Result
from lrmoe.report.text import escape
from lrmoe.report.verdicts import Verdict, advice, finite_differences

COLOURS = (palette.NEUTRAL, *palette.SERIES)
# As plotly names them, and as text for the key above a chart.
SYMBOLS = (("circle", "●"), ("square", "■"), ("diamond", "◆"), ("triangle-up", "▲"), ("triangle-down", "▼"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Trainings of one model on one text for the same number of steps, with their results by setting."""

    kind: str
    entries: tuple[Entry, ...]

    @property
    def settings(self) -> dict[str, list[Result]]:
        """Results by recalibration, no drop first, then by mean loss."""
        found: dict[str, list[Result]] = {}
        for entry in self.entries:
            for result in entry.results:
                found.setdefault(result.setting, []).append(result)
        return dict(sorted(found.items(), key=lambda item: (item[0] != "no drop", _mean(item[1]))))

    @property
    def results(self) -> int:
        return sum(len(entry.results) for entry in self.entries)

    @property
    def seconds(self) -> dict[str, float]:
        """Mean MoE seconds a step by setting, among the runs whose times can be compared."""
        found: dict[str, list[float]] = {}
        for entry in self.timed:
            for result in entry.results:
                if result.moe_seconds is not None:
                    found.setdefault(result.setting, []).append(result.moe_seconds)
        return {setting: math.fsum(values) / len(values) for setting, values in found.items()}

    @property
    def timed(self) -> tuple[Entry, ...]:
        """The entries whose times are of the same threads, ranks and versions: those that most results have."""
        count = Counter[str]()
        for entry in self.entries:
            count[entry.timed_alike] += sum(result.moe_seconds is not None for result in entry.results)
        alike = count.most_common(1)[0][0]
        return tuple(entry for entry in self.entries if entry.timed_alike == alike)

    def advice(self) -> list[str]:
        """What to do, from the results of seeds that both a setting and no drop have; plain text."""
        settings = self.settings
        if "no drop" not in settings or len(settings) < 2:
            return []
        base = _by_seed(settings["no drop"])
        spread = max(base.values()) - min(base.values()) if len(base) > 1 else None
        verdicts = []
        for setting, results in settings.items():
            mine = _by_seed(results)
            shared = [seed for seed in mine if seed in base]
            if setting == "no drop" or not shared:
                continue
            differences = finite_differences([mine[seed] for seed in shared], [base[seed] for seed in shared])
            one_seed = None if len(shared) == 1 else spread
            verdicts.append(
                Verdict(name=setting, differences=differences, spread=one_seed, seconds=self.seconds.get(setting))
            )
        return advice(verdicts, "no drop", self.seconds.get("no drop")) if verdicts else []


def group(entries: Sequence[Entry]) -> list[Group]:
    """Entries with results, grouped by what makes losses comparable; the largest groups first."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.results:
            found.setdefault(entry.alike, []).append(entry)
    groups = [Group(kind=members[0].kind, entries=tuple(members)) for members in found.values()]
    return sorted(groups, key=lambda one: (-one.results, one.kind))


def key(settings: Sequence[str]) -> list[tuple[str, str, str]]:
    """Colour, sign and words of each setting."""
    return [(_colour(i), SYMBOLS[i % len(SYMBOLS)][1], setting) for i, setting in enumerate(settings)]


def against_kept(one: Group) -> Figure | None:
    """Validation loss against the share of pairs whose backward was computed."""
    return _scatter(one, one.entries, "kept pairs (%)", lambda r: None if r.kept_share is None else 100 * r.kept_share)


def against_time(one: Group) -> Figure | None:
    """Validation loss against the time of the MoE layers in a step."""
    return _scatter(
        one, one.timed, "MoE layers (ms a step)", lambda r: None if r.moe_seconds is None else 1000 * r.moe_seconds
    )


def _scatter(one: Group, entries: Sequence[Entry], title: str, x_of: Callable[[Result], float | None]) -> Figure | None:
    data = []
    places: set[float] = set()
    for i, setting in enumerate(one.settings):
        results = [result for entry in entries for result in entry.results if result.setting == setting]
        known = [(x, result) for result in results if (x := x_of(result)) is not None and math.isfinite(x)]
        if not known:
            continue
        places |= {round(x, 3) for x, _ in known}
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [round(x, 4) for x, _ in known],
                "y": [result.loss for _, result in known],
                "name": escape(setting),
                "text": [f"seed {result.seed}" if result.seed is not None else "" for _, result in known],
                "marker": {"color": _colour(i), "size": 10, "symbol": SYMBOLS[i % len(SYMBOLS)][0], "opacity": 0.85},
                "hovertemplate": f"{escape(setting)}, %{{text}}<br>%{{y:.4f}} nats at %{{x:,.4~g}}<extra></extra>",
            }
        )
    # Points that are all at one place of x show nothing about x.
    if sum(len(trace["x"]) for trace in data) < 2 or len(places) < 2:
        return None
    frame = layout(title, "validation loss (nats per token)", hovermode="closest")
    frame["xaxis"] |= {"rangemode": "normal", "tickformat": ",~g"}
    return {"data": data, "layout": frame}


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _by_seed(results: Sequence[Result]) -> dict[int | None, float]:
    """Mean loss of each seed: a setting may have been run twice with one."""
    found: dict[int | None, list[float]] = {}
    for result in results:
        found.setdefault(result.seed, []).append(result.loss)
    return {seed: math.fsum(values) / len(values) for seed, values in found.items()}


def _mean(results: Sequence[Result]) -> float:
    return math.fsum(result.loss for result in results) / len(results)
