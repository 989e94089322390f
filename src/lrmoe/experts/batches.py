"""A custom operator with lists, called for a batch: torch has a rule of its own for all operators but these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

# As many batches as torch nests in each other.
_LEVELS = 64


def one_by_one(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The rule for ``torch.func.vmap``: one call for each of the batch."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        calls = [operator(*map(partial(_taken, index=index), args, in_dims)) for index in range(info.batch_size)]
        stacked = _stacked(calls)
        parts, structure = tree_flatten(stacked)
        return stacked, tree_unflatten([0] * len(parts), structure)

    return rule


def each_gradient(operator: Callable[..., Any], grad: Tensor) -> Callable[..., Any]:
    """``operator`` with its first argument; one call for each of a batch of gradients that arrive at once, as of
    ``torch.autograd.grad(..., is_grads_batched=True)``, which has an older way of batching that no rule reaches."""
    if not torch._C._functorch.is_legacy_batchedtensor(grad):
        return partial(operator, grad)
    level, grads_B = next(
        (level, plain)
        for level in range(1, _LEVELS)
        if not torch._C._functorch.is_legacy_batchedtensor(plain := torch._remove_batch_dim(grad, level, 1, 0))
    )

    def call(*args: Any) -> Any:
        parts, structure = tree_flatten(_stacked([operator(one, *args) for one in grads_B.unbind()]))
        return tree_unflatten([torch._add_batch_dim(part, 0, level) for part in parts], structure)

    return call


def _taken(value: Any, dim: Any, index: int) -> Any:
    """One of a batch: ``dim`` is the dimension along which ``value`` holds it, None where it is the same for all."""
    if isinstance(value, (list, tuple)):
        dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(value)
        return [_taken(each, of, index) for each, of in zip(value, dims, strict=True)]
    return value if dim is None else value.select(dim, index)


def _stacked(calls: list[Any]) -> Any:
    """What several calls returned, in the structure of one."""
    flat, structures = zip(*map(tree_flatten, calls), strict=True)
    return tree_unflatten([torch.stack(parts) for parts in zip(*flat, strict=True)], structures[0])
