"""Whether the conclusions hold under the recipes people train with: accumulation, bfloat16, checkpointing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lrmoe.studies.grid import Comparison, GridStudy, Rows, gap, having, of, rate_figures, told
from lrmoe.studies.regimes import regime
from lrmoe.studies.results import Figure
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.variants import parse_variants
from paper import PROGRAM

VARIANTS = (
    "C0: drop=0",
    "C20 pps: drop=0.2",
    "C20 random: drop=0.2 selector=random",
    "C20 topq: drop=0.2 selector=topq",
)
PLAIN = "float32"


def recipes(batch: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: a title, and what the recipe changes in the training."""
    found: dict[str, tuple[str, dict[str, Any]]] = {
        PLAIN: ("float32, one microbatch a step", {}),
        "bf16": ("bfloat16 autocast over float32 weights", {"bf16": True}),
        "checkpointing": ("activation checkpointing of each block", {"gradient_checkpointing": True}),
    }
    if batch % 4 == 0:
        # As many tokens a step, so that only the accumulation differs.
        found["accumulation"] = ("four microbatches a step", {"grad_accum": 4, "batch": batch // 4})
    return found


def comparisons(config: StudyConfig) -> list[Comparison]:
    """The same variants under each recipe, over half the steps: what is compared are the recipes with each other."""
    place = regime("scratch", replace(config, steps=max(20, config.steps // 2)))
    return [
        Comparison(
            regime=place, name=name, title=title, changes=changes, variants=tuple(parse_variants(list(VARIANTS)))
        )
        for name, (title, changes) in recipes(config.batch).items()
    ]


def conclude(rows: Mapping[str, Rows]) -> tuple[list[str], list[str]]:
    """Whether each recipe tells the selectors apart as plain float32 does."""
    said, advice = [], []
    same: list[str] = []
    unknown: list[str] = []
    plain = rows[PLAIN]
    for name, table in rows.items():
        each = ", ".join(f"{row['variant']} {told(row)}" for row in table[1:])
        said.append(f"{name}: no drop ends at {table[0]['loss']:.4f}; {each}.")
        if name == PLAIN:
            continue
        equal = all(row["loss"] == other["loss"] for row, other in zip(table, plain, strict=True))
        if equal:
            said.append(f"{name} gives the losses of {PLAIN} to the last digit: a recomputed forward draws alike.")
        differing = [
            f"{row['variant']} is “{row['verdict']}”, with {PLAIN} “{mine['verdict']}”"
            for row in table[1:]
            if (mine := of(plain, row["variant"])) and row["verdict"] != mine["verdict"]
        ]
        differing += _turned(table, plain)
        if any(row["verdict"] == "one seed" for row in (*table[1:], *plain[1:])):
            unknown.append(name)
        elif differing:
            advice.append(f"{name} differs: {'; '.join(differing)}.")
        else:
            same.append(name)
    if unknown:
        advice.append(
            f"Carry nothing over to {', '.join(unknown)}: one seed tells no variants apart. Run --seeds 0,1,2."
        )
    if same:
        advice.insert(
            0,
            f"What is said of {PLAIN} can be used with {', '.join(same)}: same verdicts, and no two variants that both "
            "tell apart are the other way round.",
        )
    return said, advice


def _turned(table: Rows, plain: Rows) -> list[str]:
    """Pairs of variants that both tables tell apart, in different order."""
    found = []
    for mine, its in itertools.combinations(table[1:], 2):
        here = gap(mine, its)
        there = gap(of(plain, mine["variant"]), of(plain, its["variant"]))
        if here is not None and there is not None and here.sign * there.sign < 0:
            found.append(f"{mine['variant']} ends {here} from {its['variant']}, with {PLAIN} {there}")
    return found


def figures(compared: Sequence[Comparison], rows: Mapping[str, Rows]) -> list[Figure]:
    """One a recipe: three points."""
    names = [text.partition(":")[0] for text in VARIANTS[1:]]
    return rate_figures(compared, rows, {name: having(variant=name) for name in names})


STUDY = GridStudy(
    name="recipes",
    title="Under the recipes people train with",
    question="Do gradient accumulation, bfloat16 and activation checkpointing change what a drop costs?",
    first=comparisons,
    conclude=conclude,
    figures=figures,
    has_regimes=False,
    program=PROGRAM,
)
