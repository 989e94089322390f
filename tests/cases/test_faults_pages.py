"""Pages and words: ratios of what they name, one verdict on replicas, no advice from noise, figures held against each
other. Each test is named after its fault."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from study_rows import rows_of

from lrmoe.balance import get
from lrmoe.cli import main
from lrmoe.parallel.balance_meter import BalanceMeter
from lrmoe.report import write_report
from lrmoe.report.verdicts import Verdict, advice
from lrmoe.studies import ablation, schedules, study_run
from lrmoe.studies.balance_config import BalanceConfig
from lrmoe.studies.balance_run import balance
from lrmoe.studies.plan import recommend, study
from lrmoe.studies.plan_config import PlanConfig
from lrmoe.studies.replay_config import ReplayConfig
from lrmoe.studies.replay_run import describe, run_replay

# ---------------------------------------------------------------------------------------------------------------- W1


def loads_file(folder: Path, loads: Any) -> str:
    path = folder / "loads.json"
    path.write_text(json.dumps(loads))
    return str(path)


@pytest.mark.parametrize("drop", [0.0, 0.2, 0.5, 0.9])
def test_w1_no_ratio_is_below_one_and_each_is_of_what_it_names(drop: float, tmp_path: Path) -> None:
    loads = [[40, 10, 10, 20], [40, 10, 10, 20]]
    result = balance(BalanceConfig(loads=loads_file(tmp_path, loads), top_k=1, drop=drop, slots=0))
    for record in result.policies:
        for name in ("forward_home", "forward", "backward_home", "backward"):
            assert record[name] >= 1, (record["policy"], name)
    # Home loads of 100 and 60; every expert gives up the same share, so that what is left is as uneven: 1.25.
    assert result.policies[0]["backward_home"] == 1.25
    dropped = result.policies[-1]
    keeps = round(160 * (1 - drop))
    assert dropped["kept_rows"] == pytest.approx(keeps, abs=4)
    assert dropped["backward"] == pytest.approx(1.25, abs=0.1)


def test_w1_loads_without_a_pair_are_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = loads_file(tmp_path, [[0] * 4] * 2)
    assert main(["balance", "--loads", nothing, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "there is no load" in said
    assert "1.000" not in said
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "There is no load" in page
    assert "1.000" not in page
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert all(record["forward"] is None for record in summary["policies"])
    # A matrix without a pair among others is in no mean.
    some = loads_file(tmp_path, [[[3, 1], [0, 0]], [[0, 0], [0, 0]]])
    result = balance(BalanceConfig(loads=some, top_k=1, slots=0))
    assert result.policies[0]["forward_home"] == 1.5
    assert any("1 of 2 load matrices hold no pair" in note for note in result.notes)


def test_w1_a_played_run_without_a_pair_is_said_to_be_none(tmp_path: Path) -> None:
    config = ReplayConfig(workload="balanced", tokens=0, steps=1, policies="lrmoe", drop=0.0)
    summary = run_replay(config, tmp_path / "out").summary()
    assert any("there is no load" in line for line in describe(summary))
    assert all(record["forward_mean"] is None for record in summary["policies"])
    assert "There is no load" in write_report(tmp_path / "out").read_text(encoding="utf-8")


def test_w1_one_rank_has_nothing_to_balance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = loads_file(tmp_path, [[5, 3, 0, 1]])
    assert main(["balance", "--loads", alone, "--out", str(tmp_path / "out")]) == 0
    assert main(["balance", "--workload", "balanced", "--ranks", "1", "--steps", "1", "--policies", "lrmoe"]) == 0
    said = capsys.readouterr().out
    assert said.count("nothing to balance") == 2
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for words in (said, page):
        assert "leave replicas off" not in words.lower()
    assert "nothing to balance" in page


def test_w1_plans_without_rows_are_in_no_mean_of_the_meter() -> None:
    meter = BalanceMeter()
    meter.add(get("fixed").plan(torch.tensor([[3, 1], [0, 0]])))
    meter.add(get("fixed").plan(torch.zeros(2, 2, dtype=torch.int64)))
    assert meter.read()["forward_max_over_mean"] == 1.5
    assert meter.read()["replicas"] == 0.0


# ---------------------------------------------------------------------------------------------------------------- W8

MODEL = {
    "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 300,
    "num_attention_heads": 4, "num_local_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip
MACHINE = {
    "name": "m", "flops": 1e13, "memory_bytes": 2**36, "memory_bandwidth": 1e12, "intra_bytes_per_s": 1e11,
    "inter_bytes_per_s": 1e10, "tile_rows": 1,
}  # fmt: skip


@pytest.mark.parametrize("tokens", [64, 256, 600, 1024, 4096])
@pytest.mark.parametrize("latency", [2e-5, 1e-3])
def test_w8_balance_and_plan_give_one_verdict(tokens: int, latency: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "machine.json").write_text(json.dumps({**MACHINE, "latency_s": latency}))
    popularity = torch.arange(16, 0, -1).float().square()
    loads_E = (popularity / popularity.sum() * tokens * 2).round().int().tolist()
    loads = loads_file(tmp_path, [loads_E] * 4)
    model, machine = str(tmp_path / "config.json"), str(tmp_path / "machine.json")
    told = balance(BalanceConfig(loads=loads, model=model, hardware=machine, slots=1, drop=0.0, floor=1))
    case = PlanConfig(loads=loads, model=model, hardware=machine, ep=4, seq=told.tokens, slots=1, floor=1).case()
    records = study(case)
    best, _ = recommend(records, case)
    here = {one["policy"]: one for one in told.break_even}
    for record in records:
        if record["slots"] and record["save"] == "preactivation":
            # What plan scales has been rounded to its own tokens before.
            assert record["crossover"] == pytest.approx(here[record["policy"]]["tokens"], rel=0.02)
            assert record["pays"] == here[record["policy"]]["here"]["pays"]
            ratio = here[record["policy"]]["here"]["planned"] / here[record["policy"]]["here"]["home"]
            assert record["over_fixed"] == pytest.approx(ratio)
    assert best is not None
    assert bool(best["slots"]) == bool(told.paying)


def test_w8_the_model_and_the_hardware_change_the_threshold(tmp_path: Path) -> None:
    def crossovers(**given: Any) -> list[float | None]:
        return [one["tokens"] for one in balance(BalanceConfig(skew=2.0, tokens=1024, drop=0.0, **given)).break_even]

    default, other = crossovers(), crossovers(model="glm-4.5-air")
    assert default != other
    assert default != crossovers(hardware="a100")
    assert default != crossovers(expert_dim=256)
    said = balance(BalanceConfig(skew=2.0, tokens=64, model="glm-4.5-air", hardware="a100"), tmp_path / "out").notes
    page = write_report(tmp_path / "out").read_text(encoding="utf-8")
    for words in ("\n".join(said), page):
        assert "glm-4.5-air, 4096 x 1408, 8 a token, on A100" in words


# ---------------------------------------------------------------------------------------------------------------- W7


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_w7_no_schedule_is_advised_that_is_not_told_from_none(seeds: int) -> None:
    noise = [0.010, -0.004, 0.006][:seeds]
    rows = rows_of(
        {"C20 from the start": noise, "C20 warm-up": [value - 0.004 * (-1) ** i for i, value in enumerate(noise)]}
    )
    assert all(row["verdict"] in ("within the spread", "one seed") for row in rows[1:])
    _, advised = schedules.conclude({"scratch": rows})
    assert not any("loses least" in one for one in advised)
    apart = [0.05, 0.06, 0.055][:seeds]
    _, advised = schedules.conclude({"scratch": rows_of({"C20 from the start": apart, "C20 warm-up": [0.0] * seeds})})
    assert any("loses least" in one for one in advised) == (seeds > 2)


def test_w7_one_seed_condemns_nothing() -> None:
    one = rows_of({f"C20 {name}": [0.01] for name in ("pps", "random", "topq")})
    _, advised = ablation.conclude({"scratch": one})
    assert not any("Do not use" in sentence for sentence in advised)
    assert any("one seed" in sentence for sentence in advised)


def test_w7_two_seeds_of_a_comparison_are_repeated_before_use() -> None:
    two = [Verdict(name="a", differences=(0.01, 0.0), spread=0.02, seconds=0.5)]
    said = " ".join(advice(two, "C0", 1.0))
    assert "Use “a”" not in said
    assert "third" in said
    alike = [
        Verdict(name="a", differences=(0.01, 0.0, 0.005), spread=0.02, seconds=0.5),
        Verdict(name="b", differences=(0.0, 0.011, 0.006), spread=0.02, seconds=0.5),
    ]
    assert any("not told from “a”" in sentence for sentence in advice(alike, "C0", 1.0))


def test_w7_the_command_of_a_study_is_the_one_that_ran() -> None:
    out, store = Path("my runs/$(x) 'y'"), Path("-cells")
    given = {"steps": 60, "seeds": (0, 1), "text": "--odd name"}
    line = study_run.command("schedule", given, out=out, store=store, jobs=2)
    words = shlex.split(line)
    assert words[:3] == ["lrmoe", "study", "schedule"]
    told = dict(pairwise(words[3:]))
    assert (told["--out"], told["--jobs"], told["--steps"], told["--seeds"]) == (str(out), "2", "60", "0,1")
    # A value that looks like an option is part of its own word.
    assert "--cells=-cells" in words
    assert "--text=--odd name" in words
    assert "--cells" not in study_run.command("schedule", given, out=out, store=out / "cells")
