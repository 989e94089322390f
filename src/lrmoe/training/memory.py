"""Bytes a forward keeps for its backward, counted through autograd's own hooks: deterministic, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class SavedBytes:
    """Distinct storages saved for backward; parameters and buffers do not count.

    Attributes:
        model: bytes of all of them.
        moe: bytes of those that the watched modules save, the layer's input included.
    """

    def __init__(self) -> None:
        self.model = 0
        self.moe = 0


@contextmanager
def measure_saved_bytes(model: nn.Module, moe_modules: list[nn.Module]) -> Iterator[SavedBytes]:
    """Counts what one forward inside the block saves. Use it around exactly one forward.

    Under activation checkpointing the block's own tensors are not saved, so this counts what stays until the
    backward starts, not what the recomputation then needs.
    """
    saved = SavedBytes()
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    seen_model: set[int] = set()
    seen_moe: set[int] = set()
    depth = 0

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in own:
            if address not in seen_model:
                seen_model.add(address)
                saved.model += storage.nbytes()
            if depth and address not in seen_moe:
                seen_moe.add(address)
                saved.moe += storage.nbytes()
        return tensor

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    handles = [module.register_forward_pre_hook(enter) for module in moe_modules]
    handles += [module.register_forward_hook(leave) for module in moe_modules]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield saved
    finally:
        for handle in handles:
            handle.remove()
