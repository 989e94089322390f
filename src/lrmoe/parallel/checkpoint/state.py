"""What a checkpoint holds, by name: one key for a tensor that all ranks share, one for each expert of the others.

    model.layers.0.router.weight                        whole
    model.layers.0.experts.gate_up_proj.expert.5        expert 5 (global id), wherever it lives
    optimizer.layers.0.experts.gate_up_proj.exp_avg.expert.5

Nothing in here communicates but :func:`to_save`, where experts are sharded further.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# What wrappers put into the names of parameters.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_EXPERT = re.compile(r"(.+)\.expert\.(\d+)")


@dataclass(frozen=True)
class Range:
    """This rank's experts: ``count`` of ``total``, from global id ``first``."""

    first: int
    count: int
    total: int


@dataclass(frozen=True)
class Item:
    """A tensor under its key. ``experts`` says that its first dimension is a range of experts."""

    key: str
    tensor: Tensor
    experts: Range | None

    @property
    def is_sharded(self) -> bool:
        return getattr(self.tensor, "placements", None) is not None


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, without what wrappers add to the names.

    Raises:
        ValueError: for state that is no tensor.
    """
    model = _unwrapped(model)
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ValueError(f"the model's state {name!r} is {type(value).__name__}, only tensors can be saved")
        found[_clean(name)] = value
    return found


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters of each group.

    Raises:
        ValueError: if a parameter is none of the model's.
    """
    model = _unwrapped(model)
    names = {id(parameter): _clean(name) for name, parameter in model.named_parameters()}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {place} of the optimizer's group {index} is none of the model's: make the optimizer "
                    "after parallelize, DistributedDataParallel and fully_shard"
                )
        groups.append([names[id(parameter)] for parameter in group["params"]])
    return groups


def state_items(name: str, state: Mapping[str, Any], experts: Range | None) -> Iterator[Item]:
    """The tensors of one parameter's optimizer state.

    Raises:
        ValueError: for a tensor that cannot be told apart by expert.
    """
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        by_expert = experts if value.dim() else None
        if by_expert is not None and value.shape[0] != by_expert.count:
            raise ValueError(
                f"the optimizer's {key!r} of {name} has shape {tuple(value.shape)}, which is not by expert "
                f"({by_expert.count} on this rank); this optimizer cannot be saved with experts on several ranks"
            )
        yield Item(f"optimizer.{name}.{key}", value, by_expert)


def to_save(items: Iterable[Item]) -> dict[str, Tensor]:
    """Every tensor under the keys of the file. Experts sharded further are put together, collectively on their mesh."""
    state: dict[str, Tensor] = {}
    for item in items:
        tensor = item.tensor.detach()
        if item.experts is None:
            state[item.key] = tensor
            continue
        whole = tensor.full_tensor() if item.is_sharded else tensor  # type: ignore[attr-defined]
        for place in range(item.experts.count):
            state[f"{item.key}.expert.{item.experts.first + place}"] = whole[place]
    return state


@dataclass(frozen=True)
class Saved:
    """A tensor in a checkpoint: ``shape`` in all, experts first; ``by_expert`` if each has a key of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    by_expert: bool


def saved_tensors(metadata: Mapping[str, Any]) -> dict[str, Saved]:
    """The tensors of a checkpoint by key, experts of one tensor put together.

    Args:
        metadata: ``state_dict_metadata`` of torch.distributed.checkpoint.

    Raises:
        ValueError: if experts are missing.
    """
    whole: dict[str, Saved] = {}
    experts: dict[str, dict[int, tuple[tuple[int, ...], torch.dtype]]] = {}
    for key, entry in metadata.items():
        found = tuple(entry.size), entry.properties.dtype
        match = _EXPERT.fullmatch(key)
        if match:
            experts.setdefault(match[1], {})[int(match[2])] = found
        else:
            whole[key] = Saved(*found, by_expert=False)
    for base, by_id in experts.items():
        ids = sorted(by_id)
        if ids != list(range(len(ids))):
            missing = sorted(set(range(ids[-1] + 1)) - set(ids))
            raise ValueError(f"the checkpoint lacks experts {missing} of {base}; it is damaged")
        if len(set(by_id.values())) > 1:
            raise ValueError(f"the experts of {base} in the checkpoint have different shapes or dtypes; it is damaged")
        shape, dtype = by_id[0]
        whole[base] = Saved((len(ids), *shape), dtype, by_expert=True)
    return whole


def differences(items: Iterable[Item], saved: Mapping[str, Saved], prefix: str) -> list[str]:
    """Why the items cannot be read from the checkpoint, one line each; empty if they can."""
    lines = []
    wanted = {item.key: item for item in items}
    for key, item in wanted.items():
        shape = tuple(item.tensor.shape)
        if item.experts is not None:
            shape = (item.experts.total, *shape[1:])
        if key not in saved:
            lines.append(f"{key} {shape} is not in the checkpoint")
            continue
        if saved[key].shape != shape:
            lines.append(f"{key} is {saved[key].shape} in the checkpoint, {shape} here")
        elif saved[key].dtype != item.tensor.dtype:
            lines.append(f"{key} is {saved[key].dtype} in the checkpoint, {item.tensor.dtype} here")
    for key, found in saved.items():
        if key.startswith(prefix) and key not in wanted:
            lines.append(f"{key} {found.shape} is in the checkpoint only")
    return lines


def to_load(items: Iterable[Item], saved: Mapping[str, Saved]) -> tuple[dict[str, Tensor], list[Callable[[], None]]]:
    """Where to read each key of the file to, in place where that can be, and what to do after reading."""
    state: dict[str, Tensor] = {}
    after: list[Callable[[], None]] = []
    for item in items:
        found = saved[item.key]
        target = item.tensor.detach()
        if not found.by_expert and item.experts is None:
            state[item.key] = target
            continue
        experts = item.experts or Range(0, found.shape[0], found.shape[0])
        if found.by_expert:
            rows = target
            if item.is_sharded:
                rows = torch.empty((experts.count, *found.shape[1:]), dtype=found.dtype, device=target.device)
                after.append(_spread(target, rows))
            for place in range(experts.count):
                state[f"{item.key}.expert.{experts.first + place}"] = rows[place]
        else:
            # One process saved it without the mark: all experts in one tensor.
            whole = torch.empty(found.shape, dtype=found.dtype, device=target.device)
            state[item.key] = whole
            after.append(_spread(target, whole[experts.first : experts.first + experts.count]))
    return state, after


def _spread(target: Tensor, whole: Tensor) -> Callable[[], None]:
    """Copies ``whole`` into ``target``, which may be sharded; every rank has all of it, so nothing is sent."""

    def copy() -> None:
        if getattr(target, "placements", None) is None:
            target.copy_(whole)
            return
        from torch.distributed.tensor import DTensor, Replicate

        mesh = target.device_mesh  # type: ignore[attr-defined]
        everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        target.to_local().copy_(everywhere.redistribute(placements=target.placements).to_local())  # type: ignore[attr-defined]

    return copy


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel or torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
