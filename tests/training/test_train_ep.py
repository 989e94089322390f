"""Runs over two ranks: the numbers of one process, checkpoints for any number of ranks, and all end with the first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training.rank_work import cut, train_all

from lrmoe.cli import main
from lrmoe.studies.replay import Choice, Setting, replay
from lrmoe.studies.routing import recorded
from lrmoe.studies.systems import Sizes
from lrmoe.training.checkpoints import checkpoints_of
from lrmoe.training.config import TrainConfig
from lrmoe.training.files import read_records
from lrmoe.training.launch import launch
from lrmoe.training.run import prepare, train
from lrmoe.training.trace import read_trace

MakeConfig = Callable[..., TrainConfig]
# The first collectives after a start agree on what is to be run.
TIMES = {"seconds", "forward_seconds", "backward_seconds", "saved_bytes", "sent_bytes"}


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def records(out: Path) -> list[dict[str, Any]]:
    return read_records(out / "metrics.jsonl")


def weights(out: Path, step: int = 6) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / f"checkpoint-{step}" / "model.safetensors")


def furthest(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, TrainConfig]]:
    """Folders of runs over two ranks, and of the same runs of one process under ``one-``."""
    folder = tmp_path_factory.mktemp("runs")
    base: dict[str, Any] = TrainConfig(
        model=str(tiny_model),
        text=str(tiny_text),
        steps=6,
        batch=4,
        seq=32,
        lr_warmup_steps=2,
        log_every=1,
        eval_every=3,
        eval_sequences=7,
        save_every=2,
        keep_checkpoints=3,
        threads=1,
        trace=True,
    ).to_dict()

    def make(drop: float, **changes: Any) -> TrainConfig:
        recalibration = {**base["recalibration"], "drop": drop}
        return TrainConfig.from_dict({**base, "ep": 2, "recalibration": recalibration, **changes})

    configs = {
        "exact": make(0.0),
        "pps": make(0.25),
        "again": make(0.25),
        "fixed": make(0.25, policy="fixed", slots=0),
        "symi": make(0.25, policy="symi", slots=3),
        "small parts": make(0.0, batch=2, grad_accum=2, gradient_checkpointing=True),
    }
    for name in ("exact", "pps", "small parts"):
        alone = TrainConfig.from_dict({**configs[name].to_dict(), "ep": 1})
        train(prepare(alone, folder / f"one-{name}"))
    jobs: list[Any] = [(config, folder / name, {}) for name, config in configs.items()]
    jobs.append((configs["pps"], folder / "resumed", {"cut_from": folder / "pps"}))
    jobs.append((configs["exact"], folder / "from one", {"cut_from": folder / "one-exact"}))
    changed = TrainConfig.from_dict({**configs["symi"].to_dict(), "slots": 4})
    jobs.append((changed, folder / "more slots", {"cut_from": folder / "symi"}))
    assert launch(train_all, jobs, size=2, timeout=60) == 0
    return folder, configs


Runs = tuple[Path, dict[str, TrainConfig]]


@pytest.mark.parametrize("name", ["exact", "small parts"])
def test_losses_are_those_of_one_process(runs: Runs, name: str) -> None:
    folder, _ = runs
    alone, shared = records(folder / f"one-{name}"), records(folder / name)
    assert [record["step"] for record in shared] == [record["step"] for record in alone]
    for one, two in zip(alone, shared, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert two.get("eval_loss") == pytest.approx(one.get("eval_loss"), abs=1e-5)
        if name == "exact":
            # With more than one microbatch each part has a loss of its own, as documented of one process too.
            assert two["balance_loss"] == pytest.approx(one["balance_loss"], abs=1e-4)
    assert furthest(weights(folder / f"one-{name}"), weights(folder / name)) < 1e-4


def test_quotas_and_shares_are_those_of_one_process(runs: Runs) -> None:
    folder, _ = runs
    alone, shared = records(folder / "one-pps"), records(folder / "pps")
    for one, two in zip(alone, shared, strict=True):
        assert two["kept_share"] == one["kept_share"] == pytest.approx(0.75)
        for layer in two["layers"]:
            assert sum(layer["load"]) == 4 * 32 * 2
        # Of an expert with a replica, each instance fills its quota from its own pairs.
        assert two["kept_importance_share"] == pytest.approx(one["kept_importance_share"], abs=0.03)
    for one, two in zip(alone[:3], records(folder / "fixed")[:3], strict=True):
        assert two["kept_importance_share"] == pytest.approx(one["kept_importance_share"], rel=1e-6)
        assert [layer["load"] for layer in two["layers"]] == [layer["load"] for layer in one["layers"]]
        assert [layer["kept"] for layer in two["layers"]] == [layer["kept"] for layer in one["layers"]]


def test_two_runs_are_equal_bit_for_bit(runs: Runs) -> None:
    folder, _ = runs
    assert without_times(records(folder / "again")) == without_times(records(folder / "pps"))
    assert furthest(weights(folder / "again"), weights(folder / "pps")) == 0.0


def test_the_policy_moves_work_not_numbers(runs: Runs) -> None:
    folder, _ = runs
    for planned, fixed in zip(records(folder / "pps"), records(folder / "fixed"), strict=True):
        assert fixed["parallel"]["replicas"] == 0
        assert planned["parallel"]["forward_max_over_mean"] <= fixed["parallel"]["forward_max_over_mean"] + 1e-9
        assert planned["loss"] == pytest.approx(fixed["loss"], abs=1e-3)
    assert any(record["parallel"]["replicas"] > 0 for record in records(folder / "pps"))


def test_interrupted_run_continues_as_if_nothing_had_happened(runs: Runs) -> None:
    folder, _ = runs
    assert without_times(records(folder / "resumed")) == without_times(records(folder / "pps"))
    assert furthest(weights(folder / "resumed"), weights(folder / "pps")) == 0.0
    assert not (folder / "resumed" / "checkpoints" / ".incomplete").exists()


@pytest.mark.parametrize("name", ["pps", "small parts"])
def test_the_trace_is_of_all_ranks(runs: Runs, name: str) -> None:
    folder, configs = runs
    trace, alone = read_trace(folder / name), read_trace(folder / f"one-{name}")
    microbatches = configs[name].grad_accum
    assert trace.lam_NGE.shape == (6 * microbatches * 2, 2, 4)
    # Half of the microbatch's tokens each, two experts a token.
    assert (trace.lam_NGE.sum(2) == configs[name].batch * 32).all()
    for column in ("step_N", "microbatch_N", "layer_N"):
        assert np.array_equal(getattr(trace, column), getattr(alone, column))
    first = microbatches * 2  # Before weights have begun to differ in their last bits.
    assert np.array_equal(trace.lam_NGE[:first].sum(1, keepdims=True), alone.lam_NGE[:first])
    for record in records(folder / name):
        here = trace.step_N == record["step"] - 1
        for number, layer in enumerate(record.get("layers", [])):
            assert trace.lam_NGE[here & (trace.layer_N == number)].sum((0, 1)).tolist() == layer["load"]


def test_a_replayed_trace_gives_the_plans_that_the_engine_made(runs: Runs) -> None:
    folder, configs = runs
    for name, options in (("pps", {"slots": 1}), ("fixed", {}), ("symi", {"slots": 3})):
        config = configs[name]
        routing = recorded(folder / name)
        choice = Choice(name=config.policy, options=options)
        setting = Setting(sizes=Sizes(experts=4, ranks=2, layers=2))
        outcome = replay(choice, routing, setting, drop=config.recalibration.drop)
        assert outcome.record["reason"] is None
        for record in records(folder / name):
            lines = [line for line in outcome.lines if line["step"] == record["step"] - 1]
            told = record["parallel"]
            assert told["plans"] == len(lines) == 2
            assert told["replicas"] == sum(line["replicas"] for line in lines) / 2
            assert told["kept_rows"] == sum(sum(line["kept"]) for line in lines) / 2
            for key, column in (("forward_max_over_mean", "rows"), ("backward_max_over_mean", "kept")):
                ratios = [2 * max(line[column]) / sum(line[column]) for line in lines]
                assert told[key] == pytest.approx(sum(ratios) / 2)


def test_a_resumed_run_records_nothing_twice(runs: Runs) -> None:
    folder, _ = runs
    one, other = read_trace(folder / "pps"), read_trace(folder / "resumed")
    assert np.array_equal(one.lam_NGE, other.lam_NGE)
    assert np.array_equal(one.step_N, other.step_N)
    # One that went on over other ranks is read with a number of them.
    with pytest.raises(ValueError, match="4 experts on 1 ranks and 4 experts on 2 ranks"):
        read_trace(folder / "from one")
    assert read_trace(folder / "from one", ranks=2).step_N.tolist() == one.step_N.tolist()


def test_run_of_one_process_continues_over_two(runs: Runs) -> None:
    folder, _ = runs
    for one, two in zip(records(folder / "one-exact"), records(folder / "from one"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert furthest(weights(folder / "one-exact"), weights(folder / "from one")) < 1e-4


def test_a_policy_with_a_history_continues_with_other_slots(runs: Runs) -> None:
    folder, _ = runs
    for before, after in zip(records(folder / "symi"), records(folder / "more slots"), strict=True):
        assert after["loss"] == pytest.approx(before["loss"], abs=0.02)
    last = [records(folder / name)[-1]["parallel"] for name in ("symi", "more slots")]
    assert last[0] != last[1]


def test_run_over_two_continues_in_one_process(runs: Runs, tmp_path: Path) -> None:
    folder, configs = runs
    cut(folder / "exact", tmp_path / "run", step=2)
    alone = TrainConfig.from_dict({**configs["exact"].to_dict(), "ep": 1})
    train(prepare(alone, tmp_path / "run", resume=True))
    for one, two in zip(records(tmp_path / "run"), records(folder / "exact"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert furthest(weights(tmp_path / "run"), weights(folder / "exact")) < 1e-4


def test_checkpoints_have_one_key_for_each_expert(runs: Runs) -> None:
    folder, configs = runs
    assert weights(folder / "exact").keys() == weights(folder / "one-exact").keys()
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in weights(folder / "exact")
    assert [step for step, _ in checkpoints_of(folder / "exact")] == [2, 4, 6]
    summary = json.loads((folder / "exact" / "summary.json").read_text())
    assert summary["checkpoint"] == os.path.join("checkpoints", "checkpoint-6")
    model = folder / "exact"
    config = TrainConfig.from_dict({**configs["exact"].to_dict(), "ep": 1, "model": str(model), "steps": 1})
    assert prepare(config, folder / "nowhere").loaded.model.config.num_experts == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ep", "0"], "--ep 0 must be an integer >= 1"),
        (["--ep", "3"], "--batch 4 cannot be shared out equally to --ep 3 ranks; give a multiple of 3"),
        (
            ["--ep", "3", "--batch", "6"],
            "have 4 experts, which cannot be shared out equally to --ep 3 ranks; give a divisor of 4",
        ),
        (["--ep", "2", "--seq", "65"], "max_position_embeddings=64"),
        (["--ep", "2", "--text", "/nowhere"], "cannot be read"),
        (["--ep", "2", "--model", "nothing"], "neither a preset"),
        (["--ep", "2", "--slots", "-1"], "--slots -1 must be an integer >= 0"),
        (["--ep", "2", "--capacity", "0"], "--capacity 0.0 must be a finite number above 0"),
        (["--ep", "2", "--policy", "none"], "invalid choice: 'none'"),
    ],
)
def test_bad_input_starts_no_rank(
    tiny_model: Path,
    tiny_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("lrmoe.training.launch.launch", lambda *_, **__: pytest.fail("a rank was started"))
    monkeypatch.setattr("lrmoe.training.launch.warm_up", lambda: None)
    command = ["train", "--out", str(tmp_path / "run"), "--model", str(tiny_model), "--text", str(tiny_text)]
    assert main([*command, "--batch", "4", "--seq", "32", *options]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_balancing_loss_of_an_unknown_kind_is_refused(tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from lrmoe.training import sharded

    monkeypatch.setattr(sharded, "has_balancing_loss", lambda model: False)
    with pytest.raises(ValueError, match="balancing loss of Qwen3MoeForCausalLM cannot be computed over several"):
        sharded.check_sharding(tiny(ep=2))


def test_ranks_need_processes(tiny: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ep=2 needs 2 processes; start the run with lrmoe train or torchrun"):
        prepare(tiny(ep=2), tmp_path / "run")


def settings(config: TrainConfig) -> list[str]:
    """The options that give this run, but for ``--out``."""
    usual = TrainConfig().to_dict()
    changed = {key: value for key, value in config.to_dict().items() if key != "recalibration" and value != usual[key]}
    options = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in changed.items()]
    return [f"--drop={config.recalibration.drop}", *options]


def start(config: TrainConfig, out: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lrmoe.cli", "train", f"--out={out}", *settings(config), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def ranks_of(process: int) -> list[int]:
    """The processes that were forked, in order, from the one that has imported what they need."""
    (server,) = [child for child in children(process) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return sorted(children(server))


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill_in_the_middle(config: TrainConfig, out: Path, *, rank: int | None) -> tuple[int, str]:
    """Starts a run over two ranks, kills one of them (or, for None, the command) after a few steps, and returns the
    command's exit code and what it said; all of its processes have ended then."""
    process = start(config, out)
    deadline = time.monotonic() + 120
    while not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") > 4):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill(process.pid if rank is None else ranks[rank], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline, "ranks are left"
        time.sleep(0.05)
    return process.returncode, said


ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc")


@pytest.mark.slow
@ON_LINUX
def test_killed_rank_ends_the_run_with_one_line(tiny: MakeConfig, tmp_path: Path) -> None:
    code, said = kill_in_the_middle(tiny(ep=2, threads=1, steps=2000, eval_every=2000), tmp_path / "run", rank=1)
    assert code == 1
    assert said == (
        "lrmoe train: error: rank 1 was ended by SIGKILL; the other ranks were stopped; continue with --resume\n"
    )


@ON_LINUX
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, None])
def test_killed_run_continues_as_if_nothing_had_happened(tiny: MakeConfig, tmp_path: Path, rank: int | None) -> None:
    config = tiny(ep=2, threads=1, steps=60, save_every=2, eval_every=60)
    assert start(config, tmp_path / "whole").wait() == 0
    code, _ = kill_in_the_middle(config, tmp_path / "cut", rank=rank)
    assert code == (1 if rank == 0 else -signal.SIGKILL)
    assert start(config, tmp_path / "cut", "--resume").wait() == 0
    assert without_times(records(tmp_path / "cut")) == without_times(records(tmp_path / "whole"))
    assert furthest(weights(tmp_path / "cut", 60), weights(tmp_path / "whole", 60)) == 0.0


@pytest.mark.slow
def test_fifty_steps_of_a_preset_over_two_and_four_ranks(tmp_path: Path) -> None:
    """The loss curve of one process to 1e-4, for as long as no token's choice between two experts is so near a tie that
    rounding decides it: over two ranks 50 steps, over four at least 10."""
    command = ["train", "--model", "glm4-moe-tiny", "--steps", "50", "--seq", "64", "--drop", "0", "--lr", "1e-3"]
    command += [
        "--log-every",
        "1",
        "--eval-every",
        "50",
        "--save-every",
        "50",
        "--eval-sequences",
        "32",
        "--threads",
        "1",
    ]
    for ranks in (1, 2, 4):
        assert main([*command, "--ep", str(ranks), "--out", str(tmp_path / str(ranks))]) == 0
    alone = records(tmp_path / "1")
    for ranks, steps in ((2, 50), (4, 10)):
        for one, many in zip(alone[:steps], records(tmp_path / str(ranks))[:steps], strict=True):
            assert many["loss"] == pytest.approx(one["loss"], abs=1e-4)


@pytest.mark.slow
def test_the_same_command_line_under_torchrun(tiny: MakeConfig, runs: Runs, tmp_path: Path) -> None:
    folder, configs = runs
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lrmoe.cli"]
    done = subprocess.run(
        [*torchrun, "train", f"--out={tmp_path / 'run'}", *settings(configs["pps"])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert without_times(records(tmp_path / "run")) == without_times(records(folder / "pps"))
