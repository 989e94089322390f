"""Time to loss: how a target is read off curves, what the tables say of made-up runs, and a real run of tiny size."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lrmoe.studies.catalog import run_named
from lrmoe.studies.results import StudyResult
from lrmoe.training.world import World
from paper.catalog import CATALOG
from paper.time_to_loss import study
from paper.time_to_loss.config import TimeToLossConfig
from paper.time_to_loss.curves import loss_at, steps_to, target_rows, until, verdict, without_spikes
from paper.time_to_loss.run import CellPlan, learning_rate, run_cell
from paper.time_to_loss.study import check_cells, time_to_loss, work_left
from paper.time_to_loss.tables import advise, sentence

SMALL = TimeToLossConfig(steps=8, eval_every=4, lr_warmup_steps=2, seeds=(0, 1), even_seeds=(0,))
TINY = replace(
    SMALL, dim=16, expert_dim=16, num_experts=4, heads=2, batch=2, seq=16, drops=(0.5,), recommended=0.5, warmup=0.25
)


def test_a_curve_is_read_between_its_points() -> None:
    curve = [(0, 4.0), (10, 2.0), (20, 3.0), (30, 1.0)]
    assert [loss_at(curve, step) for step in (0, 5, 10, 25, 30, 99)] == [4.0, 3.0, 2.0, 2.0, 1.0, 1.0]
    assert steps_to(curve, 3.0) == 5
    assert steps_to(curve, 2.0) == 10  # When it is first there, however far it climbs again.
    assert steps_to(curve, 1.5) == 27.5
    assert steps_to(curve, 5.0) == 0
    assert steps_to(curve, 0.9) is None


def test_a_loss_that_is_no_number_reaches_nothing() -> None:
    assert steps_to([(0, 4.0), (10, math.nan), (20, math.nan)], 3.0) is None
    assert steps_to([(0, 4.0), (10, math.nan), (20, 2.0)], 3.0) == 20


def test_time_is_summed_until_a_part_of_a_step() -> None:
    assert until([1.0, 2.0, 4.0], 0) == 0
    assert until([1.0, 2.0, 4.0], 2.25) == 4.0
    assert until([1.0, 2.0, 4.0], 3) == 7.0


def test_a_spike_does_not_count_without_spikes() -> None:
    seconds = [1.0] * 30 + [3.0] * 30
    spiky = list(seconds)
    spiky[10] = 100.0
    assert without_spikes(spiky) == without_spikes(seconds) == seconds


def test_the_learning_rate_rises_and_stays() -> None:
    assert [learning_rate(step, SMALL.sizes) for step in range(4)] == [1e-3, 2e-3, 2e-3, 2e-3]


def cell(setting: str, seed: int, factors: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Records of a cell: each contender's loss and step time over those of a falling line."""
    config = next(one for one in SMALL.settings() if one.name == setting)
    contenders = []
    for one in config.contenders:
        loss, seconds = factors.get(one.name, (1.0, 1.0))
        steps = [60.0 * seconds * (1 + seed)] * SMALL.steps
        contenders.append(
            {
                "name": one.name,
                "validation": [(0, 8.0 * loss), (4, 4.0 * loss), (8, 2.0 * loss)],
                "losses": [1.0] * SMALL.steps,
                "compute_s": steps,
                "balanced_s": steps,
                "transfer_s": [0.0] * SMALL.steps,
                "kept_share": 1.0,
                "load_max_over_mean": None if one.policy is None else 1.5,
                "rows_max_over_mean": None,
                "kept_max_over_mean": None,
                "replicas": None,
            }
        )
    return {"setting": setting, "seed": seed, "contenders": contenders, "versions": {"torch": "0"}, "seconds": 1.0}


def rows_of(setting: str, *factors: dict[str, tuple[float, float]], share: float = 0.75) -> list[dict[str, Any]]:
    config = next(one for one in SMALL.settings() if one.name == setting)
    return target_rows(config, [cell(setting, seed, one) for seed, one in enumerate(factors)], share=share)


def test_rows_of_made_up_runs() -> None:
    # After 6 of 8 steps plain training is at 3. At losses of 1.5 times as much, 3 is reached at step 8; steps at half
    # the price make that 8 / 2 against 6.
    fixed, symi, _, recipe, *_ = rows_of(
        "skewed",
        {"SYMI": (1.0, 0.9), "LRMoE 20%": (1.5, 0.5)},
        {"SYMI": (1.0, 0.9), "LRMoE 20%": (1.0, 0.5)},
    )
    assert (fixed["loss"], fixed["steps"], fixed["minutes"]) == (3.0, 6.0, 9.0)
    assert (symi["steps"], symi["over fixed"]) == (6.0, pytest.approx(0.9))
    assert (recipe["steps"], recipe["reached"]) == (7.0, "2 of 2 seeds")
    assert recipe["each over fixed"] == pytest.approx([4 / 6, 3 / 6])
    assert recipe["over SYMI"] == pytest.approx((4 / 5.4 + 3 / 5.4) / 2)
    assert recipe["range"] == "0.50 to 0.67"


def test_a_seed_that_misses_the_target_leaves_no_numbers() -> None:
    recipe = rows_of("skewed", {"LRMoE 20%": (1.6, 0.1)}, {})[3]
    assert (recipe["steps"], recipe["minutes"], recipe["over fixed"], recipe["reached"]) == (
        None,
        None,
        None,
        "1 of 2 seeds",
    )
    never = rows_of("skewed", {"LRMoE 20%": (1.6, 0.1)})[3]
    assert never["reached"] == "not reached"


@pytest.mark.parametrize(
    ("factors", "wins", "said"),
    [
        (
            {"SYMI": (1.0, 0.9), "LRMoE 20%": (1.0, 0.8)},
            True,
            "0.89 of the MoE time of the fastest baseline, SYMI: less",
        ),
        (
            {"UltraEP": (1.0, 0.6), "LRMoE 20%": (1.0, 0.8)},
            False,
            "UltraEP: not less than every baseline (it is faster",
        ),
        ({"LRMoE 20%": (1.6, 0.1)}, False, "does not reach the loss"),
    ],
)
def test_the_verdict_follows_from_the_rows(factors: dict[str, tuple[float, float]], wins: bool, said: str) -> None:
    setting = replace(SMALL.settings()[1], seeds=(0,))
    found = verdict(setting, rows_of("skewed", factors))
    assert found["wins"] is wins
    assert said in sentence(found)


def test_another_drop_that_is_faster_is_named() -> None:
    setting = replace(SMALL.settings()[1], seeds=(0,))
    found = verdict(setting, rows_of("skewed", {"LRMoE 50%": (1.0, 0.7)}))
    assert (found["quickest"], found["quickest_ratio"]) == ("LRMoE 50%", pytest.approx(0.7))
    assert "LRMoE 50%, 0.70 of" in sentence(found)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dim": 10, "heads": 4}, "heads=4"),
        ({"batch": 3}, "batch=3"),
        ({"top_k": 9}, "top_k=9"),
        ({"drops": (0.3,)}, "recommended=0.2"),
        ({"drops": (0.2, 1.0)}, "drops="),
        ({"targets": (0.9, 0.5)}, "targets="),
        ({"targets": (0.001,)}, "targets="),
        ({"seeds": (1, 1)}, "seeds="),
        ({"bandwidth": 0.0}, "bandwidth="),
        ({"warmup": 1.0}, "warmup="),
        ({"eval_every": 0}, "eval_every="),
        ({"ranks": 9, "batch": 9}, "num_experts=8"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TimeToLossConfig(**changes)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instead of training, cells of made-up records; their names in order."""
    names: list[str] = []

    def launch(work: object, plan: CellPlan, path: str, post: Any, *, size: int, timeout: float) -> int:
        names.append(f"{plan.setting}-{plan.seed}-{size}")
        post.send(SMALL.steps)
        Path(path).write_text(json.dumps(cell(plan.setting, plan.seed, {"pps 20%": (1.0, 0.8)})), encoding="utf-8")
        return 0

    monkeypatch.setattr(study, "launch", launch)
    return names


def test_finished_cells_are_not_done_again(launched: list[str], tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    assert work_left(SMALL, tmp_path) == 8 * (2 * 5 + 3 * 6)
    first = time_to_loss(SMALL, tmp_path, progress=lambda name, step, record: told.append((name, step)))
    assert launched == ["one-device-0-1", "one-device-1-1", "skewed-0-2", "skewed-1-2", "even-0-2"]
    assert told[0] == ("one-device-seed-0", 8)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        f"{name}.json"
        for name in ("even-seed-0", "one-device-seed-0", "one-device-seed-1", "skewed-seed-0", "skewed-seed-1")
    ]
    (tmp_path / "cells" / "skewed-seed-1.json").unlink()
    launched.clear()
    assert work_left(SMALL, tmp_path) == 8 * 6
    again = time_to_loss(SMALL, tmp_path)
    assert (again.tables, again.conclusions) == (first.tables, first.conclusions)
    assert launched == ["skewed-1-2"]


def test_cells_of_other_settings_are_refused(launched: list[str], tmp_path: Path) -> None:
    time_to_loss(SMALL, tmp_path)
    launched.clear()
    with pytest.raises(ValueError, match=r"was made with lr=0\.002"):
        time_to_loss(replace(SMALL, lr=0.1), tmp_path)
    assert launched == []


def test_what_is_there_is_checked_without_training(launched: list[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x" * 400, encoding="utf-8")
    with pytest.raises(ValueError, match=r"text='.*' has .* sequences to validate on, fewer than ranks=2"):
        check_cells(replace(SMALL, text=str(tmp_path / "text"), seq=128), tmp_path)
    time_to_loss(SMALL, tmp_path)
    check_cells(SMALL, tmp_path)
    with pytest.raises(ValueError, match=r"was made with lr=0\.002"):
        check_cells(replace(SMALL, lr=0.1), tmp_path)
    (tmp_path / "cells" / "skewed-seed-1.json").write_text('{"settings": []}')
    with pytest.raises(ValueError, match=r"skewed-seed-1\.json is damaged .* delete it"):
        check_cells(SMALL, tmp_path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("{", "cannot be read as JSON"),
        ({"settings": []}, r"\(settings=\[\] must be an object\)"),
        ({"seconds": None}, r"\(seconds=None must be a number\)"),
        ({"versions": {"torch": 2}}, r"\(versions=.* must be an object of strings\)"),
        ({"contenders": []}, r"\(contenders=\[\] must be \['fixed', .*\)"),
        ({"contenders": [1]}, r"\(contenders=\[1\] must be a list of objects\)"),
        ({"losses": [1.0] * 7}, r"\(contender SYMI, losses=.* must be a list of 8 numbers\)"),
        ({"compute_s": ["1"] * 8}, r"\(contender SYMI, compute_s=.* must be a list of 8 numbers\)"),
        ({"validation": []}, r"\(contender SYMI, validation=\[\] must be a list of pairs"),
        ({"validation": [[4, 1.0], [0, 2.0]]}, r"\(contender SYMI, validation=.* the steps rising\)"),
        ({"kept_share": "all"}, r"\(contender SYMI, kept_share='all' must be a number or null\)"),
        ({"replicas": ...}, r"\(contender SYMI, replicas is missing\)"),
    ],
)
def test_a_damaged_cell_is_named_with_its_mend_before_anything_is_trained(
    launched: list[str], tmp_path: Path, damage: Any, said: str
) -> None:
    (tmp_path / "text").write_text("".join(f"line {n}: {n * n}\n" for n in range(2000)), encoding="utf-8")
    config = replace(SMALL, text=str(tmp_path / "text"))
    time_to_loss(config, tmp_path)
    (tmp_path / "cells" / "one-device-seed-0.json").unlink()
    path = tmp_path / "cells" / "skewed-seed-1.json"
    found = json.loads(path.read_text())
    if isinstance(damage, dict):
        for name, value in damage.items():
            of = found if name in found else found["contenders"][1]
            of.pop(name) if value is ... else of.update({name: value})
    path.write_text(damage if isinstance(damage, str) else json.dumps(found))
    launched.clear()
    for call in (check_cells, time_to_loss):
        with pytest.raises(ValueError, match=rf"skewed-seed-1\.json .*{said}.*; delete it, and it is made again"):
            call(config, tmp_path)
    assert launched == []


def test_the_study_by_name_writes_its_files_and_nothing_where_a_cell_is_damaged(
    launched: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    (tmp_path / "text").write_text("".join(f"line {n}: {n * n}\n" for n in range(2000)), encoding="utf-8")
    given = {"text": str(tmp_path / "text"), "steps": 8, "eval_every": 4, "seeds": (0, 1), "even_seeds": (0,)}
    out, told = tmp_path / "out", []

    def watch(work: int) -> Any:
        told.append(work)
        return lambda name, step, record: None

    def call() -> StudyResult:
        return run_named("time_to_loss", given, out, store=tmp_path / "unused", watch=watch, catalog=CATALOG)

    result = call()
    assert told == [8 * (2 * 5 + 3 * 6)]
    assert {path.name for path in out.iterdir()} == {
        *("cells", "config.json", "metrics.jsonl", "summary.json", "table.md")
    }
    assert json.loads((out / "config.json").read_text())["settings"]["steps"] == 8
    assert "python -m paper time_to_loss --text" in result.provenance["command"]
    assert result.provenance["cells"] == 5
    (out / "cells" / "even-seed-0.json").write_text("{")
    for path in list(out.iterdir()):
        if path.is_file():
            path.unlink()
    with pytest.raises(ValueError, match=r"even-seed-0\.json .*; delete it, and it is made again"):
        call()
    assert [path.name for path in out.iterdir()] == ["cells"]
    assert not (tmp_path / "unused").exists()


def test_every_column_of_the_result_has_values(launched: list[str], tmp_path: Path) -> None:
    result: StudyResult = time_to_loss(SMALL, tmp_path)
    assert [table.name for table in result.tables] == ["one-device", "skewed", "even", "verdicts", "steps"]
    for table in result.tables:
        for column in table.columns:
            assert all(column.key in row for row in table.rows), (table.name, column.key)
    wins = {row["setting"]: row["wins"] for row in result.tables[3].rows}
    assert wins == {"One device": True, "2 ranks, no balancing loss": False, "2 ranks, balancing loss 0.01": False}
    assert "One device" in result.advice[0]
    assert "2 ranks" in result.advice[1]
    assert len(result.conclusions) == 9
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["study"] == "time_to_loss"


def test_contenders_train_from_the_same_weights_on_the_same_data(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"line {n}: {n * n}\n" for n in range(400)), encoding="utf-8")
    config = replace(TINY, text=str(tmp_path / "text"))
    setting = config.settings()[0]
    plan = CellPlan(
        setting=setting.name,
        seed=0,
        balance_loss_weight=setting.balance_loss_weight,
        contenders=setting.contenders,
        sizes=config.sizes,
    )
    told: list[int] = []
    runs = []
    for name in ("first", "second"):
        run_cell(World(), plan, tmp_path / name, told.append)
        runs.append(json.loads((tmp_path / name).read_text(encoding="utf-8"))["contenders"])
    assert told == [*range(1, 25)] * 2
    exact, pps, random = runs[0]
    assert [one["losses"] for one in runs[0]] == [one["losses"] for one in runs[1]]
    # Two steps of warm-up, so that the third update is the first to differ and the fourth loss shows it.
    assert exact["losses"][:3] == pps["losses"][:3] == random["losses"][:3]
    assert len({one["losses"][3] for one in runs[0]}) == 3
    assert exact["kept_share"] == 1.0
    assert 0.6 < pps["kept_share"] < 0.7
    assert [steps for steps, _ in pps["validation"]] == [0, 4, 8]
    assert exact["validation"][0] == pps["validation"][0]
    assert exact["validation"][-1][1] < exact["validation"][0][1]
    assert all(len(one["compute_s"]) == 8 and min(one["compute_s"]) > 0 for one in runs[0])


def test_w7_time_to_loss_advises_only_what_is_told_apart() -> None:
    row = {"setting": "S", "recipe": "LRMoE 20%", "wins": True}
    assert "Drop 20%" in advise([{**row, "apart": -1}])[0]
    assert "not told from every baseline" in advise([{**row, "apart": 0}])[0]
    assert "Do not expect" in advise([{**row, "wins": False, "apart": 1}])[0]
