"""Activation checkpointing in Transformers models: the recompute of a layer runs at the position, and with the padding
mask, of the forward it repeats, even if other forwards came in between.

Transformers keeps the checkpointing function of a layer in ``layer._gradient_checkpointing_func``. It is wrapped when
the layer runs, since it is usually set after :func:`lrmoe.attach`, by the Trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lrmoe.experts.layer_control import Clock

_FUNC = "_gradient_checkpointing_func"


def follow_recomputes(model: nn.Module, clock: Clock) -> Callable[[], None]:
    """Makes recomputes of the layers around the controlled experts repeat their forward; returns the way back."""
    layers = [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing") and any(hasattr(m, "lrmoe_control") for m in module.modules())
    ]
    hook = _WrapWhenRun(clock)
    return _Unwrap(layers, [layer.register_forward_pre_hook(hook) for layer in layers])


class _WrapWhenRun:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        # A compiled region recomputes from values it has saved itself.
        if not layer.gradient_checkpointing or torch.compiler.is_compiling():
            return
        function = vars(layer).get(_FUNC)
        if function is not None and not isinstance(function, _Checkpoint):
            setattr(layer, _FUNC, _Checkpoint(function, self._clock))


class _Unwrap:
    def __init__(self, layers: list[nn.Module], handles: list[Any]) -> None:
        self._layers = layers
        self._handles = handles

    def __call__(self) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            function = vars(layer).get(_FUNC)
            if isinstance(function, _Checkpoint):
                setattr(layer, _FUNC, function.inner)


class _Checkpoint:
    """A checkpointing function, e.g. a partial of ``torch.utils.checkpoint.checkpoint``, with the position added."""

    def __init__(self, inner: Callable[..., Any], clock: Clock) -> None:
        self.inner = inner
        self._clock = clock

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(function, *args, **kwargs)
        return self.inner(_AtPosition(function, self._clock), *args, **kwargs)


class _AtPosition:
    """``function`` as if now were the moment this object was made."""

    def __init__(self, function: Callable[..., Any], clock: Clock) -> None:
        self._function = function
        self._clock = clock
        self._then = clock.now

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.back_at(self._then):
            return self._function(*args, **kwargs)
