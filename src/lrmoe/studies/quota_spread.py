"""How a drop is spread over experts: the same share each, from the busiest, or pooled by relative score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lrmoe.studies.grid import Comparison, GridStudy, Rows, gap, having, in_regimes, of, rate_figures, told
from lrmoe.studies.results import Figure
from lrmoe.studies.study_config import REGIMES, StudyConfig

KINDS = ("expert", "level", "pooled")
RATES = (20, 50)


def comparisons(config: StudyConfig) -> list[Comparison]:
    """Each kind at each rate, sampled by pps, and the even split chosen at random."""
    variants = [f"C{rate} {kind}: drop={rate / 100} quota={kind}" for rate in RATES for kind in KINDS]
    variants += [f"C{rate} expert random: drop={rate / 100} selector=random" for rate in RATES]
    return in_regimes(config, variants)


def conclude(rows: Mapping[str, Rows]) -> tuple[list[str], list[str]]:
    """Which split loses least, and whether the difference is more than noise."""
    said, advice = [], []
    for name, table in rows.items():
        for rate in RATES:
            found = {kind: row for kind in KINDS if (row := of(table, f"C{rate} {kind}"))}
            each = ", ".join(f"{kind} {told(row)} (V*/ΣR {row['variance_share']:.4f})" for kind, row in found.items())
            said.append(f"At {rate} % {REGIMES[name]}: {each}.")
            for kind in KINDS[1:]:
                beyond = gap(found.get(kind), found.get("expert"))
                if beyond is not None and beyond.sign:
                    what = "costs more than" if beyond.sign > 0 else "loses less than"
                    advice.append(f'At {rate} % quota="{kind}" {what} "expert": {beyond}.')
    if not advice:
        advice.append('Leave quota="expert", the default: no other split is told from it.')
    return said, advice


def figures(compared: Sequence[Comparison], rows: Mapping[str, Rows]) -> list[Figure]:
    """A line a kind, a point a rate."""
    groups = {kind: having(quota=kind, selector="pps") for kind in KINDS}
    return rate_figures(compared, rows, {**groups, "expert, random choice": having(selector="random")})


STUDY = GridStudy(
    name="quota",
    title="How a drop is spread over experts",
    question="Should every expert give up the same share, or those that can best spare it?",
    first=comparisons,
    conclude=conclude,
    figures=figures,
)
