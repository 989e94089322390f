"""Activation checkpointing in Transformers models: the recompute of a layer runs at the position, and with the padding
mask, of the forward it repeats, even if other forwards came in between.

Transformers keeps the checkpointing function of a layer in ``layer._gradient_checkpointing_func``. It is wrapped when
the layer runs, since it is usually set after :func:`lrmoe.attach`, by the Trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lrmoe.experts.layer_control import LayerControl

_FUNC = "_gradient_checkpointing_func"


def follow_recomputes(model: nn.Module, controls: list[LayerControl]) -> Callable[[], None]:
    """Makes recomputes of the layers around the controlled experts repeat their forward; returns the way back."""
    layers = [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing") and any(hasattr(m, "lrmoe_control") for m in module.modules())
    ]
    hook = _WrapWhenRun(controls)
    return _Unwrap(layers, [layer.register_forward_pre_hook(hook) for layer in layers])


class _WrapWhenRun:
    def __init__(self, controls: list[LayerControl]) -> None:
        self._controls = controls

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        # A compiled region recomputes from values it has saved itself.
        if not layer.gradient_checkpointing or torch.compiler.is_compiling():
            return
        function = vars(layer).get(_FUNC)
        if function is not None and not isinstance(function, _Checkpoint):
            setattr(layer, _FUNC, _Checkpoint(function, self._controls))


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

    def __init__(self, inner: Callable[..., Any], controls: list[LayerControl]) -> None:
        self.inner = inner
        self._controls = controls

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(function, *args, **kwargs)
        return self.inner(_AtPosition(function, self._controls), *args, **kwargs)


class _AtPosition:
    """``function`` as if now were the moment this object was made."""

    def __init__(self, function: Callable[..., Any], controls: list[LayerControl]) -> None:
        self._function = function
        self._controls = controls
        self._then = _read(controls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = _read(self._controls)
        _write(self._controls, self._then)
        try:
            return self._function(*args, **kwargs)
        finally:
            _write(self._controls, now)


_State = tuple[Tensor, Tensor, Tensor | None]


def _read(controls: list[LayerControl]) -> _State:
    first = controls[0]
    return first.clock.position_3.clone(), first.clock.drop_L.clone(), first.token_mask_T


def _write(controls: list[LayerControl], state: _State) -> None:
    position_3, drop_L, mask_T = state
    clock = controls[0].clock
    clock.position_3.copy_(position_3)
    clock.drop_L.copy_(drop_L)
    for control in controls:
        control.token_mask_T = mask_T
