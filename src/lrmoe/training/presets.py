"""Names of models to train: architectures at a size for two CPU cores, or any checkpoint folder. Nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lrmoe.cluster import from_config
from lrmoe.training.checkpoints import newest_checkpoint

# Ids of the byte tokenizer: three of its own and the 256 bytes.
BYTE_VOCAB_SIZE = 259
NUM_EXPERTS = 32
"""Of each preset's MoE layers."""

# What the presets share: 128 wide, 32 experts, 4 of them per token, so that the experts are most of the compute.
_SHAPE: dict[str, Any] = {
    "vocab_size": BYTE_VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "use_cache": False,
}


def _qwen3_moe_nano() -> Any:
    """Like qwen3-moe-tiny with half the width and three layers: a fifth of the time a step, for studies of hundreds of
    runs."""
    from transformers import Qwen3MoeConfig

    narrow = {"hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16}
    return Qwen3MoeConfig(
        **{**_SHAPE, **narrow},
        intermediate_size=192,
        moe_intermediate_size=64,
        num_experts=NUM_EXPERTS,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )


def _qwen3_moe_tiny() -> Any:
    """Softmax gate, four MoE layers. The load-balancing loss is on, at ten times the coefficient of the architecture's
    own config: at 0.001 a model this small leaves a third of its experts to a few per cent of the tokens, and where it
    ends up then depends on chance more than on what is compared."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_SHAPE,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_experts=NUM_EXPERTS,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )


def _glm4_moe_tiny() -> Any:
    """Sigmoid gate with a selection bias, two of four expert groups per token, a shared expert, a dense first layer;
    three MoE layers. No balancing loss, as the architecture has none."""
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **_SHAPE,
        intermediate_size=384,
        moe_intermediate_size=128,
        n_routed_experts=NUM_EXPERTS,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        use_qk_norm=True,
        attention_bias=True,
        num_mtp_layers=0,
    )


PRESETS: dict[str, Callable[[], Any]] = {
    "qwen3-moe-tiny": _qwen3_moe_tiny,
    "glm4-moe-tiny": _glm4_moe_tiny,
    "qwen3-moe-nano": _qwen3_moe_nano,
}


def check_model(name: str) -> None:
    """Raises ValueError if the name is neither a preset nor a folder with a checkpoint."""
    if name not in PRESETS:
        checkpoint_folder(name)


# Any of these is a tokenizer, which is loaded or told to be broken; without one a text is taken as bytes.
_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint folder brings a tokenizer, whole or not."""
    return any((folder / name).exists() for name in _TOKENIZER_FILES)


def check_experts(name: str, ep: int) -> None:
    """Checks that ranks can share the experts of a model, where its name or its config.json tells how many it has.

    Raises:
        ValueError: naming the number.
    """
    experts = num_experts(name)
    if experts is not None and isinstance(ep, int) and ep > 0 and experts % ep:
        raise ValueError(
            f"the layers of model={name!r} have {experts} experts, which cannot be shared out equally to ep={ep} "
            f"ranks; give a divisor of {experts}"
        )


def num_experts(name: str) -> int | None:
    """Routed experts of a MoE layer, of a preset or as a checkpoint's config.json has it; None where it does not."""
    if name in PRESETS:
        return NUM_EXPERTS
    try:
        config = json.loads((checkpoint_folder(name) / "config.json").read_text(encoding="utf-8"))
        return from_config(config).num_experts
    except (OSError, ValueError):
        # What is wrong with the file is told by whoever loads the model.
        return None


def checkpoint_folder(name: str) -> Path:
    """The folder itself or, of a run's folder, that of its newest checkpoint; raises as :func:`check_model`."""
    given = Path(name)
    if not given.is_dir():
        raise ValueError(
            f"model={name!r} is neither a preset ({', '.join(PRESETS)}) nor a folder with a checkpoint; "
            "models are not downloaded"
        )
    folder = newest_checkpoint(given) or given
    if not (folder / "config.json").is_file():
        raise ValueError(f"model={name!r} holds no config.json; give a folder that save_pretrained wrote")
    return folder
