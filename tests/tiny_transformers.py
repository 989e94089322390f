"""Tiny, randomly initialised models of every architecture the Transformers host supports."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

_COMMON: dict[str, Any] = {
    "vocab_size": 264,  # room for the byte tokenizer, which a folder without its own is given
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def _qwen3_moe() -> AutoConfig:
    return Qwen3MoeConfig(
        **_COMMON, head_dim=8, intermediate_size=48, moe_intermediate_size=24, num_experts=6, output_router_logits=True
    )


def _glm4_moe() -> AutoConfig:
    return Glm4MoeConfig(
        **_COMMON,
        head_dim=8,
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    )


def _mixtral() -> AutoConfig:
    return MixtralConfig(**_COMMON, intermediate_size=24, num_local_experts=6)


def _deepseek_v3() -> AutoConfig:
    heads = {**_COMMON, "num_key_value_heads": 4}
    return DeepseekV3Config(
        **heads,
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )


def _olmoe() -> AutoConfig:
    return OlmoeConfig(**_COMMON, intermediate_size=24, num_experts=6)


def _gpt_oss() -> AutoConfig:
    return GptOssConfig(**_COMMON, head_dim=8, intermediate_size=24, num_local_experts=6, sliding_window=8)


CONFIGS = {
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
}
ARCHITECTURES = list(CONFIGS)
VOCAB = _COMMON["vocab_size"]


def build(architecture: str, *, implementation: str = "eager", seed: int = 0, std: float = 0.2) -> PreTrainedModel:
    """A float32 model in training mode; weights are spread enough for routing, biases and clamps to matter."""
    torch.manual_seed(seed)
    config = CONFIGS[architecture]()
    config.initializer_range = std
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and parameter.std() == 0:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def batch(*, rows: int = 3, length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Token ids and labels of a full batch."""
    tokens = torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded(data: dict[str, torch.Tensor], lengths: list[int], *, side: str) -> dict[str, torch.Tensor]:
    """The batch with row b cut to ``lengths[b]`` tokens and padded on one side, labels ignored there."""
    length = data["input_ids"].shape[1]
    place = torch.arange(length).expand(len(lengths), length)
    cut = torch.tensor(lengths).unsqueeze(1)
    mask = (place < cut) if side == "right" else (place >= length - cut)
    return {
        "input_ids": data["input_ids"].masked_fill(~mask, 0),
        "labels": data["labels"].masked_fill(~mask, -100),
        "attention_mask": mask.long(),
    }


def gradients(model: PreTrainedModel, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradient of every parameter that has one; the model's own are cleared."""
    model.zero_grad(set_to_none=True)
    loss = model(**data).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Over all parameters, the largest deviation relative to the parameter's largest gradient."""
    assert found.keys() == expected.keys()
    return max(
        ((found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-30)).item()
        for name in expected
    )
