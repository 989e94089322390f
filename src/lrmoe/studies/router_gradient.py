"""What a dropped pair still tells the router: exact, by the sum rule, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lrmoe.studies.grid import Comparison, GridStudy, Row, Rows, gap, of, rate_figure, told
from lrmoe.studies.regimes import regime
from lrmoe.studies.results import Figure
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.variants import parse_variants

KINDS = ("exact", "sum_rule", "kept")
RATES = (30, 50)


def comparisons(config: StudyConfig) -> list[Comparison]:
    """Each kind at each rate, sampled by pps."""
    variants = ["C0: drop=0"] + [
        f"C{rate} {kind}: drop={rate / 100} router_grad={kind}" for rate in RATES for kind in KINDS
    ]
    return [
        Comparison(regime=regime(name, config), variants=tuple(parse_variants(variants)))
        for name in config.regimes or ("scratch",)
    ]


def conclude(rows: Mapping[str, Rows]) -> tuple[list[str], list[str]]:
    """Which kind is worth its price, from the rows alone."""
    said, advice = [], []
    for name, table in rows.items():
        for rate in RATES:
            found = {kind: of(table, f"C{rate} {kind}") for kind in KINDS}
            each = ", ".join(f"{kind} {told(row)}" for kind, row in found.items() if row)
            said.append(f"At {rate} % ({name.replace('_', ' ')}): {each}.")
            behind = gap(found["sum_rule"], found["exact"])
            if behind is None:
                continue
            if behind.sign > 0:
                advice.append(f'At {rate} % set router_grad="exact": the sum rule costs {behind} more.')
            else:
                advice.append(
                    f"At {rate} % stay with the sum rule, the default: against the exact gradient it ends {behind}, "
                    "which is not told from nothing."
                    if behind.sign == 0
                    else f"At {rate} % stay with the sum rule, the default: it ends {behind} from the exact gradient."
                )
    return said, advice


def figures(compared: Sequence[Comparison], rows: Mapping[str, Rows]) -> list[Figure]:
    """A line a kind, a point a rate."""

    def of_kind(kind: str) -> Callable[[Row], bool]:
        return lambda row: row["router_grad"] == kind

    groups = {kind: of_kind(kind) for kind in KINDS}
    return [rate_figure(c, rows[c.name], groups) for c in compared]


STUDY = GridStudy(
    name="router_gradient",
    title="What a dropped pair tells the router",
    question="Does the router need the gradient of pairs that are not computed, and is the sum rule good enough?",
    first=comparisons,
    conclude=conclude,
    figures=figures,
)
