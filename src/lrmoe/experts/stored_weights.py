"""How weights are stored: which of them the experts cannot compute with, and which another library has taken apart."""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# torch's own tensor subclasses that hand the operator plain tensors, or stand in for them while something is traced.
_OF_TORCH = ("DTensor", "AsyncCollectiveTensor", "FakeTensor", "FunctionalTensor")


def why_unusable(weight: Tensor) -> str | None:
    """Why experts cannot compute with a weight, and what to do, as what comes after its name; None if they can.

    A subclass that overrides ``__torch_dispatch__`` keeps something else than numbers of the dtype it reports, and has
    operators of its own; ours is not among them. One that overrides ``__torch_function__`` alone, or nothing, as
    subclasses of ``nn.Parameter`` do, is stored as any tensor is.
    """
    # Of a DTensor, what this rank holds: its shards may themselves be quantized.
    held: Tensor = getattr(weight, "_local_tensor", weight)
    kind = type(held)
    own_operators = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    if own_operators and not (kind.__module__.startswith("torch.") and kind.__name__ in _OF_TORCH):
        return (
            f"is a {kind.__module__}.{kind.__qualname__}, a tensor subclass with operators of its own, as quantized "
            f"weights are (that it reports {weight.dtype} says nothing of what it stores). Load the model unquantized "
            "and quantize after training, or leave these experts to the implementation that they were made for"
        )
    if weight.layout is not torch.strided:
        return f"is stored as {weight.layout}, not densely; give it as weight.to_dense()"
    if weight.dtype not in _DTYPES:
        return (
            f"is {weight.dtype}; it must be float32, bfloat16, float16 or float64, for quantized weights cannot be "
            "trained: load them unquantized"
        )
    return None


def partitioned_by(weight: Tensor) -> str | None:
    """Who has left this rank a part of a weight that is not an expert's, or nothing of it, until a module's forward
    gathers it; None where the weight is whole, and for DTensors, which know their layout."""
    if whole_shape(weight) == tuple(weight.shape):
        return None
    return "DeepSpeed ZeRO-3" if hasattr(weight, "ds_shape") else "FullyShardedDataParallel"


def whole_shape(weight: Tensor) -> tuple[int, ...] | None:
    """The shape of a weight of two or more dimensions once it is gathered; None if nobody has left word of it."""
    shape: tuple[int, ...] = tuple(getattr(weight, "ds_shape", weight.shape))
    # FSDP1, with use_orig_params=True, leaves a piece of a row of all its parameters.
    return None if getattr(weight, "_fsdp_flattened", False) and len(shape) == 1 else shape


def require_usable(name: str, weight: Tensor) -> None:
    """Checks that a weight can be computed with, here and now.

    Raises:
        ValueError: if it cannot, naming it and the mend.
    """
    if problem := why_unusable(weight):
        raise ValueError(f"{name} {problem}")
    if who := partitioned_by(weight):
        raise ValueError(
            f"{name} is partitioned by {who} and not gathered: here its shape is {tuple(weight.shape)}. It is whole in "
            "the forward of the module that it belongs to: call the module, not its parts"
        )
