"""Which pairs to keep: metric and selector, by rate and regime, beside a random choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lrmoe.studies.grid import Comparison, GridStudy, Rows, having, known, of, rate_figures, told
from lrmoe.studies.regimes import regime
from lrmoe.studies.results import Figure
from lrmoe.studies.study_config import REGIMES, StudyConfig
from lrmoe.studies.variants import parse_variants

# All regimes, and what only one of them can tell.
_EVERYWHERE = (
    "C0: drop=0",
    "C20 pps: drop=0.2",
    "C20 random: drop=0.2 selector=random",
    "C20 auto: drop=0.2 selector=auto",
    "C20 topq: drop=0.2 selector=topq",
    "C20 topq grad_norm: drop=0.2 selector=topq metric=grad_norm",
    "C20 topq abs_grad: drop=0.2 selector=topq metric=abs_grad",
    "C20 topq random: drop=0.2 selector=topq metric=random",
    "C50 pps: drop=0.5",
    "C50 random: drop=0.5 selector=random",
    "C50 topq: drop=0.5 selector=topq",
)
# How far a run is moved by a change that cannot matter: a pair in a thousand.
FLOOR = "C0.1 random"
_FROM_SCRATCH = (
    f"{FLOOR}: drop=0.001 selector=random",
    "C30 pps: drop=0.3",
    "C30 random: drop=0.3 selector=random",
    "C50 pps grad_norm: drop=0.5 metric=grad_norm",
)


def comparisons(config: StudyConfig) -> list[Comparison]:
    """One a regime."""
    chosen = config.regimes or tuple(REGIMES)
    return [
        Comparison(
            regime=regime(name, config),
            variants=tuple(parse_variants([*_EVERYWHERE, *(_FROM_SCRATCH if name == "scratch" else ())])),
        )
        for name in chosen
    ]


def conclude(rows: Mapping[str, Rows]) -> tuple[list[str], list[str]]:
    """What holds where, from the rows alone."""
    said: list[str] = []
    safe: list[tuple[str, str]] = []
    unsafe: list[tuple[str, str]] = []
    unknown: list[tuple[str, str]] = []
    for name, table in rows.items():
        where = REGIMES[name]
        base = table[0]
        spread = base["spread"]
        around = "" if spread is None else f", where the seeds of no drop lie {spread:.4f} apart"
        pps, random, topq = (of(table, f"C20 {selector}") for selector in ("pps", "random", "topq"))
        if not (pps and random and topq):
            continue
        said.append(
            f"{where.capitalize()} (loss {base['loss']:.3f}{around}), 20 % dropped costs {told(pps)} with pps, "
            f"{told(random)} with random and {told(topq)} with topq."
        )
        half, half_random = of(table, "C50 pps"), of(table, "C50 random")
        if half and half_random:
            said.append(f"At 50 % {where}: pps {told(half)}, random {told(half_random)}.")
        biased = [row for row in known(table) if row["selector"] == "topq" and row["drop"] == 0.2]
        floor = of(table, FLOOR)
        if floor and floor["error"] is not None:
            furthest = max(map(abs, floor["each"]))
            said.append(
                f"One pair in a thousand left out, which cannot matter, moves the seeds {where} by up to "
                f"{furthest:.4f} and their mean by {told(floor)}: smaller differences are not to be read."
            )
        order = sorted(biased, key=lambda row: row["difference"])
        names = ", ".join(f"{row['metric']} {row['difference']:+.4f}" for row in order)
        said.append(f"The metric under topq at 20 % {where}, best first: {names}.")
        for row in table[1:]:
            if row["metric"] == "lrm" and row["selector"] in ("pps", "topq"):
                told_of = {"within the spread": safe, "better": safe, "one seed": unknown}
                told_of.get(row["verdict"], unsafe).append((row["variant"], where))
    advice = []
    if unknown:
        advice.append(
            f"Choose nothing by one seed, which shows no spread to hold a difference against: {_listed(unknown)}. "
            "Run --seeds 0,1,2."
        )
    if safe:
        seeds = min(len(row["each"]) for table in rows.values() for row in table[1:])
        few = ": two seeds make it a rough one, so add a third before you rely on it" if seeds == 2 else ""
        advice.append(f"Not above the spread of the seeds here: {_listed(safe)}{few}.")
    if unsafe:
        advice.append(f"Do not use, unless your own runs say otherwise: {_listed(unsafe)}.")
    return said, advice


def _listed(found: Sequence[tuple[str, str]]) -> str:
    places: dict[str, list[str]] = {}
    for name, where in found:
        places.setdefault(name, []).append(where)
    return "; ".join(f"{name} {' and '.join(where)}" for name, where in places.items())


def figures(compared: Sequence[Comparison], rows: Mapping[str, Rows]) -> list[Figure]:
    """One a regime: a line a selector, a point a rate."""
    groups = {
        "pps": having(selector="pps", metric="lrm"),
        "random": having(selector="random"),
        "auto": having(selector="auto"),
        "topq (the paper's)": having(selector="topq", metric="lrm"),
        "topq, gradient norm": having(selector="topq", metric="grad_norm"),
        "topq, random choice": having(selector="topq", metric="random"),
    }
    return rate_figures(compared, rows, groups)


STUDY = GridStudy(
    name="ablation",
    title="Which pairs to keep",
    question="Does the loss hold when a part of the backward is left out, and does it matter which part?",
    first=comparisons,
    conclude=conclude,
    figures=figures,
)
