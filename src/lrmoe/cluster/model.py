"""Dimensions of a mixture-of-experts transformer: all that memory and time on paper need to know of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrmoe.config import require_count

_COUNTS = ("dense_layers", "dense_dim", "shared_expert_dim", "vocab")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model's dimensions.

    Args:
        name: shown in tables.
        dim: D, width of the residual stream.
        expert_dim: F, width of a routed expert.
        num_experts: E, routed experts of a MoE layer.
        top_k: K, routed experts of a token.
        moe_layers: layers with routed experts.
        dense_layers: layers with a dense feed-forward instead.
        dense_dim: width of those; 0 if there are none.
        shared_expert_dim: width of the shared experts of a MoE layer together, 0 for none.
        vocab: rows of the embedding.
        tied_embeddings: the output projection is the embedding.
        num_heads, num_kv_heads, head_dim: of the attention; ``head_dim`` of a query.
        attention_params: parameters of one layer's attention; None counts query, key, value and output projection.
        expert_bias: routed experts have biases: 2 F + D parameters more.
        router_bias: the router has one number more for each expert, a bias or a selection bias.
        source: where the numbers are from.
    """

    name: str
    dim: int
    expert_dim: int
    num_experts: int
    top_k: int
    moe_layers: int
    dense_layers: int = 0
    dense_dim: int = 0
    shared_expert_dim: int = 0
    vocab: int = 0
    tied_embeddings: bool = False
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    attention_params: int | None = None
    expert_bias: bool = False
    router_bias: bool = False
    source: str = "given"

    def __post_init__(self) -> None:
        for field in ("dim", "expert_dim", "num_experts", "top_k", "moe_layers"):
            object.__setattr__(self, field, require_count(field, getattr(self, field), least=1))
        for field in (*_COUNTS, "num_heads", "num_kv_heads", "head_dim"):
            object.__setattr__(self, field, require_count(field, getattr(self, field)))
        if self.attention_params is not None:
            require_count("attention_params", self.attention_params)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} is more than num_experts={self.num_experts}")
        if self.dense_layers and not self.dense_dim:
            raise ValueError(f"dense_layers={self.dense_layers} need their width: dense_dim={self.dense_dim}")

    @property
    def layers(self) -> int:
        """All of them."""
        return self.moe_layers + self.dense_layers

    @property
    def expert_params(self) -> int:
        """Of one routed expert: 3 D F, and 2 F + D with biases."""
        bias = 2 * self.expert_dim + self.dim if self.expert_bias else 0
        return 3 * self.dim * self.expert_dim + bias

    @property
    def dense_params(self) -> int:
        """All parameters but the routed experts': embeddings, attention, norms, routers, shared experts, dense layers.

        Norms: two a layer and one at the end; what attention adds (query and key norms) is left out.
        """
        attention = self.attention_params
        if attention is None:
            attention = self.dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        router = self.num_experts * (self.dim + self.router_bias)
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab * self.dim
        moe = self.moe_layers * (router + 3 * self.dim * self.shared_expert_dim)
        dense = self.dense_layers * 3 * self.dim * self.dense_dim
        return embeddings + self.layers * (attention + 2 * self.dim) + self.dim + moe + dense

    @property
    def params(self) -> int:
        """All parameters."""
        return self.dense_params + self.moe_layers * self.num_experts * self.expert_params

    @property
    def active_params(self) -> int:
        """Parameters that a token meets, its embedding's table included."""
        return self.dense_params + self.moe_layers * self.top_k * self.expert_params


def from_config(config: Mapping[str, Any], *, name: str | None = None) -> ModelShape:
    """The dimensions in a Transformers ``config.json``, read as plain JSON.

    Args:
        config: of ``model_type`` qwen3_moe, glm4_moe, mixtral, deepseek_v3, gpt_oss or olmoe; of a model with several
            parts the ``text_config`` counts.
        name: default the model type.

    Raises:
        ValueError: if the model type is another one, or an entry is missing or no number it can be.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config is {type(config).__name__}; it must be the object that config.json holds")
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise ValueError(f"model_type={kind!r} is not known; it may be {', '.join(_READERS)}")
    entries = _Entries(config, kind)
    heads = entries.count("num_attention_heads")
    shape: dict[str, Any] = {
        "name": name or kind,
        "dim": entries.count("hidden_size"),
        "vocab": entries.count("vocab_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "num_heads": heads,
        "num_kv_heads": entries.count("num_key_value_heads", default=heads),
        "source": f"config.json of model type {kind}",
    }
    shape["head_dim"] = entries.count("head_dim", default=shape["dim"] // max(heads, 1))
    return ModelShape(**{**shape, **_READERS[kind](entries, shape)})


class _Entries:
    """A config.json whose errors name the entry."""

    def __init__(self, config: Mapping[str, Any], kind: str) -> None:
        self.config = config
        self.kind = kind

    def count(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """The first of the names that is there."""
        for name in names:
            if self.config.get(name) is not None:
                return require_count(f"config.json: {name}", self.config[name], least=least)
        if default is None:
            raise ValueError(f"config.json of model type {self.kind} has no {' or '.join(map(repr, names))}; add it")
        return default


_Reader = Callable[[_Entries, Mapping[str, Any]], dict[str, Any]]


def _all_moe(entries: _Entries, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Mixtral, OLMoE and gpt-oss: every layer has experts, whose width is the ``intermediate_size``."""
    found: dict[str, Any] = {
        "expert_dim": entries.count("intermediate_size"),
        "num_experts": entries.count("num_local_experts", "num_experts"),
        "top_k": entries.count("num_experts_per_tok", "experts_per_token"),
        "moe_layers": entries.count("num_hidden_layers"),
    }
    if entries.kind == "gpt_oss":
        heads, kv_heads, head_dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
        wide = head_dim * (heads + 2 * kv_heads)
        # Biases of all four projections, and a sink for each head.
        attention = shape["dim"] * (wide + head_dim * heads) + wide + shape["dim"] + heads
        found |= {"expert_bias": True, "router_bias": True, "attention_params": attention}
    return found


def _qwen3(entries: _Entries, shape: Mapping[str, Any]) -> dict[str, Any]:
    layers = entries.count("num_hidden_layers")
    every = entries.count("decoder_sparse_step", default=1, least=1)
    without = set(entries.config.get("mlp_only_layers") or [])
    moe = sum(layer not in without and (layer + 1) % every == 0 for layer in range(layers))
    return {
        "expert_dim": entries.count("moe_intermediate_size"),
        "num_experts": entries.count("num_experts", "num_local_experts"),
        "top_k": entries.count("num_experts_per_tok"),
        "moe_layers": moe,
        "dense_layers": layers - moe,
        "dense_dim": entries.count("intermediate_size") if moe < layers else 0,
    }


def _glm4(entries: _Entries, shape: Mapping[str, Any]) -> dict[str, Any]:
    """GLM-4.5 and DeepSeek-V3: dense layers first, then routed and shared experts."""
    layers, dense = entries.count("num_hidden_layers"), entries.count("first_k_dense_replace")
    expert_dim = entries.count("moe_intermediate_size")
    return {
        "expert_dim": expert_dim,
        "num_experts": entries.count("n_routed_experts", "num_experts", "num_local_experts"),
        "top_k": entries.count("num_experts_per_tok"),
        "moe_layers": layers - min(dense, layers),
        "dense_layers": min(dense, layers),
        "dense_dim": entries.count("intermediate_size") if dense else 0,
        "shared_expert_dim": expert_dim * entries.count("n_shared_experts", default=0),
        "router_bias": True,
    }


def _deepseek(entries: _Entries, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Multi-head latent attention: queries, and keys with values, through a narrow projection each."""
    dim, heads = shape["dim"], shape["num_heads"]
    rope, plain, value = (entries.count(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    narrow, narrow_q = entries.count("kv_lora_rank"), entries.count("q_lora_rank", default=0)
    query = heads * (plain + rope)
    attention = dim * query if not narrow_q else narrow_q * (dim + query)
    attention += dim * (narrow + rope) + narrow * heads * (plain + value) + heads * value * dim
    return {**_glm4(entries, shape), "attention_params": attention, "head_dim": plain + rope}


_READERS: dict[str, _Reader] = {
    "qwen3_moe": _qwen3,
    "glm4_moe": _glm4,
    "mixtral": _all_moe,
    "deepseek_v3": _deepseek,
    "gpt_oss": _all_moe,
    "olmoe": _all_moe,
}

PRESETS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="qwen3-30b-a3b",
            dim=2048,
            expert_dim=768,
            num_experts=128,
            top_k=8,
            moe_layers=48,
            vocab=151936,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            source="config.json of Qwen/Qwen3-30B-A3B; 30.5 billion parameters, 3.3 billion active (its model card)",
        ),
        ModelShape(
            name="glm-4.5-air",
            dim=4096,
            expert_dim=1408,
            num_experts=128,
            top_k=8,
            moe_layers=45,
            dense_layers=1,
            dense_dim=10944,
            shared_expert_dim=1408,
            vocab=151552,
            num_heads=96,
            num_kv_heads=8,
            head_dim=128,
            router_bias=True,
            source="config.json of zai-org/GLM-4.5-Air, without its layer for multi-token prediction; 106 billion "
            "parameters, 12 billion active without embeddings (GLM-4.5, arXiv 2508.06471)",
        ),
    )
}
"""By name, with their published dimensions."""


def model(which: str | Path) -> ModelShape:
    """A preset by name, or the dimensions in a Transformers ``config.json`` (the file, or a folder that holds one).

    Raises:
        ValueError: if it is neither, or the file cannot be understood; see :func:`from_config`.
    """
    if isinstance(which, str) and which.lower() in PRESETS:
        return PRESETS[which.lower()]
    path = Path(which)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model={str(which)!r} is neither a preset ({', '.join(PRESETS)}) nor a config.json or a folder with one"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from None
    return from_config(config, name=path.resolve().parent.name if path.name == "config.json" else path.stem)
