"""The Trainer callback: position, schedule, logs, checkpoints and resume."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_transformers import VOCAB, build
from transformers import Trainer, TrainerCallback, TrainingArguments

import lrmoe
from lrmoe.hosts.trainer_callback import LOGGED, RecalibrationCallback

CONFIG = lrmoe.LRMoEConfig(drop=0.3, warmup_steps=1, ramp_steps=2)
KEYS = {f"lrmoe/{name}" for name in LOGGED}


def rows(count: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, VOCAB, (count, 10), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def make(
    folder: Path,
    *,
    config: lrmoe.LRMoEConfig = CONFIG,
    callback: bool = True,
    optimizer: bool = False,
    weights_of: Path | None = None,
    **arguments: Any,
) -> tuple[Trainer, lrmoe.Recalibrator]:
    model = build("qwen3_moe")
    if weights_of is not None:
        # Copied: where from_pretrained leaves weights in a mapped file, they lie at other addresses, and round by them.
        loaded = type(model).from_pretrained(weights_of, experts_implementation="eager")
        model.load_state_dict(loaded.state_dict())
    settings: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 5,
    }
    args = TrainingArguments(output_dir=str(folder), **{**settings, **arguments})
    sgd = torch.optim.SGD(model.parameters(), lr=0.05) if optimizer else None
    recal = lrmoe.attach(model, config, optimizer=sgd)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows(),
        eval_dataset=rows(4),
        callbacks=[RecalibrationCallback(recal)] if callback else [],
        optimizers=(sgd, None),
    )
    return trainer, recal


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_each_step_has_its_own_draws_and_drop(tmp_path: Path) -> None:
    trainer, recal = make(tmp_path)
    with lrmoe.recording() as calls:
        trainer.train()
    assert [call.step for call in calls if call.layer == 0] == [0, 1, 2, 3, 4, 5]
    assert {call.microbatch for call in calls} == {0}
    kept = [int(call.kept_TK.sum()) for call in calls if call.layer == 0]
    assert kept == [40, 34, 28, 28, 28, 28]
    assert recal.clock.step == 6
    assert recal.config.total_steps == 6


def test_microbatches_of_an_accumulated_step_draw_apart(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path, gradient_accumulation_steps=2, max_steps=2, config=lrmoe.LRMoEConfig(drop=0.3))
    trainer.train_dataset = rows(1) * 64  # The same row always, so that only the draw can differ.
    with lrmoe.recording() as calls:
        trainer.train()
    first = [call for call in calls if call.layer == 0]
    assert [(call.step, call.microbatch) for call in first] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert not torch.equal(first[0].kept_TK, first[1].kept_TK)


@pytest.mark.parametrize("kind", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_checkpointed_training_is_the_same_training(tmp_path: Path, kind: dict[str, bool]) -> None:
    found = []
    for extra in ({}, {"activation_checkpointing": True, "activation_checkpointing_kwargs": kind}):
        trainer, _ = make(tmp_path, gradient_accumulation_steps=2, max_steps=3, **extra)
        trainer.model.config.output_router_logits = False
        trainer.train()
        found.append(weights(trainer))
    assert_same(found[1], found[0])


def test_a_resumed_run_is_the_uninterrupted_run(tmp_path: Path) -> None:
    whole, _ = make(tmp_path / "whole", save_strategy="steps", save_steps=3)
    whole.train()
    expected = weights(whole)
    halfway = tmp_path / "whole" / "checkpoint-3"
    again, recal = make(tmp_path / "again", save_strategy="steps", save_steps=3, weights_of=halfway)
    with lrmoe.recording() as calls, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*recalibrator state.*")
        again.train(resume_from_checkpoint=str(halfway))
    assert [call.step for call in calls if call.layer == 0] == [3, 4, 5]
    assert recal.clock.step == 6
    assert_same(weights(again), expected)
    # The draws matter: with others the run ends elsewhere.
    other, _ = make(tmp_path / "other", config=lrmoe.LRMoEConfig(drop=0.3, warmup_steps=1, ramp_steps=2, seed=1))
    other.train()
    assert not torch.equal(weights(other)["lm_head.weight"], expected["lm_head.weight"])


def test_the_state_lies_in_the_checkpoint(tmp_path: Path) -> None:
    trainer, recal = make(tmp_path, save_strategy="steps", save_steps=3)
    trainer.train()
    stored = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    saved = stored["stateful_callbacks"]["RecalibrationCallback"]["attributes"]["saved"]
    assert saved["recalibrator"]["step"] == 3
    assert saved["recalibrator"]["layers"] == list(recal.layers)
    assert saved["recalibrator"]["config"] == {**CONFIG.to_dict(), "total_steps": 6}


def test_restoring_callbacks_from_the_checkpoint_works_too(tmp_path: Path) -> None:
    whole, _ = make(tmp_path / "whole", save_strategy="steps", save_steps=3)
    whole.train()
    halfway = tmp_path / "whole" / "checkpoint-3"
    again, _ = make(tmp_path / "again", restore_callback_states_from_checkpoint=True, weights_of=halfway)
    again.train(resume_from_checkpoint=str(halfway))
    assert_same(weights(again), weights(whole))
    assert set(again.state.log_history[-2]) >= KEYS
    assert again.state.log_history[-2]["step"] == 6


def test_a_resumed_run_needs_no_weights_loaded_beforehand(tmp_path: Path) -> None:
    """The Trainer loads a checkpoint's weights by name, and save_pretrained has renamed those of the experts."""
    whole, _ = make(tmp_path, save_strategy="steps", save_steps=3)
    whole.train()
    again, _ = make(tmp_path)
    with torch.no_grad():
        for weight in again.model.parameters():
            weight.mul_(0.5)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(weights(again), weights(whole))


def test_resuming_a_run_that_had_no_recalibration_says_so(tmp_path: Path) -> None:
    plain, recal = make(tmp_path, callback=False, save_strategy="steps", save_steps=3)
    recal.detach()
    plain.train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    trainer, recal = make(tmp_path, save_strategy="steps", save_steps=3)
    with lrmoe.recording() as calls, pytest.warns(UserWarning, match="checkpoint at step 3 has no recalibrator state"):
        trainer.train(resume_from_checkpoint=True)
    assert [call.step for call in calls if call.layer == 0] == [3, 4, 5]
    stored = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert stored["stateful_callbacks"]["RecalibrationCallback"]["attributes"]["saved"]["recalibrator"]["step"] == 6


def test_resuming_with_another_seed_is_refused(tmp_path: Path) -> None:
    whole, _ = make(tmp_path, save_strategy="steps", save_steps=3)
    whole.train()
    other, _ = make(tmp_path, config=lrmoe.LRMoEConfig(drop=0.3, seed=9))
    with pytest.raises(ValueError, match="saved with seed=0, this recalibrator has seed=9"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_logs_carry_the_metrics_of_training_steps_only(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path, eval_strategy="steps", eval_steps=3)
    trainer.train()
    training = [entry for entry in trainer.state.log_history if "loss" in entry]
    others = [entry for entry in trainer.state.log_history if "loss" not in entry]
    assert len(training) == 6
    assert len(others) == 3
    assert all(set(entry) >= KEYS for entry in training)
    assert not any(KEYS & set(entry) for entry in others)
    assert [entry["lrmoe/drop"] for entry in training] == pytest.approx([0.0, 0.15, 0.3, 0.3, 0.3, 0.3])
    assert [entry["lrmoe/kept_share"] for entry in training] == pytest.approx([1.0, 0.85, 0.7, 0.7, 0.7, 0.7])
    assert all(0.7 < entry["lrmoe/kept_importance_share"] <= 1 for entry in training)
    assert all(entry["lrmoe/load_max_over_mean"] >= 1 for entry in training)


def test_added_first_reporters_see_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "events"
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(logs))
    trainer, recal = make(tmp_path / "run", callback=False, report_to=["tensorboard"])
    callback = RecalibrationCallback(recal).add_to(trainer)
    trainer.train()
    events = EventAccumulator(str(next(logs.rglob("events.*")).parent))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"train/{key}" for key in KEYS} <= tags
    assert [e.step for e in events.Scalars("train/lrmoe/kept_share")] == [1, 2, 3, 4, 5, 6]
    assert callback.metrics is not None
    assert list(callback.metrics["layers"]) == list(recal.layers)
    with pytest.raises(ValueError, match="already has a RecalibrationCallback"):
        RecalibrationCallback(recal).add_to(trainer)


def test_callbacks_that_follow_see_the_metrics(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    class Later(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            seen.append(set(logs))

    trainer, _ = make(tmp_path, max_steps=2)
    trainer.add_callback(Later())
    trainer.train()
    assert seen[0] >= KEYS


def test_the_dense_tail_learns_the_length_of_the_run(tmp_path: Path) -> None:
    trainer, recal = make(tmp_path, config=lrmoe.LRMoEConfig(drop=0.3, final_dense_steps=2))
    with pytest.raises(ValueError, match="final_dense_steps=2 needs total_steps"):
        trainer.model(**{k: v[None] for k, v in rows(1)[0].items()})
    with lrmoe.recording() as calls:
        trainer.train()
    assert [int(call.kept_TK.sum()) for call in calls if call.layer == 0] == [28, 28, 28, 28, 40, 40]
    assert recal.config.total_steps == 6


def test_training_again_starts_the_schedule_anew(tmp_path: Path) -> None:
    trainer, recal = make(tmp_path, config=lrmoe.LRMoEConfig(drop=0.3, final_dense_steps=1), max_steps=3)
    trainer.train()
    trainer.args.max_steps = 4
    with lrmoe.recording() as calls:
        trainer.train()
    assert [(c.step, int(c.kept_TK.sum())) for c in calls if c.layer == 0] == [(0, 28), (1, 28), (2, 28), (3, 40)]
    assert recal.config.total_steps == 4


def test_an_optimizer_that_steps_the_recalibrator_steps_it_once(tmp_path: Path) -> None:
    trainer, recal = make(tmp_path, optimizer=True, max_steps=3)
    with lrmoe.recording() as calls:
        trainer.train()
    assert [call.step for call in calls if call.layer == 0] == [0, 1, 2]
    assert recal.clock.step == 3


def test_without_an_argument_the_models_own_recalibrator_is_used(tmp_path: Path) -> None:
    trainer, recal = make(tmp_path, callback=False, max_steps=2)
    trainer.add_callback(RecalibrationCallback)
    trainer.train()
    assert recal.clock.step == 2
    trainer, recal = make(tmp_path, callback=False, max_steps=2)
    recal.detach()
    trainer.add_callback(RecalibrationCallback)
    with pytest.raises(ValueError, match=r"no recalibrator is attached .* call lrmoe\.attach"):
        trainer.train()


def test_several_devices_in_one_process_are_refused(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path)
    trainer.args._n_gpu = 2
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, RecalibrationCallback))
    with pytest.raises(ValueError, match="2 GPUs in one process"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
