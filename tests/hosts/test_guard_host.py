"""The guard in Transformers models: a recompute drops what its forward dropped, and the Trainer's log tells."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tiny_transformers import VOCAB, batch, build
from transformers import Trainer, TrainingArguments

import lrmoe
from lrmoe.hosts.transformers import RecalibrationCallback
from lrmoe.recalibration.guard import WINDOW


def test_a_recompute_after_the_guard_stopped_a_layer_is_that_of_its_forward() -> None:
    gradients = []
    for stopped_in_between in (False, True):
        model = build("qwen3_moe")
        model.config.output_router_logits = False
        model.activation_checkpointing_enable({"use_reentrant": False})
        recal = lrmoe.attach(model, lrmoe.LRMoEConfig(drop=0.4))
        loss = model(**batch()).loss
        if stopped_in_between:
            recal.clock.set_exact([True, False])
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert [float(control.drop) for control in recal.layers.values()] == [0.0 if stopped_in_between else 0.4, 0.4]
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_the_trainer_logs_how_many_layers_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build("qwen3_moe")
    # Less than dropping costs in any layer.
    recal = lrmoe.attach(model, lrmoe.LRMoEConfig(drop=0.4, guard_variance=1e-9))
    tokens = torch.randint(2, VOCAB, (16, 8), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=WINDOW + 2,
        logging_steps=WINDOW // 2,
        per_device_train_batch_size=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    callback = RecalibrationCallback(recal)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    )
    with caplog.at_level(logging.WARNING, logger="lrmoe"):
        trainer.train()
    logged = [log["lrmoe/guarded_layers"] for log in trainer.state.log_history if "lrmoe/guarded_layers" in log]
    assert logged == [0.0, 2.0]
    assert callback.metrics is not None
    assert [event["layer"] for event in callback.metrics["guard_events"]] == list(recal.layers)
    assert f"step {WINDOW}: dropping costs too much in 2 of 2 MoE layers" in caplog.text
