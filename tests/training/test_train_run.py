"""A whole run with Transformers' Trainer: what it writes, what it counts, and that it can be cut off anywhere."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lrmoe.training.config import TrainConfig
from lrmoe.training.documents import read_documents
from lrmoe.training.files import locked, read_records
from lrmoe.training.models import load_model
from lrmoe.training.run import prepare, train
from lrmoe.training.text import TrainingOrder, tokenize

MakeConfig = Callable[..., TrainConfig]
SECONDS = {"seconds", "forward_seconds", "backward_seconds"}


class Killed(Exception):
    pass


def run(config: TrainConfig, out: Path, **options: Any) -> dict[str, Any]:
    progress = options.pop("progress", None)
    return train(prepare(config, out, **options), progress=progress)


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_seconds(item) for key, item in value.items() if key not in SECONDS}
    return [without_seconds(item) for item in value] if isinstance(value, list) else value


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / f"checkpoint-{step}" / "model.safetensors")


def test_run_leaves_records_checkpoint_and_summary(tiny: MakeConfig, tmp_path: Path) -> None:
    config, out = tiny(), tmp_path / "run"
    seen: list[int] = []
    summary = train(prepare(config, out), progress=lambda step, record: seen.append(step))
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "summary.json", "checkpoints", "tensorboard"}
    records = read_records(out / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records if "eval_loss" in record] == [3, 6]
    assert sorted(set(seen)) == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert record["drop"] == 0.25
        assert [layer["name"] for layer in record["layers"]] == [
            "model.layers.0.mlp.experts",
            "model.layers.1.mlp.experts",
        ]
        for layer in record["layers"]:
            assert sum(layer["load"]) == 4 * 32 * 2
            assert sum(layer["kept"]) == 0.75 * 4 * 32 * 2
        assert record["kept_share"] == pytest.approx(0.75)
        assert 0.75 < record["kept_importance_share"] < 1
        assert min(record[key] for key in SECONDS) > 0
    stored = json.loads((out / "summary.json").read_text())
    assert stored == summary
    assert summary["eval_loss"] == records[-1]["eval_loss"]
    assert summary["train_loss"] == pytest.approx(sum(record["loss"] for record in records) / 6)
    assert summary["saved_bytes"] == records[0]["saved_bytes"]
    assert 0 < summary["saved_bytes"]["moe"] < summary["saved_bytes"]["model"]
    assert any((out / "tensorboard").iterdir())


def test_checkpoint_is_a_folder_transformers_loads(tiny: MakeConfig, tmp_path: Path) -> None:
    summary = run(tiny(), tmp_path / "run")
    folder = tmp_path / "run" / summary["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("line 7 says", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "line 7 says"
    assert model(input_ids=ids).logits.isfinite().all()
    again = run(tiny(model=str(tmp_path / "run"), steps=1), tmp_path / "second")
    assert again["steps"] == 1


def test_logged_loss_is_the_language_model_loss_of_the_next_batch(tiny: MakeConfig, tmp_path: Path) -> None:
    config = tiny(steps=1)
    run(config, tmp_path / "run")
    model, tokenizer = load_model(config.model, seed=0)
    text = tokenize(read_documents(config.text), tokenizer, seq=config.seq)
    order = TrainingOrder(text.train_N, seq=config.seq, length=4, seed=config.seed)
    ids = torch.stack([order[i]["input_ids"] for i in range(4)])
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids, output_router_logits=False)
    record = read_records(tmp_path / "run" / "metrics.jsonl")[0]
    assert record["loss"] == pytest.approx(float(out.loss), rel=1e-6)
    assert record["balance_loss"] == pytest.approx(2, rel=0.2)


def test_run_learns_and_repeats_bit_for_bit(tiny: MakeConfig, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 15, "eval_every": 15, "save_every": 15, "lr": 3e-2, "guard_variance": None}
    config = tiny(**settings)
    for name in ("a", "b"):
        run(config, tmp_path / name)
    first, second = (read_records(tmp_path / name / "metrics.jsonl") for name in ("a", "b"))
    assert without_seconds(first) == without_seconds(second)
    assert first[-1]["loss"] < first[0]["loss"] - 0.5
    other = run(tiny(**settings, seed=1), tmp_path / "c")
    assert other["eval_loss"] != first[-1]["eval_loss"]


@pytest.mark.parametrize("killed_at", [1, 3, 5, 6])
def test_interrupted_run_continues_as_if_nothing_had_happened(tiny: MakeConfig, tmp_path: Path, killed_at: int) -> None:
    config = tiny(selector="pps", warmup_steps=1, ramp_steps=3)
    whole = run(config, tmp_path / "whole")
    cut = tmp_path / "cut"

    def kill(step: int, record: dict[str, Any] | None) -> None:
        if step == killed_at and record is not None:
            raise Killed

    with pytest.raises(Killed):
        run(config, cut, progress=kill)
    assert not (cut / "summary.json").exists()
    # What a kill in the middle of a write leaves: half a line, and a checkpoint without its last file.
    with open(cut / "metrics.jsonl", "a") as file:
        file.write('{"step": 99, "lo')
    (cut / "checkpoints" / "checkpoint-99").mkdir(parents=True)
    resumed = run(config, cut, resume=True)
    lines = [without_seconds(read_records(folder / "metrics.jsonl")) for folder in (tmp_path / "whole", cut)]
    for records in lines:
        records[0].pop("saved_bytes", None)
        for record in records:
            record.pop("saved_bytes", None)
    assert lines[0] == lines[1]
    assert resumed["saved_bytes"] == whole["saved_bytes"]
    assert resumed["eval_loss"] == whole["eval_loss"]
    expected, found = weights(tmp_path / "whole", 6), weights(cut, 6)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
def test_killed_process_continues_as_if_nothing_had_happened(tiny: MakeConfig, tmp_path: Path) -> None:
    config = tiny(steps=60, save_every=5)
    run(config, tmp_path / "whole")
    options = [
        f"--{key.replace('_', '-')}={value}"
        for key, value in config.to_dict().items()
        if key != "recalibration" and value
    ]
    command = [sys.executable, "-m", "lrmoe.cli", "train", "--out", str(tmp_path / "cut"), "--drop=0.25", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([*command, "--threads=1"], env=environment, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 12):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(
        [*command, "--resume", "--threads=1"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected, found = weights(tmp_path / "whole", 60), weights(tmp_path / "cut", 60)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_resume_refuses_other_settings_and_another_text(tiny: MakeConfig, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text to train on, " * 40)
    out = tmp_path / "run"
    run(tiny(text=str(text)), out)
    with pytest.raises(ValueError, match=r"begun with lr=0\.01, now 0\.02; drop=0\.25, now 0\.5"):
        prepare(tiny(text=str(text), lr=0.02, drop=0.5), out, resume=True)
    text.write_text("another text to train on, " * 40)
    with pytest.raises(ValueError, match="the text is not the one"):
        prepare(tiny(text=str(text)), out, resume=True)
    with pytest.raises(ValueError, match="no run to resume"):
        prepare(tiny(), tmp_path / "nothing", resume=True)


def test_folder_is_overwritten_on_request_only_and_keeps_what_is_not_ours(tiny: MakeConfig, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(tiny(steps=2), out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty.*--resume.*--overwrite"):
        prepare(tiny(steps=1), out)
    run(tiny(steps=1), out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert [record["step"] for record in read_records(out / "metrics.jsonl")] == [1]
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["checkpoint-1"]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds no run.*will not delete"):
        prepare(tiny(), foreign, overwrite=True)
    (foreign / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="not written by lrmoe train"):
        prepare(tiny(), foreign, overwrite=True)
    with pytest.raises(ValueError, match="is a file"):
        prepare(tiny(), foreign / "notes.txt")
    with pytest.raises(ValueError, match="exclude each other"):
        prepare(tiny(), out, overwrite=True, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "/nowhere"}, "cannot be read"),
        ({"model": "nothing"}, "neither a preset"),
        ({"seq": 65}, "max_position_embeddings=64"),
    ],
)
def test_bad_input_leaves_no_folder(tiny: MakeConfig, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(tiny(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_model_without_experts_is_refused(tiny: MakeConfig, tmp_path: Path) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=259, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="no MoE layer"):
        prepare(tiny(model=str(tmp_path / "dense")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_processes_do_not_write_into_one_folder(tiny: MakeConfig, tmp_path: Path) -> None:
    out = tmp_path / "run"
    prepared = prepare(tiny(), out)
    out.mkdir()
    with locked(out), pytest.raises(ValueError, match="in use by another lrmoe process"):
        train(prepared)
    assert list(out.iterdir()) == []


def test_gradient_checkpointing_changes_nothing_but_memory(tiny: MakeConfig, tmp_path: Path) -> None:
    plain = run(tiny(), tmp_path / "plain")
    saving = run(tiny(gradient_checkpointing=True), tmp_path / "saving")
    expected, found = weights(tmp_path / "plain", 6), weights(tmp_path / "saving", 6)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    loads = [
        [[layer["load"] for layer in record["layers"]] for record in read_records(tmp_path / name / "metrics.jsonl")]
        for name in ("plain", "saving")
    ]
    assert loads[0] == loads[1]
    assert saving["saved_bytes"]["model"] < 0.5 * plain["saved_bytes"]["model"]


def test_accumulated_microbatches_are_one_batch(tiny: MakeConfig, tmp_path: Path) -> None:
    one = run(tiny(drop=0.0), tmp_path / "one")
    two = run(tiny(drop=0.0, batch=2, grad_accum=2), tmp_path / "two")
    first, second = (read_records(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert second[0]["loss"] == pytest.approx(first[0]["loss"], rel=1e-6)
    assert second[0]["layers"][0]["load"] == first[0]["layers"][0]["load"]
    assert second[0]["layers"][0]["backwards"] == 2
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-3)


def test_bf16_autocast_trains_float32_weights(tiny: MakeConfig, tmp_path: Path) -> None:
    full = run(tiny(), tmp_path / "full")
    half = run(tiny(bf16=True), tmp_path / "half")
    assert half["train_loss"] == pytest.approx(full["train_loss"], rel=1e-2)
    assert half["train_loss"] != full["train_loss"]
    assert half["saved_bytes"]["moe"] < full["saved_bytes"]["moe"]
    assert {tensor.dtype for tensor in weights(tmp_path / "half", 6).values()} == {torch.float32}


def test_input_mode_saves_fewer_bytes(tiny: MakeConfig, tmp_path: Path) -> None:
    saved = [
        run(tiny(steps=1, save=save), tmp_path / save)["saved_bytes"]["moe"] for save in ("preactivation", "input")
    ]
    tokens, choices, width = 4 * 32, 2, 16
    # Two layers, float32: the up projection (N, 2F) of every pair is what the input mode does not keep.
    assert saved[0] - saved[1] == 2 * tokens * choices * 2 * width * 4


def test_diverged_run_stops_and_says_so(tiny: MakeConfig, tmp_path: Path) -> None:
    summary = run(tiny(lr=1e30, steps=40, save_every=40, eval_every=40, lr_schedule="constant"), tmp_path / "run")
    assert summary["diverged_at"] is not None
    assert summary["steps"] == summary["diverged_at"] < 40
    assert math.isnan(summary["eval_loss"])


def test_memorizing_validates_on_the_training_text(tiny: MakeConfig, tmp_path: Path) -> None:
    lengths = {"steps": 60, "log_every": 20, "save_every": 60, "eval_every": 60}
    config = tiny(memorize_bytes=128, lr=3e-2, guard_variance=None, **lengths)
    summary = run(config, tmp_path / "run")
    assert summary["eval_loss"] < 0.8 * read_records(tmp_path / "run" / "metrics.jsonl")[0]["loss"]
    corpus = json.loads((tmp_path / "run" / "config.json").read_text())["corpus"]
    assert corpus["validation_is_training"]
    assert corpus["train_tokens"] == 128


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0), ("batch", -1), ("seq", 1), ("seq", 2.5), ("lr", 0), ("lr", float("nan")), ("lr", "fast"),
        ("seed", -1), ("seed", 2**32), ("threads", 0), ("memorize_bytes", 0), ("lr_schedule", "none"),
        ("eval_every", True), ("weight_decay", -0.1), ("keep_checkpoints", 0), ("save_every", 15),
    ],
)  # fmt: skip
def test_bad_setting_names_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        TrainConfig(**{field: value})  # type: ignore[arg-type]


def test_settings_come_back_from_plain_values() -> None:
    config = TrainConfig(steps=7, seed=5, memorize_bytes=100)
    assert config.recalibration.seed == 5
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="missing or unknown: extra"):
        TrainConfig.from_dict({**config.to_dict(), "extra": 1})
