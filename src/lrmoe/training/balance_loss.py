"""The load-balancing loss of a batch that is spread over ranks.

Transformers' models compute it from the tokens they see. It is a product of two means over tokens, so the mean of the
ranks' losses is not the loss of their common batch; with the tokens per expert of all ranks in each rank's product, it
is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

_NAME = "load_balancing_loss_func"


def has_balancing_loss(model: nn.Module) -> bool:
    """Whether the model's file has the function that :func:`over_all_ranks` replaces."""
    return _file_of(model) is not None


def _file_of(model: nn.Module) -> ModuleType | None:
    # FSDP makes a class of its own of the model's.
    files = (sys.modules[kind.__module__] for kind in type(model).__mro__)
    return next((file for file in files if hasattr(file, _NAME)), None)


@contextmanager
def over_all_ranks(model: nn.Module) -> Iterator[None]:
    """Inside, the model's balancing loss counts the tokens of all ranks of the default group; on every rank the same
    number of tokens, without padding. The mean over ranks of the losses, and of their gradients, is then that of one
    process with all tokens.
    """
    file = _file_of(model)
    before = getattr(file, _NAME)
    setattr(file, _NAME, balancing_loss)
    try:
        yield
    finally:
        setattr(file, _NAME, before)


def balancing_loss(
    gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """num_experts * sum over experts of (share of the token-expert pairs) * (mean probability), over all layers: the
    auxiliary loss of the Switch Transformer (arXiv 2101.03961, equations 4 to 6) with K choices a token.

    Args:
        gate_logits: a layer's (T, E) router logits each.
        num_experts: E.
        top_k: K.
        attention_mask: not supported.

    Returns:
        scalar; its gradient goes through the probabilities only.
    """
    if attention_mask is not None:
        raise ValueError("the balancing loss over several ranks takes no attention_mask; leave the padding out")
    count_E = torch.zeros(num_experts, dtype=torch.float32, device=gate_logits[0].device)
    probability_E = torch.zeros_like(count_E)
    rows = 0
    for logits_TE in gate_logits:
        probability_TE = logits_TE.softmax(dim=-1)
        chosen_TK = probability_TE.detach().topk(top_k, dim=-1).indices
        count_E += torch.bincount(chosen_TK.reshape(-1), minlength=num_experts)
        probability_E = probability_E + probability_TE.float().sum(dim=0)
        rows += logits_TE.shape[0]
    # Whole numbers below 2^24: the sum over ranks is exact in any order.
    dist.all_reduce(count_E)
    return num_experts * (count_E / (rows * dist.get_world_size()) * (probability_E / rows)).sum()
