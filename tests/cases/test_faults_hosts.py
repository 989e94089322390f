"""What went wrong for people with Transformers' Trainer and other hosts: weights that were not restored, values that
were not printed, weights that are not what they look like, and a switch that switched nothing."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from distributed.world import run_world
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.core_model_loading import revert_weight_conversion
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import load_sharded_checkpoint

import lrmoe
from lrmoe.hosts.transformers import RecalibrationCallback

CONFIG = lrmoe.LRMoEConfig(drop=0.3)


def rows(count: int = 24) -> list[dict[str, Tensor]]:
    tokens = torch.randint(2, tiny.VOCAB, (count, 6), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


class WorseByTheStep(Trainer):
    """A Trainer whose best validation is the first one."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_loss": float(self.state.global_step)}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def trainer_of(model: PreTrainedModel, folder: Path, *, kind: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    args = TrainingArguments(output_dir=str(folder), **settings)
    return kind(model=model, args=args, train_dataset=rows(), eval_dataset=rows(2))


BEST: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}


def tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in model.state_dict().items()
    }


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


# S3: experts of one step beside dense weights of another.


@pytest.mark.parametrize("save_only_model", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_s3_the_best_model_has_the_experts_of_the_best_step(
    architecture: str, save_only_model: bool, tmp_path: Path
) -> None:
    model = tiny.build(architecture)
    trainer = trainer_of(model, tmp_path, kind=WorseByTheStep, save_only_model=save_only_model, **BEST)
    trainer.add_callback(RecalibrationCallback(lrmoe.attach(model, CONFIG)))
    trainer.train()
    best = tmp_path / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(best)
    assert not different(tensors(model), tensors(type(model).from_pretrained(best)))
    # The steps differ, so that a mix would show.
    assert different(tensors(model), tensors(type(model).from_pretrained(tmp_path / "checkpoint-4")))


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_s3_an_attached_model_takes_the_names_of_save_pretrained(architecture: str, tmp_path: Path) -> None:
    """Into the model, and through an inner part of it."""
    whole = tiny.build(architecture)
    whole.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for part in ("", "model"):
        model = tiny.build(architecture, seed=5)
        lrmoe.attach(model.get_submodule(part), CONFIG)
        assert str(model.load_state_dict(saved, strict=False)) == "<All keys matched successfully>"
        assert not different(tensors(model), tensors(whole))


def test_s3_a_checkpoint_in_files_that_part_the_experts_of_a_layer(tmp_path: Path) -> None:
    whole, model = tiny.build("qwen3_moe"), tiny.build("qwen3_moe", seed=5)
    whole.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    lrmoe.attach(model, CONFIG)
    load_sharded_checkpoint(model, str(tmp_path), strict=False)
    assert not different(tensors(model), tensors(whole))


def test_s3_names_of_the_model_itself_and_foreign_ones_load_as_ever() -> None:
    model, other = tiny.build("qwen3_moe"), tiny.build("qwen3_moe", seed=5)
    recal = lrmoe.attach(model, CONFIG)
    state = other.state_dict()
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert not different(tensors(model), tensors(other))
    del state["lm_head.weight"]
    found = model.load_state_dict({**state, "nobody.knows.this": torch.zeros(1)}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["lm_head.weight"], ["nobody.knows.this"])
    # Experts that are too few fill nothing, and are told of.
    few = {f"model.layers.0.mlp.experts.0.{name}_proj.weight": torch.zeros(24, 32) for name in ("gate", "up")}
    found = model.load_state_dict(few, strict=False)
    assert set(found.unexpected_keys) == set(few)
    assert "model.layers.0.mlp.experts.gate_up_proj" in found.missing_keys
    assert not different(tensors(model), tensors(other))
    recal.detach()
    assert not model._load_state_dict_pre_hooks
    copied = copy.deepcopy(model)
    assert not copied._load_state_dict_pre_hooks


def test_s3_where_the_best_experts_cannot_be_loaded_training_does_not_begin(tmp_path: Path) -> None:
    """Attached to single layers, no Transformers model's loading can be completed."""
    model = tiny.build("qwen3_moe")
    recal = lrmoe.attach(model.model.layers, CONFIG)
    trainer = trainer_of(model, tmp_path, kind=WorseByTheStep, **BEST)
    trainer.add_callback(RecalibrationCallback(recal))
    with pytest.raises(
        ValueError, match=r"would end with mixed weights.*experts\.down_proj \(4 weights\).*attach to the"
    ):
        trainer.train()
    assert recal.clock.step == 0


def test_s3_a_best_model_that_is_not_restored_is_told_and_the_training_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgetful(WorseByTheStep):
        def _load_best_model(self) -> None:
            pass

    model = tiny.build("qwen3_moe")
    trainer = trainer_of(model, tmp_path, kind=Forgetful, **BEST)
    trainer.add_callback(RecalibrationCallback(lrmoe.attach(model, CONFIG)))
    trainer.train()
    (record,) = [r for r in caplog.records if r.name == "lrmoe" and r.levelno == logging.ERROR]
    assert "not the best one" in record.message
    assert f"from_pretrained('{tmp_path / 'checkpoint-2'}')" in record.message


def load_over_ranks(group: Any) -> list[str]:
    whole, other = tiny.build("qwen3_moe"), tiny.build("qwen3_moe", seed=5)
    parts = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="lrmoe")
    model = type(whole).from_pretrained(
        None, config=other.config, state_dict=other.state_dict(), distributed_config=parts
    )
    lrmoe.attach(model, CONFIG)
    model.load_state_dict(revert_weight_conversion(whole, whole.state_dict()))
    return different(tensors(model), tensors(whole))


def test_s3_over_ranks_too() -> None:
    assert run_world(2, load_over_ranks, timeout=180.0) == [[], []]


# W10: what a resumed run says.


def resumed(
    folder: Path, weights_of: Path | None, checkpoint: Path | bool, kind: type[Trainer] = Trainer
) -> PreTrainedModel:
    model = tiny.build("qwen3_moe", seed=5)
    if weights_of is not None:
        model = type(model).from_pretrained(weights_of).train()
        for weight in model.parameters():
            # Out of the file's memory, where products may round in another way.
            weight.data = weight.data.clone()
    trainer = trainer_of(model, folder, kind=kind)
    trainer.add_callback(RecalibrationCallback(lrmoe.attach(model, CONFIG)))
    trainer.train(resume_from_checkpoint=checkpoint if isinstance(checkpoint, bool) else str(checkpoint))
    return model


@pytest.mark.parametrize("loaded", [True, False])
def test_w10_a_resume_says_what_it_goes_on_from_and_lists_nothing_as_missing(
    loaded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = tiny.build("qwen3_moe")
    trainer = trainer_of(whole, tmp_path, save_strategy="steps", save_steps=2)
    trainer.add_callback(RecalibrationCallback(lrmoe.attach(whole, CONFIG)))
    trainer.train()
    halfway = tmp_path / "checkpoint-2"
    caplog.clear()
    model = resumed(tmp_path, halfway if loaded else None, halfway)
    lines = [record.message for record in caplog.records if record.name == "lrmoe"]
    assert lines == [
        f"training goes on from {halfway}, step 2: the 4 weights of its MoE layers are those saved there",
    ]
    assert "missing keys" not in capfd.readouterr().err
    assert not different(tensors(model), tensors(whole))
    # Somewhere else the folder cannot be told, and is not made up.
    caplog.clear()
    resumed(tmp_path / "elsewhere", None, halfway)
    assert next(r.message for r in caplog.records if r.name == "lrmoe").startswith(
        "training goes on from the checkpoint at step 2, step 2: the 4 weights"
    )


def test_w10_other_experts_are_still_refused(tmp_path: Path) -> None:
    class Forgetful(Trainer):
        def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            pass

    whole = tiny.build("qwen3_moe")
    trainer = trainer_of(whole, tmp_path, save_strategy="steps", save_steps=2)
    trainer.add_callback(RecalibrationCallback(lrmoe.attach(whole, CONFIG)))
    trainer.train()
    with pytest.raises(ValueError, match=r"experts\.\w+_proj is not what it was .* from_pretrained\(<that checkpoint>"):
        resumed(tmp_path, None, tmp_path / "checkpoint-2", kind=Forgetful)


# W5: metrics on the console.


@pytest.mark.parametrize("added", ["add_callback", "callbacks", "add_to"])
def test_w5_metrics_are_printed_however_the_callback_was_added(
    added: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.build("qwen3_moe")
    callback = RecalibrationCallback(lrmoe.attach(model, CONFIG))
    heard: list[str] = []

    class Others(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            heard.append("epoch")

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            heard.append("with" if "lrmoe/kept_share" in logs else "without")

    trainer = trainer_of(model, tmp_path, max_steps=1)
    trainer.add_callback(Others())
    if added == "callbacks":
        # As Trainer.__init__ places what it is given: after its own flow, before its printer.
        trainer.callback_handler.callbacks.insert(1, callback)
    elif added == "add_to":
        callback.add_to(trainer)
    else:
        trainer.add_callback(callback)
    trainer.add_callback(Others())
    trainer.train()
    printed = capsys.readouterr().out
    assert printed.count("lrmoe/kept_share") == 1
    assert "'lrmoe/kept_share': '0.7" in printed
    # Nobody was passed over, nobody called twice, while the callback moved.
    assert heard == ["epoch", "epoch", "with", "with", "without", "without"]
