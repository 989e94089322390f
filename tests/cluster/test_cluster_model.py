"""Dimensions from presets and from config.json: counted against the models themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from lrmoe.cluster import ModelShape, from_config, model

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}
ROUTED = {"moe_intermediate_size": 32, "head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3MoeConfig": {
        **SMALL,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "head_dim": 32,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "Glm4MoeConfig": {**SMALL, **ROUTED, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    "MixtralConfig": {**SMALL, "num_local_experts": 8, "tie_word_embeddings": True},
    "DeepseekV3Config": {
        **SMALL,
        **ROUTED,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "GptOssConfig": {**SMALL, "num_local_experts": 8, "head_dim": 16},
    "OlmoeConfig": {**SMALL, "num_experts": 8},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, kind)(**CONFIGS[kind])
    config.save_pretrained(tmp_path / "mine")
    shape = model(tmp_path / "mine")
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    experts = sum(p.numel() for name, p in whole.named_parameters() if ".experts." in name)
    assert shape.name == "mine"
    assert shape.moe_layers * shape.num_experts * shape.expert_params == experts
    # Left out: norms of queries and keys.
    assert shape.params == pytest.approx(sum(p.numel() for p in whole.parameters()), rel=2e-3)
    assert (shape.dim, shape.num_experts, shape.top_k, shape.layers) == (64, 8, 2, 4)


def test_dense_layers_are_told_from_others() -> None:
    qwen = from_config(transformers.Qwen3MoeConfig(**CONFIGS["Qwen3MoeConfig"]).to_dict())
    # Every second layer has experts, but for number 3, which is told not to.
    assert (qwen.moe_layers, qwen.dense_layers, qwen.dense_dim) == (1, 3, 96)
    glm = from_config(transformers.Glm4MoeConfig(**CONFIGS["Glm4MoeConfig"]).to_dict())
    assert (glm.moe_layers, glm.dense_layers, glm.shared_expert_dim) == (3, 1, 64)


@pytest.mark.parametrize(
    ("name", "total", "active"), [("qwen3-30b-a3b", 30.5e9, 3.3e9), ("GLM-4.5-Air", 106e9, 12e9 + 2 * 151552 * 4096)]
)
def test_presets_have_their_published_sizes(name: str, total: float, active: float) -> None:
    shape = model(name)
    assert shape.params == pytest.approx(total, rel=0.01)
    assert shape.active_params == pytest.approx(active, rel=0.02)
    assert "config.json" in shape.source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not known; it may be qwen3_moe"),
        ({"num_experts_per_tok": None}, "config.json of model type mixtral has no 'num_experts_per_tok'"),
        ({"hidden_size": "64"}, "config.json: hidden_size='64' must be an integer"),
        ({"num_experts_per_tok": 9}, "top_k=9 is more than num_experts=8"),
        ({"num_hidden_layers": 0}, "moe_layers=0 must be an integer >= 1"),
    ],
)
def test_a_wrong_config_is_named(change: dict[str, Any], message: str) -> None:
    config = {**SMALL, "model_type": "mixtral", "num_local_experts": 8, **change}
    with pytest.raises(ValueError, match=message):
        from_config(config)


def test_what_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither a preset \(qwen3-30b-a3b, glm-4.5-air\)"):
        model("gpt-17")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON file"):
        model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="config is list"):
        model(tmp_path / "config.json")
    with pytest.raises(ValueError, match="dense_layers=1 need their width"):
        ModelShape(name="m", dim=8, expert_dim=8, num_experts=2, top_k=1, moe_layers=1, dense_layers=1)
