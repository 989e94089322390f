"""The MoE layers of a model, whoever brings them: LRMoE itself or, through an adapter, another library."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import nn

from lrmoe.experts.layer_control import LayerControl
from lrmoe.experts.stored_weights import why_unusable
from lrmoe.layer import ExpertsEngine, MoE


def layer_label(name: str) -> str:
    """How a layer is called where people read of it: by its module's name, which a model that is itself the layer does
    not have. In keys it stays that name, the empty one."""
    return name or "the model itself"


class Host(Protocol):
    """An adapter to a library that brings its own MoE layers (``lrmoe.hosts``)."""

    def find(self, model: nn.Module) -> dict[str, nn.Module]:
        """The expert modules this host can recalibrate, by name. Raises ValueError for one it knows and cannot."""

    def bind(self, model: nn.Module, controls: dict[str, LayerControl]) -> Callable[[], None]:
        """Hands each named module its control and switches it to LRMoE's experts; returns the way back, which must
        be picklable and follow a copied model, like everything that hangs on a model. Where it raises, it has changed
        nothing."""

    def runs_instead(self, module: nn.Module) -> str | None:
        """What a bound module runs in place of LRMoE's experts, because the library was told so since; else None."""

    def engine(self, module: nn.Module) -> ExpertsEngine | None:
        """What runs the module's experts where they are spread over ranks."""


class HostedLayers:
    """The layers of a model that can be recalibrated, each with the host that brings it.

    Attributes:
        modules: by name, in model order. Held, not looked up again: wrappers that come later change where a module is
            found.

    Raises:
        ValueError: if there is none (listing what is there), or one that its host knows and cannot recalibrate.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [(host, host.find(model)) for host in _hosts()]
        modules = {name: module for _, layers in found for name, module in layers.items()}
        if not modules:
            raise ValueError(_nothing_found(model))
        order = {name: position for position, (name, _) in enumerate(model.named_modules())}
        self.modules = {name: modules[name] for name in sorted(modules, key=order.__getitem__)}
        self._hosts: list[tuple[Host, list[str]]] = [(host, list(layers)) for host, layers in found if layers]

    def bind(self, model: nn.Module, controls: Mapping[str, LayerControl]) -> list[Callable[[], None]]:
        """Hands every layer its control, all or none; returns the ways back, to be gone last first."""
        undo: list[Callable[[], None]] = []
        try:
            for host, names in self._hosts:
                undo.append(host.bind(model, {name: controls[name] for name in names}))
        except BaseException:
            while undo:
                undo.pop()()
            raise
        return undo

    def run_instead(self) -> dict[str, str]:
        """The layers that run something in place of LRMoE's experts now, with what they run."""
        return {
            name: other
            for host, names in self._hosts
            for name in names
            if (other := host.runs_instead(self.modules[name])) is not None
        }

    def engines(self) -> list[tuple[ExpertsEngine, list[int]]]:
        """What runs experts that are spread over ranks, with the places of its layers in ``modules``."""
        host_of = {name: host for host, names in self._hosts for name in names}
        engines: dict[int, tuple[ExpertsEngine, list[int]]] = {}
        for place, (name, module) in enumerate(self.modules.items()):
            if (engine := host_of[name].engine(module)) is not None:
                engines.setdefault(id(engine), (engine, []))[1].append(place)
        return list(engines.values())


class _OwnLayers:
    """The host of :class:`lrmoe.MoE` layers."""

    def find(self, model: nn.Module) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if isinstance(module, MoE):
                if module.is_attached:
                    raise ValueError(
                        f"{name or 'the layer'} belongs to a model that already has a recalibrator; detach that one "
                        "first"
                    )
                for part in ("router", "experts"):
                    for key, weight in module.get_submodule(part).named_parameters(recurse=False):
                        if problem := why_unusable(weight):
                            raise ValueError(f"{layer_label(name)}: {part}.{key} {problem}")
                found[name] = module
        return found

    def bind(self, model: nn.Module, controls: dict[str, LayerControl]) -> Callable[[], None]:
        layers = [layer for name in controls if isinstance(layer := model.get_submodule(name), MoE)]
        undo = _RestoreControls([(layer, layer.control) for layer in layers])
        for layer, control in zip(layers, controls.values(), strict=True):
            layer.hand(control)
        return undo

    def runs_instead(self, module: nn.Module) -> str | None:
        return None

    def engine(self, module: nn.Module) -> ExpertsEngine | None:
        return module.experts.engine if isinstance(module, MoE) else None


class _RestoreControls:
    """The way back from :meth:`_OwnLayers.bind`. An object, not a closure: a model must stay picklable."""

    def __init__(self, before: list[tuple[MoE, LayerControl]]) -> None:
        self._before = before

    def __call__(self) -> None:
        for layer, control in self._before:
            layer.hand(control)


# Adapters are imported only when the library they adapt is already in use.
_HOST_MODULES = {"transformers": "lrmoe.hosts.transformers"}


def _hosts() -> list[Host]:
    adapters = [importlib.import_module(path) for library, path in _HOST_MODULES.items() if library in sys.modules]
    return [_OwnLayers(), *(adapter.HOST for adapter in adapters)]


def _nothing_found(model: nn.Module) -> str:
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and "expert" in name]
    kinds = sorted({type(module).__name__ for module in model.modules()})
    more = f" and {len(lists) - 5} more" if len(lists) > 5 else ""
    hint = f" Lists of separate experts, which cannot be recalibrated: {', '.join(lists[:5])}{more}." if lists else ""
    return (
        f"no MoE layer that LRMoE knows was found in {type(model).__name__}. It knows lrmoe.MoE and, with Transformers "
        f"imported, experts that accept experts_implementation=.{hint} Modules found: {', '.join(kinds)}"
    )
