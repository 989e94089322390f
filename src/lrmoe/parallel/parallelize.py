"""Spreading the experts of a model's own MoE layers over ranks."""

from __future__ import annotations

from torch import nn

from lrmoe.experts.stored_weights import partitioned_by, why_unusable
from lrmoe.layer import MoE
from lrmoe.parallel.expert_parallel import ExpertParallel
from lrmoe.parallel.expert_parameters import mark_experts


def parallelize(model: nn.Module, ep: ExpertParallel) -> nn.Module:
    """Gives this rank its part of the experts of every :class:`lrmoe.MoE` of ``model``, and runs them through ``ep``.

    Every rank calls it on the same model, with the same weights, before the optimizer is made and before DDP or FSDP
    wraps anything. The parameters keep their names and become what ``ep.local`` gives of them.
    DistributedDataParallel around ``model`` leaves them alone from then on.

    Returns:
        ``model``, changed in place.

    Raises:
        ValueError: if there is no such layer, or one that does not fit ``ep`` or whose weights are quantized or
            partitioned; nothing is changed then.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        raise ValueError(
            f"no lrmoe.MoE layer in {type(model).__name__}; models of other libraries bring their own expert "
            "parallelism, see the pages on hosts"
        )
    for name, layer in layers.items():
        if layer.experts.engine is not None:
            raise ValueError(f"{name or 'the layer'} is parallelized already")
        for key, parameter in layer.experts.named_parameters():
            label = f"{name or 'the layer'}.experts.{key}"
            if problem := why_unusable(parameter):
                raise ValueError(f"{label} {problem}")
            if who := partitioned_by(parameter):
                raise ValueError(
                    f"{label} is partitioned by {who} already (its shape is {tuple(parameter.shape)}); call "
                    "parallelize on the whole model, before anything partitions it"
                )
        if layer.num_experts != ep.num_experts:
            raise ValueError(
                f"{name or 'the layer'} has {layer.num_experts} experts, ep is for {ep.num_experts}; make an "
                "ExpertParallel for each number of experts"
            )
    ignored = set(getattr(model, _IGNORED_BY_DDP, ()))
    for name, layer in layers.items():
        for key, parameter in list(layer.experts.named_parameters()):
            local = nn.Parameter(ep.local(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
            setattr(layer.experts, key, local)
            mark_experts(local, group=ep.group, by_range=ep.ownership == "home")
            ignored.add(f"{name}.experts.{key}".lstrip("."))
        ep.register(ep.registered.next_number(), *layer.experts.parameters())
        layer.experts.engine = ep
    setattr(model, _IGNORED_BY_DDP, sorted(ignored))
    return model


# Where DistributedDataParallel looks for what it should neither broadcast nor average.
_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
