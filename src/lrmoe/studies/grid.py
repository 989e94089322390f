"""Comparisons of variants within regimes: what a convergence study is made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lrmoe.studies.cells import Cell
from lrmoe.studies.compare_table import make_rows
from lrmoe.studies.gap import Gap, gap_of
from lrmoe.studies.regimes import Regime, regime
from lrmoe.studies.results import Column, Figure, Series, Table
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.variants import Variant, parse_variants
from lrmoe.training.summary import LAST_STEPS

Row = dict[str, Any]
Rows = list[Row]
BASELINE = "C0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Variants against no drop, from the same weights on the same data in the same order.

    Attributes:
        name: unique in the study; letters, digits, dashes, underscores.
        title: what is compared where; default: the regime's.
        variants: the first is :data:`BASELINE`, at drop 0.
        changes: fields of the regime's ``train`` that all these runs change.
    """

    regime: Regime
    variants: tuple[Variant, ...]
    name: str = ""
    title: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.regime.name)
        object.__setattr__(self, "title", self.title or self.regime.title)

    def cells(self, seeds: Sequence[int]) -> dict[str, list[Cell]]:
        """The runs of each variant, a seed each."""
        return {
            v.name: [self.regime.cell(v.config(self.regime.recalibration), seed, **self.changes) for seed in seeds]
            for v in self.variants
        }

    def rows(self, store: Path, seeds: Sequence[int]) -> Rows:
        """One row a variant, of finished runs: see :func:`add_verdict`."""
        summaries = {name: [cell.summary(store) for cell in cells] for name, cells in self.cells(seeds).items()}
        rows = make_rows(summaries, BASELINE)
        settings = {v.name: v.config(self.regime.recalibration) for v in self.variants}
        for row in rows:
            config = settings[row["variant"]]
            row |= {key: getattr(config, key) for key in ("drop", "selector", "metric", "quota", "router_grad")}
            row |= {key: getattr(config, key) for key in ("error_budget", "warmup_steps", "final_dense_steps")}
            row |= {key: getattr(config, key) for key in ("guard_variance", "remainder")}
        return [add_verdict(row, rows[0], self.regime.loss) for row in rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class GridStudy:
    """A study that is a set of comparisons.

    Attributes:
        first: the comparisons.
        then: further ones that depend on the rows of the first, by their names; default none.
        conclude: plain sentences, and advice, from the rows of all comparisons.
        figures: from the same.
        has_regimes: the comparisons are made in the regimes that a user asks for; else the study has its own.
        program: what is typed before the study's name to carry it out.
    """

    name: str
    title: str
    question: str
    first: Callable[[StudyConfig], list[Comparison]]
    conclude: Callable[[Mapping[str, Rows]], tuple[list[str], list[str]]]
    then: Callable[[StudyConfig, Mapping[str, Rows]], list[Comparison]] = lambda config, rows: []
    figures: Callable[[Sequence[Comparison], Mapping[str, Rows]], list[Figure]]
    has_regimes: bool = True
    program: str = "lrmoe study"


def add_verdict(row: Row, base: Row, loss: str) -> Row:
    """The row with what is said of it.

    ``loss`` and ``difference`` are those that count in the regime, ``each`` the difference of each seed, ``low`` and
    ``high`` their extremes, ``error`` the standard error of their mean (of paired runs), ``spread`` the range of the
    seeds without a drop and ``spreads`` the difference in units of it. ``verdict`` is ``within the spread`` for a
    difference no larger than the spread, else ``worse`` or ``better``; ``one seed`` where there is no spread.
    """
    each = [value for value in row[f"{loss}_differences"] if value is not None]
    spread, mean = base[f"{loss}_spread"], row[f"{loss}_difference"]
    row |= {"loss": row[loss], "difference": mean, "each": each, "spread": spread}
    row |= {"low": min(each, default=None), "high": max(each, default=None)}
    known = len(each) > 1 and all(map(math.isfinite, each))
    row["error"] = statistics.stdev(each) / math.sqrt(len(each)) if known else None
    row["spreads"] = mean / spread if spread and mean is not None else None
    row["verdict"] = verdict(mean, spread) if row["variant"] != BASELINE else ""
    row["each_text"] = ", ".join(f"{value:+.4f}" for value in each)
    return row


def verdict(difference: float | None, spread: float | None) -> str:
    """In words, what a mean difference is beside the range of the seeds."""
    if difference is None or spread is None:
        return "one seed" if difference is not None else "no loss"
    if not math.isfinite(difference):
        return "diverged"
    return "within the spread" if abs(difference) <= spread else ("worse" if difference > 0 else "better")


def table(comparison: Comparison, rows: Rows) -> Table:
    """The comparison as it is shown."""
    last = min(LAST_STEPS, comparison.regime.train.steps)
    kind = "validation loss" if comparison.regime.loss == "eval_loss" else f"training loss, last {last} steps"
    columns = (
        Column(key="variant", label="variant", form="text"),
        Column(key="loss", label=f"{kind}, nats a token", form="4"),
        Column(key="difference", label="minus no drop", form="+4", meaning="mean of the seeds' paired differences"),
        Column(key="each_text", label="each seed", form="text"),
        Column(key="error", label="± standard error", form="4", meaning="of the mean of the paired differences"),
        Column(key="verdict", label="beside the seed spread", form="text"),
        Column(key="kept_share", label="kept pairs", form="percent"),
        Column(key="kept_importance_share", label="kept ΣR", form="percent"),
        Column(key="variance_share", label="V*/ΣR", form="4", meaning="least variance of an unbiased choice, over ΣR"),
        Column(key="load_max_over_mean", label="load max/mean", form="2"),
    )
    spread = rows[0]["spread"]
    told = "One seed shows no spread." if spread is None else f"The seeds of no drop lie {spread:.4f} apart."
    return Table(
        name=comparison.name,
        title=comparison.title,
        settings={**comparison.regime.settings, **comparison.changes},
        columns=columns,
        rows=rows,
        note=f"{told} Losses in nats per token; differences are paired: same weights, same data in the same order.",
    )


def rate_figure(comparison: Comparison, rows: Rows, groups: Mapping[str, Callable[[Row], bool]]) -> Figure:
    """Difference over the share of pairs that was dropped, a series a group."""
    series = []
    for name, belongs in groups.items():
        points = sorted((row for row in rows[1:] if belongs(row)), key=lambda row: row["kept_share"], reverse=True)
        if points:
            series.append(difference_series(name, [100 * (1 - row["kept_share"]) for row in points], points))
    spread = rows[0]["spread"]
    return Figure(
        name=comparison.name,
        title=f"{comparison.title}: loss above no drop",
        reading="Each point is the mean over seeds of one variant, its bar reaches from the lowest to the highest "
        "seed. Inside the shaded band a difference is no larger than what the seeds of no drop differ by.",
        x_label="pairs left out over the whole run, %",
        y_label="loss minus no drop, nats a token",
        series=series,
        band=None if spread is None else (-spread, spread),
        band_label="seed spread of no drop",
    )


def difference_series(name: str, x: Sequence[float | str], points: Rows) -> Series:
    """The rows' differences to no drop at ``x``, each with a bar from its lowest to its highest seed."""
    return Series(
        name=name,
        x=x,
        y=[row["difference"] for row in points],
        low=[row["low"] for row in points],
        high=[row["high"] for row in points],
    )


def rate_figures(
    compared: Sequence[Comparison], rows: Mapping[str, Rows], groups: Mapping[str, Callable[[Row], bool]]
) -> list[Figure]:
    """:func:`rate_figure` of each comparison."""
    return [rate_figure(comparison, rows[comparison.name], groups) for comparison in compared]


def having(**values: Any) -> Callable[[Row], bool]:
    """Tells the rows with these settings."""
    return lambda row: all(row[key] == value for key, value in values.items())


def in_regimes(config: StudyConfig, variants: Sequence[str], default: Sequence[str] = ("scratch",)) -> list[Comparison]:
    """The same variants, as a user writes them, in each regime that was asked for."""
    parsed = tuple(parse_variants([f"{BASELINE}: drop=0", *variants]))
    return [Comparison(regime=regime(name, config), variants=parsed) for name in config.regimes or default]


def of(rows: Rows, name: str) -> Row | None:
    """The row of a variant, or None where it was not run."""
    return next((row for row in rows if row["variant"] == name), None)


def known(rows: Rows) -> Rows:
    """The rows with a finite difference: a run that diverged has no place in an order."""
    return [row for row in rows if row["difference"] is not None and math.isfinite(row["difference"])]


def gap(row: Row | None, other: Row | None) -> Gap | None:
    """What ``row`` loses beyond ``other``, seed by seed; None where one of them was not run or has no finite loss."""
    if row is None or other is None or not row["each"] or len(row["each"]) != len(other["each"]):
        return None
    return gap_of([mine - its for mine, its in zip(row["each"], other["each"], strict=True)])


def told(row: Row) -> str:
    """A difference as a sentence has it."""
    mean = row["difference"]
    if mean is None or not math.isfinite(mean):
        return "no finite loss"
    error = "" if row["error"] is None else f" ± {row['error']:.4f}"
    return f"{mean:+.4f}{error}"
