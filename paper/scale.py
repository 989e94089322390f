"""Whether a drop costs less over more steps or with a larger batch: what small runs say of longer and wider ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lrmoe.studies.gap import student
from lrmoe.studies.grid import Comparison, GridStudy, Row, Rows, having, of, rate_figures, told
from lrmoe.studies.regimes import regime
from lrmoe.studies.results import Figure
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.variants import parse_variants
from paper import PROGRAM

VARIANTS = (
    "C0: drop=0",
    "C20 pps: drop=0.2",
    "C50 pps: drop=0.5",
    "C50 random: drop=0.5 selector=random",
)
FACTOR = 2
BASE = "as_is"
# By name: a title, and what is multiplied by FACTOR. The warm-up is a share of the steps, so it grows with them.
SCALES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    BASE: ("As the other studies", ()),
    "batch": ("Twice the batch", ("batch",)),
    "steps": ("Twice the steps", ("steps",)),
}


def comparisons(config: StudyConfig) -> list[Comparison]:
    """The same variants at each size."""
    variants = tuple(parse_variants(list(VARIANTS)))
    return [
        Comparison(
            regime=regime("scratch", replace(config, **{field: FACTOR * getattr(config, field) for field in grown})),
            name=name,
            title=title,
            variants=variants,
        )
        for name, (title, grown) in SCALES.items()
    ]


def conclude(rows: Mapping[str, Rows]) -> tuple[list[str], list[str]]:
    """What each size makes of the same drops."""
    said, advice = [], []
    for name, table in rows.items():
        each = ", ".join(f"{row['variant']} {told(row)}" for row in table[1:])
        said.append(f"{SCALES[name][0]}: no drop ends at {table[0]['loss']:.4f}; {each}.")
    for text in VARIANTS[1:]:
        variant = text.partition(":")[0]
        base = of(rows[BASE], variant)
        for name, table in rows.items():
            row = of(table, variant)
            if name == BASE or row is None or base is None or not _apart(row, base):
                continue
            what = "less" if row["difference"] < base["difference"] else "more"
            advice.append(f"{variant} costs {what} with {SCALES[name][0].lower()}: {told(row)} against {told(base)}.")
    if not advice:
        advice.append("No size here makes a drop cost more or less than its error lets one tell.")
    return said, advice


def _apart(row: Row, other: Row) -> bool:
    """Two differences of other runs, so not paired: apart where a t-test with the fewer of their degrees of freedom
    says so at 95 %."""
    if None in (row["error"], other["error"], row["difference"], other["difference"]):
        return False
    error = (row["error"] ** 2 + other["error"] ** 2) ** 0.5
    return bool(
        abs(row["difference"] - other["difference"]) > student(min(len(row["each"]), len(other["each"]))) * error
    )


def figures(compared: Sequence[Comparison], rows: Mapping[str, Rows]) -> list[Figure]:
    """One a size."""
    return rate_figures(compared, rows, {name: having(selector=name) for name in ("pps", "random")})


STUDY = GridStudy(
    name="scale",
    title="Longer runs and larger batches",
    question="Does a drop cost less over more steps or with a larger batch?",
    first=comparisons,
    conclude=conclude,
    figures=figures,
    has_regimes=False,
    program=PROGRAM,
)
