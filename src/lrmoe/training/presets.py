"""Models to train: architectures at a size for two CPU cores, or any checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lrmoe.training.checkpoints import newest_checkpoint
from lrmoe.training.tokenizer import BYTE_VOCAB_SIZE, byte_tokenizer, load_tokenizer

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
        num_experts=32,
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
        num_experts=32,
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
        n_routed_experts=32,
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


def load_model(name: str, *, seed: int, distributed: Any = None) -> tuple[PreTrainedModel, Any]:
    """A causal language model in float32, ready to be attached, and its tokenizer.

    Args:
        name: a preset, initialised from ``seed``; or a folder with a checkpoint in Transformers' format; or the folder
            of a finished or interrupted ``lrmoe train`` run, whose newest checkpoint is taken. Nothing is downloaded.
        seed: of a preset's initial weights. The global generator is left as it was.
        distributed: a Transformers ``DistributedConfig``: every rank calls, and gets its part of the model.

    Raises:
        ValueError: if the name is neither, or the folder cannot be loaded.
    """
    if name in PRESETS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(PRESETS[name]())
        if distributed is not None:
            # Transformers distributes models only as it loads them.
            model = type(model).from_pretrained(
                None,
                config=model.config,
                state_dict=model.state_dict(),
                dtype=torch.float32,
                distributed_config=distributed,
            )
            # It saves a model in the form it was loaded from, unless it does not know of any: then one key per expert.
            vars(model).pop("_weight_conversions", None)
        return model, byte_tokenizer()
    folder = _folder_of(name)
    model = load_weights(folder, distributed=distributed)
    return model, load_tokenizer(folder, model.config.get_text_config().vocab_size)


def load_outline(name: str) -> tuple[PreTrainedModel, Any]:
    """What :func:`load_model` loads, without its weights: the model is on the meta device.

    Raises:
        ValueError: as there, for what can be told without reading the weights.
    """
    if name in PRESETS:
        config, tokenizer = PRESETS[name](), byte_tokenizer()
    else:
        folder = _folder_of(name)
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # Whatever a broken or foreign folder makes the library raise.
            raise ValueError(f"model={name!r} cannot be loaded: {' '.join(str(error).split())}") from error
        tokenizer = load_tokenizer(folder, config.get_text_config().vocab_size)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config), tokenizer


def check_length(model: PreTrainedModel, seq: int) -> None:
    """Raises ValueError if the sequences are longer than the model takes."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and seq > limit:
        raise ValueError(f"seq={seq} is longer than the model's max_position_embeddings={limit}; lower seq")


def _folder_of(name: str) -> Path:
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


def load_weights(folder: Path, *, distributed: Any = None) -> PreTrainedModel:
    """The model of a checkpoint folder, in float32; with ``distributed`` this rank's part of it.

    Raises:
        ValueError: if the folder cannot be loaded, or its weights are not exactly those of its configuration.
    """
    options = {} if distributed is None else {"distributed_config": distributed}
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, **options
        )
    except Exception as error:  # Whatever a broken or foreign folder makes the library raise.
        raise ValueError(f"model={str(folder)!r} cannot be loaded: {' '.join(str(error).split())}") from error
    # from_pretrained only warns of these, and initialises or leaves out what does not match.
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading.get(kind):
            keys = [str(key) for key in loading[kind]]
            raise ValueError(
                f"model={str(folder)!r} does not match its config.json: {len(keys)} {kind.replace('_', ' ')}, "
                f"e.g. {keys[0]}"
            )
    return model
