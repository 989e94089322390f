"""When to drop: from the first step, after a warm-up, with a ramp, with a dense tail, or as the guard lets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lrmoe.config import LRMoEConfig
from lrmoe.studies.grid import Comparison, GridStudy, Row, Rows, gap, known, of, rate_figures, told
from lrmoe.studies.regimes import regime
from lrmoe.studies.results import Figure
from lrmoe.studies.study_config import REGIMES, StudyConfig
from lrmoe.studies.variants import parse_variants

RATES = (20, 50)
# A row a schedule: name, and its phases as shares of the run.
SCHEDULES: dict[str, dict[str, float]] = {
    "from the start": {},
    "warm-up": {"warmup_steps": 0.15},
    "long warm-up": {"warmup_steps": 0.3},
    "ramp": {"ramp_steps": 0.3},
    "dense tail": {"final_dense_steps": 0.15},
    "warm-up and tail": {"warmup_steps": 0.15, "final_dense_steps": 0.15},
}


def comparisons(config: StudyConfig) -> list[Comparison]:
    """Each schedule at each rate, sampled by pps; the warm-up also for a random choice."""
    found = []
    for name in config.regimes or ("scratch",):
        place = regime(name, replace(config, warmup=0.0))
        steps = place.train.steps
        variants = ["C0: drop=0"]
        for rate in RATES:
            for schedule, phases in SCHEDULES.items():
                settings = " ".join(f"{field}={max(1, round(share * steps))}" for field, share in phases.items())
                # Half the schedules at the low rate: what helps there is at most what it costs.
                if rate == RATES[0] and schedule not in ("from the start", "warm-up"):
                    continue
                variants.append(f"C{rate} {schedule}: drop={rate / 100} {settings}")
            warm = max(1, round(0.15 * steps))
            variants.append(f"C{rate} random, warm-up: drop={rate / 100} selector=random warmup_steps={warm}")
        # What a user has who sets nothing but the drop: layers decide for themselves when to begin.
        limit = LRMoEConfig().guard_variance
        variants += [f"C{rate} guard: drop={rate / 100} guard_variance={limit}" for rate in RATES]
        variants.append(
            f"C50 warm-up, exact router: drop=0.5 warmup_steps={max(1, round(0.15 * steps))} router_grad=exact"
        )
        found.append(Comparison(regime=place, variants=tuple(parse_variants(variants))))
    return found


def conclude(rows: Mapping[str, Rows]) -> tuple[list[str], list[str]]:
    """What each schedule brings, and the best of them."""
    said, advice = [], []
    for name, table in rows.items():
        for rate in RATES:
            found = [row for row in table if row["variant"].startswith(f"C{rate} ") and row["difference"] is not None]
            each = "; ".join(
                f"{row['variant'].partition(' ')[2]} {told(row)} ({100 * (1 - row['kept_share']):.0f} % dropped)"
                for row in found
            )
            said.append(f"At {rate} % {REGIMES[name]}: {each}.")
            plain = of(table, f"C{rate} from the start")
            # Neither what the guard holds back nor another gradient of the router is a schedule of this rate.
            sampled = [
                row
                for row in known(found)
                if row["selector"] == "pps"
                and row["guard_variance"] is None
                and not row["variant"].endswith("exact router")
            ]
            if plain is None or not sampled:
                continue
            # By what is to be expected at worst: of few seeds one that does well by luck has a large error.
            best = min(sampled, key=_at_worst)
            if best is plain:
                advice.append(f"At {rate} % no schedule does better than dropping from the start.")
                continue
            behind = gap(plain, best)
            if behind is None:
                continue
            name_of_best = best["variant"].partition(" ")[2]
            if behind.sign:
                advice.append(
                    f"At {rate} % “{name_of_best}” loses least, its error counted in ({told(best)}); dropping from the "
                    f"start costs {behind} more."
                )
            else:
                said.append(
                    f"At {rate} % “{name_of_best}” comes out lowest, its error counted in, but dropping from the start "
                    f"costs {behind} more, which {_seeds(behind.seeds)} not tell from nothing."
                )
                advice.append(
                    f"At {rate} % choose no schedule by this study: none is told from dropping from the start. Run "
                    "more seeds, or longer."
                )
    return said, advice


def _seeds(count: int) -> str:
    return "one seed does" if count == 1 else f"{count} seeds do"


def _at_worst(row: Row) -> float:
    return float(row["difference"] + (row["error"] or 0.0))


def figures(compared: Sequence[Comparison], rows: Mapping[str, Rows]) -> list[Figure]:
    """A point a schedule, over what it dropped in all."""

    def called(name: str) -> Callable[[Row], bool]:
        return lambda row: row["variant"].partition(" ")[2] == name

    names = [*SCHEDULES, "guard", "warm-up, exact router", "random, warm-up"]
    return rate_figures(compared, rows, {name: called(name) for name in names})


STUDY = GridStudy(
    name="schedule",
    title="When to drop",
    question="Does it pay to leave the beginning or the end of training alone?",
    first=comparisons,
    conclude=conclude,
    figures=figures,
)
