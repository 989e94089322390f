"""The MoE layers of a model, each with the host that brings it: LRMoE itself or an adapter to another library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import nn

from lrmoe.experts.layer_control import LayerControl
from lrmoe.layer import ExpertsEngine


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

    def __init__(self, model: nn.Module, hosts: Iterable[Host]) -> None:
        found = [(host, host.find(model)) for host in hosts]
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


def _nothing_found(model: nn.Module) -> str:
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and "expert" in name]
    kinds = sorted({type(module).__name__ for module in model.modules()})
    more = f" and {len(lists) - 5} more" if len(lists) > 5 else ""
    hint = f" Lists of separate experts, which cannot be recalibrated: {', '.join(lists[:5])}{more}." if lists else ""
    return (
        f"no MoE layer that LRMoE knows was found in {type(model).__name__}. It knows lrmoe.MoE and, with Transformers "
        f"imported, experts that accept experts_implementation=.{hint} Modules found: {', '.join(kinds)}"
    )
