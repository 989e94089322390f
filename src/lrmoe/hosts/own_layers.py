"""The host of :class:`lrmoe.MoE` layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lrmoe.experts.layer_control import LayerControl
from lrmoe.experts.stored_weights import why_unusable
from lrmoe.labels import layer_label
from lrmoe.layer import ExpertsEngine, MoE


class _OwnLayersHost:
    """Finds and hands controls to the layers of LRMoE itself."""

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
        undo = _Binding([(layer, layer.control) for layer in layers])
        for layer, control in zip(layers, controls.values(), strict=True):
            layer.hand(control)
        return undo

    def runs_instead(self, module: nn.Module) -> str | None:
        return None

    def engine(self, module: nn.Module) -> ExpertsEngine | None:
        return module.experts.engine if isinstance(module, MoE) else None


class _Binding:
    """The way back from :meth:`_OwnLayersHost.bind`. An object, not a closure: a model must stay picklable."""

    def __init__(self, before: list[tuple[MoE, LayerControl]]) -> None:
        self._before = before

    def __call__(self) -> None:
        for layer, control in self._before:
            layer.hand(control)


HOST = _OwnLayersHost()
