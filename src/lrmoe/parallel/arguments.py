"""What a caller of ExpertParallel may get wrong on one rank, said before anything is exchanged."""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.experts import activations
from lrmoe.experts.compacted import Bank
from lrmoe.experts.operator import product_dtype
from lrmoe.experts.validation import check_arguments, check_ids, check_not_forward_mode
from lrmoe.parallel.weight_store import WeightStore

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""(x_TD, topk_ids_TK, topk_weights_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T)."""


def check_call(
    tensors: Tensors, activation: str, store: WeightStore, *, num_experts: int, rank: int
) -> tuple[torch.dtype, bool]:
    """(dtype of the products, whether a backward may follow), of arguments found right.

    Raises:
        ValueError: naming the argument, its value and the mend.
    """
    x_TD, ids_TK, alpha_TK, *weights, mask_T = tensors
    for name, tensor in zip(_NAMES, tensors, strict=True):
        _check_plain(name, tensor)
    owned = Bank(*tensors[3:7])
    if all(isinstance(t, Tensor) and t.dim() == dim for t, dim in zip(tensors[:5], (2, 2, 2, 3, 3), strict=True)):
        owned = store.as_experts(owned, x_TD.shape[1])
    check_arguments(
        x_TD,
        ids_TK,
        alpha_TK,
        owned.gate_up_proj,
        owned.down_proj,
        owned.gate_up_bias,
        owned.down_bias,
        mask_T,
    )
    expected = store.num_owned(num_experts)
    if owned.gate_up_proj.shape[0] != expected:
        raise ValueError(
            f"gate_up_proj has {owned.gate_up_proj.shape[0]} experts; rank {rank} owns {expected} of the "
            f"{num_experts}: give what ExpertParallel.local returns"
        )
    check_ids(ids_TK, num_experts)
    dtype = product_dtype(x_TD, tensors[3], activation)
    activations.get(activation)
    trainable = (x_TD, alpha_TK, *weights)
    check_not_forward_mode(*trainable)
    return dtype, torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trainable)


_NAMES = (
    "x_TD",
    "topk_ids_TK",
    "topk_weights_TK",
    "gate_up_proj",
    "down_proj",
    "gate_up_bias",
    "down_bias",
    "token_mask_T",
)


def _check_plain(name: str, tensor: Tensor | None) -> None:
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return
    text = ", ".join(map(str, placements))
    if any(getattr(placement, "dim", 0) != 0 for placement in placements):
        raise ValueError(
            f"{name} is sharded inside the experts ({text}): every rank would see a part of each norm and gradient; "
            "expert tensor parallelism is not supported, give each rank whole experts"
        )
    raise ValueError(
        f"{name} is a DTensor ({text}); give this rank's own part as a plain tensor, e.g. by .to_local(), or, of "
        "parameters that FSDP2 shards, inside the forward of the module that it wraps"
    )
