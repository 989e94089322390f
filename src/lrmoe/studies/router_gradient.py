"""What a dropped pair still tells the router: exact, by the sum rule, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lrmoe.studies.grid import Comparison, GridStudy, Rows, gap, having, in_regimes, of, rate_figures, told
from lrmoe.studies.results import Figure
from lrmoe.studies.study_config import REGIMES, StudyConfig

KINDS = ("exact", "sum_rule", "kept")
RATES = (30, 50)


def comparisons(config: StudyConfig) -> list[Comparison]:
    """Each kind at each rate, sampled by pps."""
    return in_regimes(
        config, [f"C{rate} {kind}: drop={rate / 100} router_grad={kind}" for rate in RATES for kind in KINDS]
    )


def conclude(rows: Mapping[str, Rows]) -> tuple[list[str], list[str]]:
    """Which kind is worth its price, from the rows alone."""
    said, advice = [], []
    for name, table in rows.items():
        for rate in RATES:
            found = {kind: of(table, f"C{rate} {kind}") for kind in KINDS}
            each = ", ".join(f"{kind} {told(row)}" for kind, row in found.items() if row)
            said.append(f"At {rate} % {REGIMES[name]}: {each}.")
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
    return rate_figures(compared, rows, {kind: having(router_grad=kind) for kind in KINDS})


STUDY = GridStudy(
    name="router_gradient",
    title="What a dropped pair tells the router",
    question="Does the router need the gradient of pairs that are not computed, and is the sum rule good enough?",
    first=comparisons,
    conclude=conclude,
    figures=figures,
)
