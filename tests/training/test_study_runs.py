"""Studies made of comparisons: their rows, verdicts and conclusions, and a whole one at a tiny size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_rows import made_up

from lrmoe import cli
from lrmoe.studies import ablation, error_budget, remainder, router_gradient, schedules
from lrmoe.studies.catalog import CATALOG
from lrmoe.studies.grid import BASELINE, Rows, gap, rate_figure, verdict
from lrmoe.studies.regimes import regime
from lrmoe.studies.results import Column, Table, markdown, show
from lrmoe.studies.study_config import NAMES, REGIMES, StudyConfig
from lrmoe.studies.study_run import STUDIES, command
from lrmoe.training.config import TrainConfig


def test_a_difference_is_held_against_the_range_of_the_seeds() -> None:
    rows = made_up({"near": [0.01, 0.03], "far": [0.2, 0.1], "better": [-0.2, -0.1]}, [2.0, 2.05])
    near, far, better = rows[1:]
    assert [near["verdict"], far["verdict"], better["verdict"]] == ["within the spread", "worse", "better"]
    assert near["difference"] == pytest.approx(0.02)
    assert (near["low"], near["high"]) == (0.01, 0.03)
    assert near["error"] == pytest.approx(0.01)
    assert near["spreads"] == pytest.approx(0.4)
    assert rows[0]["verdict"] == ""


@pytest.mark.parametrize(
    ("difference", "spread", "words"),
    [(0.1, None, "one seed"), (None, 0.1, "no loss"), (math.nan, 0.1, "diverged"), (0.1, 0.1, "within the spread")],
)
def test_what_cannot_be_told_is_said(difference: float | None, spread: float | None, words: str) -> None:
    assert verdict(difference, spread) == words


def test_the_command_line_knows_every_study() -> None:
    assert set(NAMES) == set(CATALOG)


def test_every_study_compares_with_no_drop_and_a_random_choice() -> None:
    config = StudyConfig()
    for study in STUDIES.values():
        compared = study.first(config)
        names = [comparison.name for comparison in compared]
        assert len(set(names)) == len(names)
        for comparison in compared:
            assert comparison.variants[0].name == BASELINE
            for name, (cell,) in comparison.cells((0,)).items():
                recalibration = cell.config.recalibration
                assert (recalibration.guard_variance is None) != name.endswith("guard")
                assert recalibration.guard_tail is None
    for name in ("ablation", "quota", "schedule", "remainder"):
        for comparison in STUDIES[name].first(config):
            assert any(v.settings.get("selector") == "random" for v in comparison.variants)


def test_regimes_go_on_from_the_same_exact_run() -> None:
    config = StudyConfig()
    scratch, zero, tuned = (regime(name, config) for name in REGIMES)
    exact = scratch.cell(scratch.train.recalibration, seed=1)
    for later in (zero, tuned):
        start = later.cell(later.train.recalibration, seed=1).start
        assert start is not None
        assert start.key == exact.key
    assert zero.loss == "train_loss"
    assert zero.train.memorize_bytes == config.memorize_bytes


def test_from_scratch_there_is_a_warm_up_unless_the_study_is_about_it() -> None:
    config = StudyConfig(steps=100, warmup=0.2)
    place = regime("scratch", config)
    for name, steps in (("router_gradient", {20}), ("schedule", {0, 15, 30})):
        (comparison,) = STUDIES[name].first(config)
        cells = [cell for (cell,) in comparison.cells((0,)).values()]
        assert {c.config.recalibration.warmup_steps for c in cells if c.config.recalibration.drop} == steps
        # Without a drop it is one run for all, whatever the schedule says.
        assert cells[0].key == place.cell(place.train.recalibration, 0).key
    (tuned,) = STUDIES["ablation"].first(StudyConfig(regimes=("fine_tune",)))
    assert tuned.cells((0,))["C20 pps"][0].config.recalibration.warmup_steps == 0


def test_budget_is_held_against_the_rate_it_came_to() -> None:
    config = StudyConfig()
    rows = made_up({f"tau {tau:g}": [0.01, 0.02] for tau in error_budget.TAUS}, [2.0, 2.05])
    (fixed,) = error_budget.fixed_rates(config, {"scratch": rows})
    # 20 % of all pairs, of which the first 90 of 600 steps leave out none.
    assert [v.settings["drop"] for v in fixed.variants[1:]] == [0.235] * (len(error_budget.TAUS) + 1)
    assert fixed.variants[-1].settings["selector"] == "random"
    worse = made_up({f"as much as tau {tau:g}": [0.11, 0.12] for tau in error_budget.TAUS}, [2.0, 2.05])
    said, advice = error_budget.conclude({"scratch": rows, "scratch_fixed": worse})
    assert len(said) == len(error_budget.TAUS)
    assert "budget loses less" in advice[0]
    said, advice = error_budget.conclude({"scratch": worse_named(rows, worse), "scratch_fixed": equal_named(rows)})
    assert "fixed rate loses less" in advice[0]


def worse_named(rows: Rows, worse: Rows) -> Rows:
    return [{**bad, "variant": row["variant"]} for row, bad in zip(rows, worse, strict=True)]


def equal_named(rows: Rows) -> Rows:
    return [{**row, "variant": "as much as " + row["variant"]} for row in rows]


def test_the_exact_router_gradient_is_advised_only_where_it_pays() -> None:
    names = {f"C{rate} {kind}": [0.01, 0.02] for rate in (30, 50) for kind in router_gradient.KINDS}
    _, advice = router_gradient.conclude({"scratch": made_up(names, [2.0, 2.1])})
    assert all("stay with the sum rule" in sentence for sentence in advice)
    names["C50 sum_rule"] = [0.31, 0.32]
    _, advice = router_gradient.conclude({"scratch": made_up(names, [2.0, 2.1])})
    assert 'At 50 % set router_grad="exact"' in advice[1]
    assert "stay with the sum rule" in advice[0]


def test_the_best_schedule_is_named_with_its_margin() -> None:
    names = {"C20 from the start": [0.05, 0.05], "C20 warm-up": [0.01, 0.01], "C20 random, warm-up": [0.0, 0.0]}
    _, advice = schedules.conclude({"scratch": made_up(names, [2.0, 2.1])})
    assert "“warm-up” loses least, its error counted in (+0.0100 ± 0.0000)" in advice[0]
    assert "dropping from the start costs +0.0400 ± 0.0000 more." in advice[0]
    lucky = {"C20 from the start": [0.05, 0.05], "C20 dense tail": [-0.1, 0.1], "C20 warm-up": [0.01, 0.01]}
    _, advice = schedules.conclude({"scratch": made_up(lucky, [2.0, 2.1])})
    assert "“warm-up” loses least" in advice[0]
    _, advice = schedules.conclude(
        {"scratch": made_up({"C20 from the start": [0.0, 0.0], "C20 warm-up": [0.1, 0.1]}, [2, 2])}
    )
    assert advice == ["At 20 % no schedule does better than dropping from the start."]


def test_a_schedule_is_not_praised_for_what_is_none_nor_beside_a_run_that_diverged() -> None:
    names = {"C50 from the start": [0.05, 0.05], "C50 warm-up": [0.03, 0.03], "C50 warm-up, exact router": [0.0, 0.0]}
    _, advice = schedules.conclude({"scratch": made_up(names, [2.0, 2.1])})
    assert "“warm-up” loses least" in advice[0]
    names["C50 from the start"] = [math.nan, math.nan]
    said, advice = schedules.conclude({"scratch": made_up(names, [2.0, 2.1])})
    assert "from the start no finite loss" in said[1]
    assert not any("no schedule does better" in sentence for sentence in advice)


def test_the_smallest_change_that_cannot_matter_says_what_is_not_to_be_read() -> None:
    names = {"C20 pps": [0.0, 0.1], "C20 random": [0.1, 0.1], "C20 topq": [0.5, 0.5], ablation.FLOOR: [0.01, -0.03]}
    said, _ = ablation.conclude({"scratch": made_up(names, [2.0, 2.1])})
    assert any("up to 0.0300 and their mean by -0.0100 ± 0.0200" in sentence for sentence in said)
    del names[ablation.FLOOR]
    said, _ = ablation.conclude({"scratch": made_up(names, [2.0, 2.1])})
    assert not any("in a thousand" in sentence for sentence in said)


def test_a_row_of_means_is_held_against_the_same_without_it() -> None:
    names = {f"C50 {recipe}": [0.03, 0.04] for recipe in remainder.RECIPES}
    said, advice = remainder.conclude({"scratch": made_up(names, [2.0, 2.1])})
    assert len(said) == 1 + len(remainder.PAIRS)
    assert "nothing here is told" in advice[0]
    names["C50 remainder, exact router"] = [0.01, 0.02]
    _, advice = remainder.conclude({"scratch": made_up(names, [2.0, 2.1])})
    assert advice[0].startswith('At 50 % remainder="mean" with router_grad="exact" loses less: -0.0200')
    assert advice[1].startswith('At 50 % quota="pooled" beside both costs more: +0.0200')
    (comparison,) = remainder.comparisons(StudyConfig())
    settings = comparison.variants[-2].settings
    assert (settings["remainder"], settings["router_grad"], settings["quota"]) == ("mean", "exact", "pooled")


def test_the_figure_has_a_point_a_rate_and_the_seed_spread_as_its_band() -> None:
    config = StudyConfig()
    comparison = STUDIES["ablation"].first(config)[0]
    rows = made_up({"C20 pps": [0.01, 0.03], "C50 pps": [0.1, 0.2]}, [2.0, 2.05])
    rows[2]["kept_share"] = 0.5
    figure = rate_figure(comparison, rows, {"pps": lambda row: True, "none": lambda row: False})
    (line,) = figure.series
    assert list(line.x) == pytest.approx([20, 50])
    assert line.low == [0.01, 0.1]
    assert line.high == [0.03, 0.2]
    assert figure.band == pytest.approx((-0.05, 0.05))


def test_two_variants_are_told_apart_by_their_paired_seeds() -> None:
    rows = made_up({"a": [0.10, 0.30], "b": [0.11, 0.31], "c": [0.2, 0.1]}, [2.0, 2.5])
    beyond = gap(rows[2], rows[1])
    assert beyond is not None
    assert beyond.sign == 1
    assert str(beyond) == "+0.0100 ± 0.0000"
    three = made_up({"a": [0.0, 0.0, 0.0], "b": [0.1, 0.2, 0.3], "c": [0.1, 0.2, 0.15]}, [2.0, 2.1, 2.2])
    # Three seeds ask for 4.3 standard errors: 3.5 are not enough, 5.2 are.
    assert [found.sign for row in three[2:] if (found := gap(row, three[1]))] == [0, 1]
    unclear = gap(rows[3], rows[1])
    assert unclear is not None
    assert unclear.sign == 0
    single = made_up({"a": [0.1], "b": [0.3]}, [2.0])
    one = gap(single[2], single[1])
    assert one is not None
    assert one.sign == 0
    assert "one seed" in str(one)
    assert gap(None, rows[1]) is None


def test_tables_are_written_as_they_read() -> None:
    columns = (Column(key="a", label="a|b", form="text"), Column(key="b", label="b", form="+3"))
    table = Table(name="t", title="t", settings={}, columns=columns, rows=[{"a": "x", "b": None}, {"a": "y", "b": 1}])
    assert markdown(table) == "| a\\|b | b |\n| --- | ---: |\n| x | - |\n| y | +1.000 |\n"
    assert [show(0.1234, form) for form in ("percent", "ratio", "2", "integer")] == ["12.3 %", "0.12 x", "0.12", "0"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"steps": 5}, "steps=5"),
        ({"regimes": ("moon",)}, "moon"),
        ({"regimes": ("scratch", "scratch")}, "regimes="),
        ({"seeds": (1, 1)}, "seeds"),
        ({"seeds": (0, -1)}, "seeds=-1"),
        ({"seeds": (0, 2**32)}, "seeds=4294967296"),
        ({"seeds": (0, 1.5)}, "seeds=1.5"),
        ({"lr": 0}, "lr=0"),
        ({"warmup": 1}, "warmup=1"),
        ({"text": 5}, "text=5"),
        ({"model": None}, "model=None"),
    ],
)
def test_bad_settings_are_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        StudyConfig(**values)


def test_the_command_of_a_study_is_what_makes_it() -> None:
    text = command("quota", StudyConfig(steps=90, seeds=(4, 5), text="a b").given(), out=Path("o"))
    for part in ("lrmoe study quota", "--steps 90", "--seeds 4,5", "--text 'a b'"):
        assert part in text
    assert "--lr" not in text
    assert "--set ranks=4" in command("another", {"ranks": 4, "seeds": (1,)}, out=Path("o"))
    assert command("another", {}, out=Path("o"), program="python -m paper") == "python -m paper another --out o"


def test_settings_that_a_study_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "s")]
    for wrong, named in (
        (["quota", "--model", "x", "--regimes", "moon"], "--regimes moon is not known"),
        (["quota", "--set", "speed=2"], "--set 'speed=2' is not FIELD=VALUE"),
        (["quota", "--set", "steps"], "--set 'steps' is not FIELD=VALUE"),
        (["quota", "--text", "nowhere"], "--text nowhere cannot"),
        (["quota", "--set", "text=5"], "--text 5 cannot be read"),
        (["quota", "--seeds", "0,-1"], "--seeds -1 must"),
        (["quota", "--jobs", "0"], "--jobs 0"),
        (["quota", "--set", "steps=30", "--steps", "40"], "--set steps=... and --steps say the same"),
        (["quota", "--regimes", ""], "--regimes: '' is not a list of names"),
    ):
        assert cli.main(["study", *wrong, *out]) == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_texts_and_folders_are_checked_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"line {n}\n" for n in range(200)))
    (tmp_path / "short").write_text("x")
    for wrong, named in (
        (["--regimes", "near_zero", "--text", str(tmp_path / "no")], "error: --text /"),
        (["--regimes", "fine_tune", "--fine-tune-text", str(tmp_path / "short")], "error: --fine-tune-text /"),
        (["--cells", str(text)], "--cells /"),
        (["--out", str(text / "x")], "--out /"),
    ):
        arguments = ["study", "quota", "--out", str(tmp_path / "s"), "--text", str(text), "--seq", "16", *wrong]
        assert cli.main(arguments) == 2
        assert named in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short", "text"]


def test_a_whole_study_from_the_command_line(
    tiny: Callable[..., TrainConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_gradient, "RATES", (50,))
    run = tiny()
    out, store = tmp_path / "a <i>x", tmp_path / "cells"
    arguments = ["study", "router_gradient", "--out", str(out), "--cells", str(store), "--model", run.model]
    arguments += ["--text", str(run.text), "--fine-tune-text", str(run.text), "--seeds", "0", "--steps", "20"]
    arguments += ["--batch", "16", "--seq", "16"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "What you should do" in shown
    assert "C50 kept" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert summary["command"] == "study"
    assert summary["provenance"]["runs"] == 4
    (table,) = summary["tables"]
    assert next(row["variant"] for row in table["rows"]) == BASELINE
    assert len(table["rows"]) == 4
    assert all(row["verdict"] == "one seed" for row in table["rows"][1:])
    assert "a <i>x" not in (out / "report.html").read_text()
    before = {path: path.stat().st_mtime_ns for path in store.rglob("metrics.jsonl")}
    # Nothing is trained again, and another study takes over the runs that it shares.
    assert cli.main(arguments) == 0
    assert before == {path: path.stat().st_mtime_ns for path in store.rglob("metrics.jsonl")}
    wrong = [*arguments[:1], "quota", *arguments[2:]]
    assert cli.main(wrong) == 2
    assert "not written by lrmoe study quota" in capsys.readouterr().err
