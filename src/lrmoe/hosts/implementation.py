"""Which experts implementation an attached model's configs name, and what that means for its layers.

A Transformers module asks its config at every forward which implementation to run, and the model reports what its
config names. Attaching names ``lrmoe`` there and nowhere else, so a later ``set_experts_implementation`` is a switch
like any other: what is reported is what runs.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lrmoe.hosts.expert_modules import EXPERT_PARALLEL, Experts

NAME = "lrmoe"


class Switch:
    """The configs of these modules, and of the models around them, name ``lrmoe`` until it is called.

    A whole model gets configs of its own first: one that was built from the same config object is not switched along.
    It keeps them, for what its user writes into them belongs to it. A part shares its config with the rest of its
    model, whose modules go on with what they ran before, see :func:`runs_before`.
    """

    def __init__(self, model: nn.Module, modules: Iterable[Experts]) -> None:
        attached = set(modules)
        around = [m for m in model.modules() if isinstance(m, PreTrainedModel) and not attached.isdisjoint(m.modules())]
        # A model without a head may be a part of one that has the same config and is not seen from here.
        _give_own_configs(model, [m for m in around if m.base_model is not m])
        configs = {id(module.config): module.config for module in [*attached, *around]}
        self._before = [(config, _before(config)) for config in configs.values()]
        for config in configs.values():
            _name(config, NAME)
        _switches.add(self)

    def __call__(self) -> None:
        """The way back. What was switched since stays as it is."""
        _switches.discard(self)
        for config, before in self._before:
            if config._experts_implementation == NAME and not _known(config):
                _name(config, before)

    def known(self, config: Any) -> list[str | None]:
        """What the config named before, in a list that is empty if it is none of these."""
        return [before for known, before in self._before if known is config]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _switches.add(self)


_switches: weakref.WeakSet[Switch] = weakref.WeakSet()


def runs_instead(module: Experts) -> str | None:
    """The implementation that an attached module runs because its model was switched to it; None for LRMoE's."""
    # What brings the tokens of such a module runs its experts itself, or refuses.
    if EXPERT_PARALLEL in vars(module) or module.config._experts_implementation == NAME:
        return None
    return str(module.config._experts_implementation)


def runs_before(module: Experts) -> Callable[..., Any] | None:
    """What a module that is not attached goes on to run although its config names ``lrmoe``, because another one that
    has the same config is attached; None if that was LRMoE's."""
    named = _named_before(module)
    if named == NAME:
        return None
    # What its class computes by itself, below Transformers' decorator.
    found: Callable[..., Any] = ALL_EXPERTS_FUNCTIONS.get_interface(named, type(module).forward.__wrapped__)
    return found


# Compiled code cannot look through the switches. It looks itself at the two things on which this depends: whether the
# module is attached, and what its config names.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _named_before(module: Experts) -> str:
    known = _known(module.config)
    return (known[0] or "eager") if known else NAME


def _before(config: Any) -> str | None:
    known = _known(config) if config._experts_implementation == NAME else []
    return known[0] if known else config._experts_implementation


def _known(config: Any) -> list[str | None]:
    return [before for switch in _switches for before in switch.known(config)]


def _name(config: Any, implementation: str | None) -> None:
    # The property of Transformers' configs would switch those inside it too.
    own = "_experts_implementation_internal" if isinstance(config, PreTrainedConfig) else "_experts_implementation"
    setattr(config, own, implementation)


def _give_own_configs(model: nn.Module, wholes: Iterable[nn.Module]) -> None:
    """A copy of each config that these models and their parts have, in its place wherever ``model`` has it."""
    found = [vars(module).get("config") for whole in wholes for module in whole.modules()]
    shared = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
    own = {key: copy.copy(config) for key, config in shared.items()}
    for key, config in own.items():
        _name(config, _before(shared[key]))
        for name in config.sub_configs:
            if (inside := own.get(id(getattr(config, name, None)))) is not None:
                setattr(config, name, inside)
    for module in model.modules():
        if (config := own.get(id(vars(module).get("config")))) is not None:
            module.config = config
