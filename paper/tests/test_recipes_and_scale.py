"""The studies of recipes and of sizes: what they compare, and what they conclude from rows that are made up."""

from __future__ import annotations

import math

from study_rows import made_up, rows_of

from lrmoe.studies.grid import BASELINE
from lrmoe.studies.study_config import StudyConfig
from paper import recipes, scale


def test_every_study_compares_with_no_drop_and_a_random_choice() -> None:
    for study in (recipes.STUDY, scale.STUDY):
        compared = study.first(StudyConfig())
        names = [comparison.name for comparison in compared]
        assert len(set(names)) == len(names)
        for comparison in compared:
            assert comparison.variants[0].name == BASELINE
            assert any(v.settings.get("selector") == "random" for v in comparison.variants)
            for (cell,) in comparison.cells((0,)).values():
                assert cell.config.recalibration.guard_variance is None
                assert cell.config.recalibration.guard_tail is None


def test_a_recipe_is_not_compared_by_a_run_that_diverged() -> None:
    table = made_up({"C20 pps": [0.3, 0.3], "C20 random": [math.nan, 0.1], "C20 topq": [0.2, 0.2]}, [2.0, 2.1])
    other = made_up({"C20 pps": [0.1, 0.1], "C20 random": [0.2, 0.2], "C20 topq": [0.5, 0.5]}, [2.0, 2.1])
    said, advice = recipes.conclude({recipes.PLAIN: table, "bf16": other})
    assert "C20 random no finite loss" in said[0]
    assert "C20 random is “worse”, with float32 “diverged”" in advice[0]


def test_a_recipe_that_turns_two_variants_round_is_named() -> None:
    plain = made_up({"C20 pps": [0.0, 0.0], "C20 random": [0.1, 0.1], "C20 topq": [0.5, 0.5]}, [2.0, 2.2])
    other = made_up({"C20 pps": [0.2, 0.2], "C20 random": [0.1, 0.1], "C20 topq": [0.5, 0.5]}, [2.0, 2.2])
    noisy = made_up({"C20 pps": [0.0, 0.2], "C20 random": [0.1, 0.0], "C20 topq": [0.5, 0.5]}, [2.0, 2.2])
    tables = {recipes.PLAIN: plain, "bf16": other, "checkpointing": plain, "accumulation": noisy}
    said, advice = recipes.conclude(tables)
    assert "can be used with checkpointing, accumulation: " in advice[0]
    assert advice[1].startswith("bf16 differs: C20 pps ends +0.1000 ± 0.0000 from C20 random, with float32 -0.1000")
    assert any("to the last digit" in sentence for sentence in said)
    worse = made_up({"C20 pps": [0.3, 0.3], "C20 random": [0.4, 0.4], "C20 topq": [0.5, 0.5]}, [2.0, 2.2])
    _, advice = recipes.conclude({recipes.PLAIN: plain, "bf16": worse})
    assert advice == [
        "bf16 differs: C20 pps is “worse”, with float32 “within the spread”; "
        "C20 random is “worse”, with float32 “within the spread”."
    ]


def test_a_size_that_changes_what_a_drop_costs_is_named() -> None:
    config = StudyConfig(steps=100)
    by_name = {comparison.name: comparison.cells((0,)) for comparison in scale.comparisons(config)}
    base, batch, steps = (by_name[name]["C20 pps"][0].config for name in (scale.BASE, "batch", "steps"))
    assert (batch.batch, steps.steps) == (2 * base.batch, 2 * base.steps)
    assert steps.recalibration.warmup_steps == 2 * base.recalibration.warmup_steps
    names = {"C20 pps": [0.0, 0.02, 0.01], "C50 pps": [0.1, 0.12, 0.11], "C50 random": [0.3, 0.32, 0.31]}
    base_losses = [2.0, 2.1, 2.05]
    plain, cheap = made_up(names, base_losses), made_up({**names, "C50 pps": [0.01, 0.03, 0.02]}, base_losses)
    said, advice = scale.conclude({scale.BASE: plain, "batch": cheap, "steps": plain})
    assert len(said) == 3
    assert advice == ["C50 pps costs less with twice the batch: +0.0200 ± 0.0058 against +0.1100 ± 0.0058."]
    _, advice = scale.conclude({scale.BASE: plain, "batch": plain, "steps": plain})
    assert advice == ["No size here makes a drop cost more or less than its error lets one tell."]


def test_w7_one_seed_carries_nothing_over() -> None:
    one = rows_of({f"C20 {name}": [0.01] for name in ("pps", "random", "topq")})
    _, advised = recipes.conclude({"float32": one, "bf16": one})
    assert not any("can be used with" in sentence for sentence in advised)
    same = rows_of({f"C20 {name}": [0.01, 0.0, 0.02] for name in ("pps", "random", "topq")})
    _, advised = recipes.conclude({"float32": same, "bf16": same})
    assert any("can be used with" in sentence for sentence in advised)


def test_w7_two_seeds_tell_no_sizes_apart() -> None:
    names = [text.partition(":")[0] for text in scale.VARIANTS[1:]]
    sizes = list(scale.SCALES)
    other = next(name for name in sizes if name != scale.BASE)
    rows = {
        scale.BASE: rows_of({name: [0.010, 0.012] for name in names}),
        other: rows_of({name: [0.020, 0.022] for name in names}),
    }
    _, advised = scale.conclude(rows)
    assert not any("costs" in sentence and "against" in sentence for sentence in advised)
