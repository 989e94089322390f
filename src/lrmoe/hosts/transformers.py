"""Hugging Face Transformers: ``experts_implementation="lrmoe"`` and what :func:`lrmoe.attach` needs of its models.

Importing this module makes the name known to Transformers. Models built with it run LRMoE's experts with the exact
backward until :func:`lrmoe.attach` hands their layers a control; ``attach`` also switches models built without it.

T tokens (B*S, batch-major), K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.integrations.moe import ExpertsInterface

from lrmoe.experts.layer_control import LayerControl
from lrmoe.experts.operator import controlled_experts
from lrmoe.hosts.bound_experts import activation_name, control_of, moment_mask, read_activation
from lrmoe.hosts.checkpointing import follow_recomputes
from lrmoe.hosts.expert_modules import Experts, is_experts, weights, why_not
from lrmoe.hosts.implementation import NAME, Switch, runs_before, runs_instead
from lrmoe.hosts.per_expert_weights import hang_on
from lrmoe.hosts.trainer_callback import RecalibrationCallback
from lrmoe.labels import layer_label

try:
    from lrmoe.hosts import transformers_ep
    from lrmoe.hosts.transformers_ep import set_balancer
except ImportError:  # Versions of Transformers without a registry of expert-parallel implementations.
    transformers_ep = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from lrmoe.parallel import ExpertParallel

__all__ = ["HOST", "NAME", "RecalibrationCallback", "lrmoe_experts_forward", "set_balancer"]

# Weights that these implementations have rewritten for their kernel cannot be read by another.
_LOCKED = ("deepgemm_megamoe",)


def lrmoe_experts_forward(self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts implementation Transformers calls with the module as ``self``.

    Args:
        hidden_states: (T, D).
        top_k_index: (T, K) int64; under expert parallelism ``num_experts`` marks a choice that is not on this rank.
        top_k_weights: (T, K), applied to the experts' outputs.

    Returns:
        (T, D) in the dtype of ``hidden_states``.
    """
    if getattr(self, "lrmoe_control", None) is None and (other := runs_before(self)) is not None:
        out: Tensor = other(self, hidden_states, top_k_index, top_k_weights)
        return out
    control = control_of(self)
    moment = control.moment(hidden_states, batch_major=True)
    gate_up_proj, down_proj = weights(self)
    mask_T = moment_mask(control, moment)
    if self._is_expert_parallel:
        # The rows are what other ranks sent; what is known of this rank's tokens says nothing about them.
        mask_T, moment = None, moment._replace(sequence_T=None)
        top_k_index = torch.where(top_k_index >= self.num_experts, -1, top_k_index)
    out_TD = controlled_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate_up_proj,
        down_proj,
        control=control,
        moment=moment,
        activation=activation_name(self),
        gate_up_bias=self.gate_up_proj_bias if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,
        token_mask_T=mask_T,
    )
    return out_TD.to(hidden_states.dtype)


class _Binding:
    """The way back from :meth:`_TransformersHost.bind`. An object, not a closure: a model must stay picklable."""

    def __init__(
        self,
        modules: list[Experts],
        switch: Switch,
        unwrap: Callable[[], None],
        handles: list[RemovableHandle],
        shared: list[Any],
    ) -> None:
        self._modules = modules
        self._switch = switch
        self._unwrap = unwrap
        self._handles = handles
        self._shared = shared

    def __call__(self) -> None:
        for module in self._modules:
            del module.lrmoe_control
        self._switch()
        for layer in self._shared:
            layer.engine = None
        for handle in self._handles:
            handle.remove()
        self._unwrap()


class _TransformersHost:
    """Finds and switches the expert modules of Transformers models, however the model is wrapped."""

    def find(self, model: nn.Module) -> dict[str, nn.Module]:
        found: dict[str, Experts] = {name: module for name, module in model.named_modules() if is_experts(module)}
        for name, module in found.items():
            label = layer_label(name)
            if problem := why_not(module):
                raise ValueError(f"{label}: {problem}")
            if hasattr(module, "lrmoe_control"):
                raise ValueError(f"{label} belongs to a model that already has a recalibrator; detach that one first")
            implementation = module.config._experts_implementation
            if implementation in _LOCKED:
                raise ValueError(
                    f"{label} was loaded with experts_implementation={implementation!r}, which cannot be switched; "
                    f'load the model with experts_implementation="{NAME}"'
                )
            read_activation(module)
        return found

    def bind(self, model: nn.Module, controls: dict[str, LayerControl]) -> Callable[[], None]:
        modules: dict[str, Experts] = {name: model.get_submodule(name) for name in controls}
        # First, because it refuses layers that cannot share an engine.
        shared = _share_engine(list(modules.values()))
        switch = Switch(model, modules.values())
        for name, module in modules.items():
            module.lrmoe_control = controls[name]
        unwrap = follow_recomputes(model, next(iter(controls.values())).clock)
        return _Binding(list(modules.values()), switch, unwrap, hang_on(model), shared)

    def runs_instead(self, module: nn.Module) -> str | None:
        return runs_instead(module)

    def engine(self, module: nn.Module) -> ExpertParallel | None:
        layer = None if transformers_ep is None else transformers_ep.of_module(module)
        return None if layer is None else layer.engine


def _share_engine(modules: list[Experts]) -> list[Any]:
    """Gives the expert-parallel layers among the modules the default engine, unless the user has given them one.
    Returns the layers that got it."""
    if transformers_ep is None:
        return []
    layers = [layer for module in modules if (layer := transformers_ep.of_module(module)) is not None]
    if not layers or any(layer.chosen for layer in layers):
        return []
    transformers_ep.share_engine(layers)
    return layers


ExpertsInterface.register(NAME, lrmoe_experts_forward)
HOST = _TransformersHost()
