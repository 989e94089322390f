"""An optimizer's state in a checkpoint: written by any number of ranks, read by any other number.

A run of one process keeps Transformers' ``optimizer.pt``. Several ranks write ``optimizer/`` together, with
torch.distributed.checkpoint: each its own shards, by parameter name and place in the whole tensor, so that an expert's
moments are found again wherever it then lives. Both are read by both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

FOLDER = "optimizer"
FILE = "optimizer.pt"

# By parameter name, whatever groups the optimizer has made of them: those depend on how the parameters are sharded.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def is_whole(checkpoint: Path) -> bool:
    """Whether the checkpoint is one process's, with the optimizer in Transformers' own file."""
    return (checkpoint / FILE).is_file()


def save_shards(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Writes ``optimizer/``; collective.

    Raises:
        OSError: on all ranks, if one of them cannot write.
    """
    state = _contiguous(get_optimizer_state_dict(model, optimizer, options=_BY_NAME))
    with _told(f"the optimizer's state cannot be written to {checkpoint / FOLDER}"):
        state_dict_saver.save({"optimizer": state}, checkpoint_id=checkpoint / FOLDER)


def load(model: nn.Module, optimizer: Optimizer, checkpoint: Path, names: list[list[str]]) -> None:
    """Restores what the checkpoint holds; collective where there are several ranks.

    Args:
        model: of this run.
        optimizer: of this run; its steps so far are forgotten.
        checkpoint: folder of a checkpoint.
        names: the parameters of each group of a run of one process, in order, as ``optimizer.pt`` counts them.

    Raises:
        ValueError: if the checkpoint has no optimizer's state, or one of other parameters.
    """
    if (checkpoint / FOLDER).is_dir():
        _load_shards(model, optimizer, checkpoint / FOLDER)
    elif (checkpoint / FILE).is_file():
        _load_file(model, optimizer, checkpoint / FILE, names)
    else:
        raise ValueError(f"{checkpoint} has no optimizer's state ({FOLDER}/ or {FILE}), so training cannot continue")


def _load_shards(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    state = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    placed = _contiguous(state)
    with warnings.catch_warnings(), _told(f"the optimizer's state cannot be read from {folder}"):
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
        state_dict_loader.load({"optimizer": placed}, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer, _like(placed, state), options=_BY_NAME)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What torch.distributed.checkpoint raises is no Exception, and whoever reports those would not see it."""
    try:
        yield
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        text = "; ".join(f"rank {rank}: {failure}" for rank, failure in failures.items())
        kind = OSError if all(isinstance(failure, (OSError, ValueError)) for failure in failures.values()) else None
        raise (kind or RuntimeError)(f"{what}: {text}") from error


def _load_file(model: nn.Module, optimizer: Optimizer, path: Path, names: list[list[str]]) -> None:
    stored = torch.load(path, map_location="cpu", weights_only=True)
    counts = [len(group["params"]) for group in stored["param_groups"]]
    if counts != [len(group) for group in names]:
        raise ValueError(f"{path} is of {counts} parameters, this model has {[len(group) for group in names]}")
    whole: dict[str, Any] = {}
    for group, group_names in zip(stored["param_groups"], names, strict=True):
        for index, name in zip(group["params"], group_names, strict=True):
            whole.update({f"state.{name}.{key}": value for key, value in stored["state"][index].items()})
            whole.update({f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"})
    state = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    placed = _contiguous(state)
    for key, value in placed.items():
        if key not in whole:
            continue
        if isinstance(value, DTensor):
            mine = whole[key].to(value.device)
            placed[key] = distribute_tensor(mine, value.device_mesh, value.placements, src_data_rank=None)
        else:
            placed[key] = whole[key]
    set_optimizer_state_dict(model, optimizer, _like(placed, state), options=_BY_NAME)


def _contiguous(state: dict[str, Any]) -> dict[str, Any]:
    """The state with every shard one contiguous piece of its tensor; FSDP2's strided ones cannot be written as such."""
    return {
        key: _placed(value, _pieces(value)) if isinstance(value, DTensor) else value for key, value in state.items()
    }


def _pieces(value: DTensor) -> list[Any]:
    return [Shard(dim) if (dim := getattr(p, "dim", None)) is not None else p for p in value.placements]


def _placed(value: DTensor, placements: Sequence[Any]) -> DTensor:
    mesh = value.device_mesh
    pairs = zip(range(mesh.ndim), value.placements, placements, strict=True)
    if all(mesh.size(dim) == 1 for dim, old, new in pairs if old != new):
        # Another name for the same: what one rank has is the whole, however it is cut.
        return DTensor.from_local(
            value.to_local(), mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    return value.redistribute(placements=placements)


def _like(state: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`_contiguous`."""
    return {
        key: _placed(value, reference[key].placements) if isinstance(value, DTensor) else value
        for key, value in state.items()
    }
