"""What an expert module of Transformers runs with now: its control, its mask and its activation."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lrmoe.experts.layer_control import LayerControl, Moment, exact_control
from lrmoe.hosts.expert_modules import Experts, activation_of, gate_of, why_not
from lrmoe.hosts.implementation import NAME

# Of models that are not attached, and of those in evaluation mode.
_EXACT = exact_control("in evaluation or not attached")


def moment_mask(control: LayerControl, moment: Moment) -> Tensor | None:
    """The mask of the rows. With nothing to drop a host's experts keep its gradients, those of padding included."""
    return moment.token_mask_T if control.config.drop > 0.0 else None


def control_of(module: Experts) -> LayerControl:
    """The control an expert module runs with now; in evaluation, or if it has none, that of the exact backward."""
    control: LayerControl | None = getattr(module, "lrmoe_control", None)
    if control is None and module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _warn_not_attached()
    return _EXACT if control is None or not module.training else control


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def activation_name(module: Experts) -> str:
    """The name of the module's activation, read off again where the module was given another one."""
    if getattr(module, "_lrmoe_gate", None) != gate_of(module):
        if problem := why_not(module):
            raise ValueError(f'experts_implementation="{NAME}": {problem}')
        read_activation(module)
    known: str = module._lrmoe_activation
    return known


def read_activation(module: Experts) -> None:
    module._lrmoe_activation = activation_of(module)
    # What it was read off; in a tuple, which makes the activation no submodule of another name.
    module._lrmoe_gate = gate_of(module)


_warned = False


def _warn_not_attached() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f'experts_implementation="{NAME}" trains with the exact backward because lrmoe.attach(model, config) was '
            "not called for this model; call it to recalibrate the backward",
            UserWarning,
            stacklevel=2,
        )
