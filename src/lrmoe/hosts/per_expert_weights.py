"""Weights under the names that ``save_pretrained`` gives them, for a model whose experts are stacked.

Transformers stacks a layer's experts into one parameter and writes them one by one. ``from_pretrained`` converts on the
way back, ``load_state_dict`` does not: given such a file it takes the weights whose names are the same and leaves the
experts (of some models the router too) as they are. Its Trainer loads that way when it resumes, and when it goes back
to the best checkpoint at the end. The hook here, hung on an attached model, brings the rest into the model's form
first, by Transformers' own mapping; where the model is sharded over ranks, whole weights into its layout.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

logger = logging.getLogger("lrmoe")


class PerExpertWeights:
    """A pre-hook of ``load_state_dict``. An object, not a closure: a model must stay picklable.

    The files of a checkpoint in several come one after the other and may part the experts of a layer: what waits for
    the rest is held here.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, Tensor]] = {}

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replaces, in ``state_dict``, what the module knows under another name. What it cannot convert stays, for
        ``load_state_dict`` to report."""
        own = named_tensors(module)
        given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        for name, value in given.items():
            if name in own:
                state_dict[prefix + name] = _sharded_like(own[name], value)
        if given.keys() <= own.keys():
            return
        mapping = _Mapping(module, own)
        for name, new in mapping.by_target(given).items():
            if name in given:
                continue
            waiting = self._waiting.pop(name, {})
            # A name that comes twice begins another checkpoint.
            sources = new if waiting.keys() & new.keys() else {**waiting, **new}
            found = mapping.convert(name, sources)
            if not found:
                self._waiting[name] = sources
                continue
            for source in sources:
                state_dict.pop(prefix + source, None)
            for target, value in found.items():
                state_dict[prefix + target] = _sharded_like(own[target], value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_waiting": {}}


def fillable(module: nn.Module, saved: Mapping[str, Tensor]) -> set[str]:
    """The weights of ``module`` that a checkpoint with these names and shapes (on the meta device will do) fills, those
    that need no conversion left out."""
    mapping = _Mapping(module, named_tensors(module))
    groups = mapping.by_target(saved)
    return {target for name, sources in groups.items() for target in mapping.convert(name, sources)}


def hang_on(model: nn.Module) -> list[RemovableHandle]:
    """Hangs a hook on each outermost Transformers model in ``model``, itself included; returns the handles."""
    handles: list[RemovableHandle] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            inside.update(id(part) for part in module.modules())
            handles.append(module.register_load_state_dict_pre_hook(PerExpertWeights()))
    return handles


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook hangs on this very module."""
    hooks = (getattr(entry, "hook", entry) for entry in module._load_state_dict_pre_hooks.values())
    return any(isinstance(hook, PerExpertWeights) for hook in hooks)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


class _Mapping:
    """Transformers' conversions from saved to own names, for one model.

    They are no settled interface: where one fails, nothing is converted, the weights count as not loaded, and who looks
    after them (:mod:`lrmoe.hosts.restored_weights`) says so.
    """

    def __init__(self, module: nn.Module, own: Mapping[str, Tensor]) -> None:
        self._module = module
        self._own = own
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming

            mapping = get_model_conversion_mapping(module)
        except Exception as error:
            logger.debug("no mapping of saved names for %s: %s", type(module).__name__, error)
            return
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]

    def by_target(self, given: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """The tensors under foreign names that make up each own weight, by its name (the first, if several)."""
        groups: dict[str, dict[str, Tensor]] = {}
        for key, value in given.items():
            if key not in self._own and isinstance(value, Tensor):
                target = self._rename(key)[0]
                if target in self._own:
                    groups.setdefault(target, {})[key] = value
        return groups

    def convert(self, name: str, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights these tensors make up, by name; none where they do not fit, say because some are to come."""
        try:
            found = self._convert(name, sources)
        except Exception as error:
            logger.debug("%s cannot be made of %d saved tensors: %s", name, len(sources), error)
            return {}
        fits = all(target in self._own and self._own[target].shape == value.shape for target, value in found.items())
        return found if fits else {}

    def _convert(self, name: str, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import dot_natural_key

        by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        converter: Any = None
        for key in sorted(sources, key=dot_natural_key):
            target, pattern = self._rename(key)
            if pattern is None:
                return {target: sources[key]}
            converter = copy.deepcopy(by_pattern[pattern]) if converter is None else converter
            converter.add_tensor(target, key, pattern, sources[key])
        made = converter.convert(name, model=self._module, config=self._module.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    def _rename(self, key: str) -> tuple[str, str | None]:
        """The own name, and the pattern of the converter that makes it if more than the name differs."""
        from transformers.core_model_loading import rename_source_key

        prefix = getattr(self._module, "base_model_prefix", None)
        target, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._own)
        return str(target), pattern


def _sharded_like(own: Tensor, value: Any) -> Any:
    """A whole tensor in the layout of ``own``, of which other ranks hold the rest: torch does not copy one into the
    other. Anything else as it is."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != own.shape:
        return value
    with torch.no_grad():
        # Every rank has read the whole, so none needs to send it.
        return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
