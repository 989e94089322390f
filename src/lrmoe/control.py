"""Attaching the recalibrated backward to a model, and moving it along with training."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from lrmoe.config import LRMoEConfig
from lrmoe.experts.layer_control import Clock, LayerControl
from lrmoe.layer import MoE


class Host(Protocol):
    """An adapter to a library that brings its own MoE layers (``lrmoe.hosts``)."""

    def find(self, model: nn.Module) -> dict[str, nn.Module]:
        """The expert modules this host can recalibrate, by name. Raises ValueError for one it knows and cannot."""

    def bind(self, model: nn.Module, controls: dict[str, LayerControl]) -> Callable[[], None]:
        """Hands each named module its control and switches it to LRMoE's experts; returns the way back."""


class _OwnLayers:
    """The host of :class:`lrmoe.MoE` layers."""

    def find(self, model: nn.Module) -> dict[str, nn.Module]:
        return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}

    def bind(self, model: nn.Module, controls: dict[str, LayerControl]) -> Callable[[], None]:
        layers = {name: model.get_submodule(name) for name in controls}
        before = {name: layer.control for name, layer in layers.items() if isinstance(layer, MoE)}
        for name, layer in layers.items():
            layer.control = controls[name]

        def undo() -> None:
            for name, layer in layers.items():
                layer.control = before[name]

        return undo


# Adapters are imported only when the library they adapt is already in use.
_HOST_MODULES = {"transformers": "lrmoe.hosts.transformers"}


def _hosts() -> list[Host]:
    adapters = [importlib.import_module(path) for library, path in _HOST_MODULES.items() if library in sys.modules]
    return [_OwnLayers(), *(adapter.HOST for adapter in adapters)]


def attach(
    model: nn.Module, config: LRMoEConfig | None = None, *, optimizer: torch.optim.Optimizer | None = None
) -> Recalibrator:
    """Recalibrates the backward of every MoE layer of ``model``.

    Works on :class:`lrmoe.MoE` layers and, when Transformers is in use, on the expert modules of its MoE models.
    Parameters, their names and the forward stay as they are.

    Args:
        model: any module that contains MoE layers.
        config: the recalibration; default :class:`LRMoEConfig()`.
        optimizer: if given, :meth:`Recalibrator.step` is called after each of its steps. Otherwise call it yourself,
            once per optimizer step, or use the host's callback.

    Raises:
        ValueError: if no MoE layer is found (listing what is there), if one is found that cannot be recalibrated, or
            if a recalibrator is already attached.
    """
    config = LRMoEConfig() if config is None else config
    if getattr(model, "_lrmoe_recalibrator", None) is not None:
        raise ValueError("this model already has a recalibrator; call its detach() before attaching another")
    return Recalibrator(model, config, optimizer)


class Recalibrator:
    """Moves all attached layers along with training. Made by :func:`attach`.

    The microbatch within a step is counted by the model's own forward calls (training mode, gradients enabled);
    activation checkpointing does not call the model again, so a recompute draws what its forward drew.

    Attributes:
        config: the configuration in force.
        layers: the control of every attached layer, by module name, in model order.
    """

    def __init__(self, model: nn.Module, config: LRMoEConfig, optimizer: torch.optim.Optimizer | None) -> None:
        found: list[tuple[Host, dict[str, nn.Module]]] = [(host, host.find(model)) for host in _hosts()]
        names = [name for _, layers in found for name in layers]
        if not names:
            raise ValueError(_nothing_found(model))
        order = {name: position for position, (name, _) in enumerate(model.named_modules())}
        names.sort(key=order.__getitem__)
        self.clock = Clock(config, microbatch=-1)
        self.layers = {name: LayerControl(self.clock, layer=i, name=name) for i, name in enumerate(names)}
        self._model = model
        self._undo = [host.bind(model, {name: self.layers[name] for name in layers}) for host, layers in found if layers]
        self._handles: list[Any] = [model.register_forward_pre_hook(self._before_forward, with_kwargs=True)]
        if optimizer is not None:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.step()))
        object.__setattr__(model, "_lrmoe_recalibrator", self)

    @property
    def config(self) -> LRMoEConfig:
        return self.clock.config

    def set_total_steps(self, total_steps: int) -> None:
        """Tells the schedule how long the run is; needed for ``final_dense_steps``. Keeps a length already set."""
        if self.config.total_steps is None:
            self.clock.config = replace(self.config, total_steps=total_steps)
            self.clock.move_to(step=self.clock.step, microbatch=self.clock.microbatch)

    def step(self) -> None:
        """Call once after each optimizer step: moves the schedule and the draws on, and lets each
        :class:`lrmoe.MoE` router with a selection bias update it from the loads of the step."""
        for name in self.layers:
            layer = self._model.get_submodule(name)
            if isinstance(layer, MoE):
                layer.update_selection_bias()
        self.clock.move_to(step=self.clock.step + 1, microbatch=-1)

    def metrics(self, *, reset: bool = True) -> dict[str, Any]:
        """What the backward passes did since the last call: ``step``, ``drop``, ``kept_share`` and
        ``kept_importance_share`` (means over layers), ``variance_share``, ``load_max_over_mean``, ``forward_seconds``
        and ``backward_seconds`` (sums), and ``layers``: for each name what :meth:`Meter.read` gives.

        Synchronises with the device once; call it when you log. Layers that ran no backward are left out.
        """
        layers = {name: read for name, control in self.layers.items() if (read := control.meter.read()) is not None}
        summary: dict[str, Any] = {"step": self.clock.step, "drop": float(self.clock.drop)}
        for key in ("kept_share", "kept_importance_share", "variance_share", "load_max_over_mean"):
            if layers:
                summary[key] = sum(layer[key] for layer in layers.values()) / len(layers)
        for key in ("forward_seconds", "backward_seconds"):
            summary[key] = sum(layer[key] for layer in layers.values())
        summary["layers"] = layers
        if reset:
            for control in self.layers.values():
                control.meter.reset()
        return summary

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON-able values: the position in training and the configuration it belongs to."""
        return {"step": self.clock.step, "config": self.config.to_dict(), "layers": list(self.layers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`. Call between steps.

        Raises:
            ValueError: if the state belongs to other layers or to another seed: the draws would not continue.
        """
        missing = {"step", "config", "layers"} - set(state)
        if missing:
            raise ValueError(f"this is not a recalibrator's state: {', '.join(sorted(missing))} missing")
        if list(state["layers"]) != list(self.layers):
            raise ValueError(
                f"the state is of layers {state['layers']}, this model has {list(self.layers)}; load it into the model "
                "it was saved from"
            )
        if state["config"].get("seed") != self.config.seed:
            raise ValueError(
                f"the state was saved with seed={state['config'].get('seed')}, this recalibrator has "
                f"seed={self.config.seed}; attach with the saved seed to continue its draws"
            )
        self.clock.move_to(step=int(state["step"]), microbatch=-1)

    def detach(self) -> None:
        """Gives the model back as it was before :func:`attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._undo:
            self._undo.pop()()
        object.__setattr__(self._model, "_lrmoe_recalibrator", None)

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        self.clock.position_3[2].add_(1)
        if self.config.drop == 0.0:
            return
        mask = _padding_mask(args, kwargs)
        for control in self.layers.values():
            control.token_mask_T = mask


def _padding_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The (B*S,) mask of real tokens from a (B, S) ``attention_mask`` that matches the tokens of this call."""
    mask = kwargs.get("attention_mask")
    tokens = kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    tokens = args[0] if tokens is None and args else tokens
    if not isinstance(mask, torch.Tensor) or not isinstance(tokens, torch.Tensor):
        return None
    if mask.dim() != 2 or mask.shape != tokens.shape[:2]:
        return None
    return mask.bool().reshape(-1)


def _nothing_found(model: nn.Module) -> str:
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and "expert" in name]
    kinds = sorted({type(module).__name__ for module in model.modules()})
    hint = f" Lists of separate experts, which cannot be recalibrated: {', '.join(lists[:5])}." if lists else ""
    return (
        f"no MoE layer that LRMoE knows was found in {type(model).__name__}. It knows lrmoe.MoE and, with Transformers "
        f"imported, experts that accept experts_implementation=.{hint} Modules found: {', '.join(kinds[:30])}"
    )
