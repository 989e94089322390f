"""``lrmoe.attach``: the recalibrated backward for a model, whoever brings its MoE layers."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

from lrmoe.config import LRMoEConfig, require_config
from lrmoe.control import Recalibrator
from lrmoe.control.hosted import Host, HostedLayers
from lrmoe.control.optimizers import hookable
from lrmoe.hosts import own_layers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Adapters are imported only when the library they adapt is already in use.
_ADAPTERS = {"transformers": "lrmoe.hosts.transformers"}


def attach(
    model: nn.Module,
    config: LRMoEConfig | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    load_group: ProcessGroup | None = None,
) -> Recalibrator:
    """Recalibrates the backward of every MoE layer of ``model``.

    Works on :class:`lrmoe.MoE` layers and, when Transformers is in use, on the expert modules of its MoE models.
    Parameters, their names and the forward stay as they are.

    Args:
        model: any module that contains MoE layers.
        config: the recalibration; default :class:`LRMoEConfig()`.
        optimizer: if given, :meth:`Recalibrator.step` is called after each of its steps. Otherwise call it yourself,
            once per optimizer step, or use the host's callback.
        load_group: the ranks that train copies of the model on other tokens (all of them, or under expert parallelism
            those with the same experts). Each :meth:`Recalibrator.step` then adds up, in collectives, their loads, so
            that the selection biases of :class:`lrmoe.MoE` routers stay the same, and what their guards look at, so
            that all ranks stop dropping in the same layers.

    Raises:
        ValueError: if no MoE layer is found (listing what is there), if one is found that cannot be recalibrated, or
            if a recalibrator is already attached.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    config = require_config(config)
    if optimizer is not None:
        optimizer = hookable(optimizer)
        _warn_if_foreign(optimizer, model)
    for name, module in model.named_modules():
        if vars(module).get("_lrmoe_recalibrator") is not None:
            part = f"its part {name}" if name else "this model"
            raise ValueError(f"{part} already has a recalibrator; call its detach() before attaching another")
    return Recalibrator(model, HostedLayers(model, _hosts()), config, optimizer, load_group)


def _hosts() -> list[Host]:
    adapters = [importlib.import_module(path) for library, path in _ADAPTERS.items() if library in sys.modules]
    return [own_layers.HOST, *(adapter.HOST for adapter in adapters)]


def _warn_if_foreign(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    # Not an error: an optimizer of fp32 master copies or flattened shards holds none of the model's own tensors either.
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in own for parameter in held):
        warnings.warn(
            f"optimizer holds no parameter of this {type(model).__name__}; unless it updates copies of them, pass the "
            "optimizer that trains this model",
            UserWarning,
            stacklevel=3,
        )
