"""The model of a run over several ranks: checked before any of them starts, and loaded by all of them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import lrmoe
from lrmoe.balance import HistoryPolicy, Policy, get
from lrmoe.hosts.expert_modules import Experts
from lrmoe.training.balance_loss import has_balancing_loss
from lrmoe.training.config import TrainConfig
from lrmoe.training.documents import read_documents
from lrmoe.training.models import check_length, load_model, load_outline, load_weights
from lrmoe.training.text import TokenText, tokenize


def check_ranks(config: TrainConfig, size: int) -> None:
    """Checks that the run can be spread over ``size`` processes, of which groups of ``config.ep`` share the experts.

    Raises:
        ValueError: naming what is wrong and the mend.
    """
    if config.ep == 1 or size % config.ep:
        raise ValueError(
            f"ep={config.ep} does not fit the {size} processes that torchrun started; give --ep {size}, or another "
            f"divisor of {size} above 1"
        )
    if config.batch % size:
        raise ValueError(
            f"batch={config.batch} cannot be shared out equally to {size} processes; give a multiple of {size}"
        )
    _policy(config)
    if torch.cuda.is_available() and torch.cuda.device_count() < config.ep and size == config.ep:
        raise ValueError(
            f"ep={config.ep} needs as many GPUs, but this machine has {torch.cuda.device_count()}; lower ep, or use "
            "torchrun over several machines"
        )


def _policy(config: TrainConfig) -> Policy:
    """The policy; ValueError where its options do not go together."""
    options = {"slots": config.slots, "capacity": config.capacity}
    return get(config.policy, **{name: value for name, value in options.items() if value is not None})


def check_sharding(config: TrainConfig) -> TokenText:
    """Checks model and text of a run over several ranks, without loading weights; returns the text.

    Raises:
        ValueError: naming what is wrong and the mend.
    """
    documents = read_documents(config.text)
    model, tokenizer = load_outline(config.model)
    check_length(model, config.seq)
    recal = lrmoe.attach(model, config.recalibration)
    for name, module in recal.modules().items():
        _check_experts(name, module, config.ep)
        policy = _policy(config)
        if isinstance(policy, HistoryPolicy):
            policy.prepare(module.gate_up_proj.shape[0], config.ep)  # type: ignore[arg-type, index]
    kind = type(model).__name__
    if getattr(model.config.get_text_config(), "output_router_logits", False) and not has_balancing_loss(model):
        raise ValueError(
            f"the balancing loss of {kind} cannot be computed over several ranks; set output_router_logits=false in "
            "the model's config.json, or train with ep=1"
        )
    return tokenize(documents, tokenizer, seq=config.seq, memorize_bytes=config.memorize_bytes)


def _check_experts(name: str, module: Experts, ep: int) -> None:
    experts = module.down_proj.shape[0]
    if experts % ep:
        raise ValueError(f"{name} has {experts} experts, which Transformers cannot share out equally to ep={ep} ranks")


def load_parts(config: TrainConfig, *, size: int, checkpoint: Path | None) -> tuple[Any, Any]:
    """This rank's part of the model, with its weights from ``checkpoint`` if given, and the tokenizer. Every rank
    calls."""
    from transformers.distributed import DistributedConfig

    distributed = DistributedConfig(fsdp_size=size, ep_size=config.ep, ep_implementation="lrmoe")
    if checkpoint is None:
        return load_model(config.model, seed=config.seed, distributed=distributed)
    _, tokenizer = load_outline(config.model)
    return load_weights(checkpoint, distributed=distributed), tokenizer
