"""A model to train and its tokenizer, from a preset or a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lrmoe.training.presets import PRESETS, checkpoint_folder
from lrmoe.training.tokenizer import byte_tokenizer, load_tokenizer


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
    folder = checkpoint_folder(name)
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
        folder = checkpoint_folder(name)
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
        raise ValueError(f"seq={seq} is longer than the model's max_position_embeddings={limit}; lower it")


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
