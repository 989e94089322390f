"""Bytes a forward keeps for its backward, counted through autograd's own hooks: deterministic, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class SavedBytes:
    """Distinct storages saved for backward; parameters and buffers do not count. Filled in when the block ends.

    Attributes:
        model: bytes of all of them.
        moe: bytes of those that the watched modules save, the layer's input included.
    """

    def __init__(self) -> None:
        self.model = 0
        self.moe = 0


class _Saved:
    """One saved tensor; lives as long as autograd keeps it."""

    __slots__ = ("__weakref__", "in_moe", "tensor")

    def __init__(self, tensor: Tensor, in_moe: bool) -> None:
        self.tensor = tensor
        self.in_moe = in_moe


@contextmanager
def measure_saved_bytes(model: nn.Module, moe_modules: list[nn.Module]) -> Iterator[SavedBytes]:
    """Counts what one forward inside the block has saved when the block ends; its output has to be alive then.

    Under activation checkpointing the block's own tensors are not saved, so this counts what stays until the
    backward starts, not what the recomputation then needs.
    """
    result = SavedBytes()
    live: weakref.WeakSet[_Saved] = weakref.WeakSet()
    depth = 0

    def pack(tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, depth > 0)
        live.add(saved)
        return saved

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    handles = [module.register_forward_pre_hook(enter) for module in moe_modules]
    handles += [module.register_forward_hook(leave) for module in moe_modules]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            yield result
        own = {_local(t).untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        result.model = _bytes([saved.tensor for saved in live], own)
        result.moe = _bytes([saved.tensor for saved in live if saved.in_moe], own)
    finally:
        for handle in handles:
            handle.remove()


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensors: list[Tensor], excluded: set[int]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for address, size in storages.items() if address not in excluded)
