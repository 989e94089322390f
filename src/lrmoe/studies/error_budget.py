"""A budget for the error against a fixed rate that drops as much in the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lrmoe.studies.grid import BASELINE, Comparison, GridStudy, Row, Rows, gap, of, rate_figure, told
from lrmoe.studies.regimes import regime
from lrmoe.studies.results import Figure
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.variants import Variant

TAUS = (0.01, 0.03, 0.1)
# The budget decides; the rate only bounds what a single expert may leave out.
CEILING = 0.8


def _budget(tau: float) -> Variant:
    return Variant(name=f"tau {tau:g}", settings={"drop": CEILING, "error_budget": tau})


def _rate(tau: float) -> str:
    return f"as much as tau {tau:g}"


def comparisons(config: StudyConfig) -> list[Comparison]:
    """The budgets, beside no drop."""
    base = Variant(name=BASELINE, settings={"drop": 0})
    variants = (base, *map(_budget, TAUS))
    return [Comparison(regime=regime(name, config), variants=variants) for name in config.regimes or ("scratch",)]


def fixed_rates(config: StudyConfig, rows: Mapping[str, Rows]) -> list[Comparison]:
    """For each budget the rate at which as many pairs are dropped over the whole run; the largest also at random."""
    found = []
    for comparison in comparisons(config):
        variants = [comparison.variants[0]]
        for tau in TAUS:
            row = of(rows[comparison.name], f"tau {tau:g}")
            if row is None or row["kept_share"] is None:
                continue
            # The share is of the whole run, the rate holds after the warm-up alone.
            dropping = 1 - row["warmup_steps"] / comparison.regime.train.steps
            rate = round((1 - row["kept_share"]) / dropping, 3)
            if rate > 0:
                variants.append(Variant(name=_rate(tau), settings={"drop": rate}))
                if tau == TAUS[-1]:
                    variants.append(
                        Variant(name=f"{_rate(tau)}, random", settings={"drop": rate, "selector": "random"})
                    )
        found.append(
            Comparison(
                regime=comparison.regime,
                variants=tuple(variants),
                name=f"{comparison.name}_fixed",
                title=f"{comparison.title}, the same mean drop at a fixed rate",
            )
        )
    return found


def conclude(rows: Mapping[str, Rows]) -> tuple[list[str], list[str]]:
    """Whether the budget does better with the same work, from the rows alone."""
    said: list[str] = []
    ahead: list[str] = []
    behind: list[str] = []
    even: list[str] = []
    for name, table in rows.items():
        if name.endswith("_fixed"):
            continue
        for tau in TAUS:
            budget, rate = of(table, f"tau {tau:g}"), of(rows.get(f"{name}_fixed", []), _rate(tau))
            if budget is None:
                continue
            dropped = 100 * (1 - budget["kept_share"])
            said.append(
                f"tau {tau:g} drops {dropped:.1f} % of the pairs in the mean and costs {told(budget)}"
                + (f"; a fixed rate that drops as much costs {told(rate)}." if rate else ".")
            )
            beyond = gap(budget, rate)
            if beyond is not None:
                (ahead if beyond.sign < 0 else behind if beyond.sign > 0 else even).append(f"{tau:g} ({beyond})")
    advice = []
    if ahead:
        advice.append(f"A budget loses less than a fixed rate with the same work at tau {', '.join(ahead)}.")
    if behind:
        advice.append(f"A fixed rate loses less than the budget at tau {', '.join(behind)}.")
    if even:
        advice.append(f"Budget and rate cannot be told apart at tau {', '.join(even)}: choose by what you want to fix.")
    return said, advice


def figures(compared: Sequence[Comparison], rows: Mapping[str, Rows]) -> list[Figure]:
    """Budgets and rates over what they dropped."""
    found = []
    for comparison in compared:
        fixed = rows.get(f"{comparison.name}_fixed")
        if fixed is None:
            continue
        both = [*rows[comparison.name], *fixed[1:]]
        groups: dict[str, Callable[[Row], bool]] = {
            "error budget": lambda row: row["error_budget"] is not None,
            "fixed rate": lambda row: row["error_budget"] is None and row["selector"] == "pps",
            "fixed rate, random choice": lambda row: row["selector"] == "random",
        }
        found.append(rate_figure(comparison, both, groups))
    return found


STUDY = GridStudy(
    name="error_budget",
    title="A budget for the error, or a fixed rate",
    question="With the same number of pairs dropped in the mean, is it better to fix the error or the rate?",
    first=comparisons,
    then=fixed_rates,
    conclude=conclude,
    figures=figures,
)
