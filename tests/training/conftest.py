"""A model and a text small enough that a training run takes a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lrmoe import LRMoEConfig
from lrmoe.training.config import TrainConfig

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder: two MoE layers, four experts, two per token."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 13 KB whose lines differ."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} says {i * i % 97} and {i * 31 % 89}\n" for i in range(500)))
    return path


@pytest.fixture
def tiny(tiny_model: Path, tiny_text: Path) -> Callable[..., TrainConfig]:
    """Makes a run of six short steps; keywords change its fields, those of the recalibration included."""
    base = TrainConfig(
        model=str(tiny_model),
        text=str(tiny_text),
        steps=6,
        batch=4,
        seq=32,
        lr=1e-2,
        lr_warmup_steps=2,
        log_every=1,
        eval_every=3,
        eval_sequences=8,
        save_every=2,
        recalibration=LRMoEConfig(drop=0.25),
    )

    def make(**changes: Any) -> TrainConfig:
        own = {
            key: changes.pop(key) for key in list(changes) if key in LRMoEConfig.__dataclass_fields__ and key != "seed"
        }
        return replace(base, recalibration=replace(base.recalibration, **own), **changes)

    return make
