"""Saving and loading: what each rank writes and reads, and that all do or none does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lrmoe import strict_json
from lrmoe.config import require_count
from lrmoe.parallel.checkpoint import folder as folders
from lrmoe.parallel.checkpoint.optimizer import Restored, items_of
from lrmoe.parallel.checkpoint.optimizer import describe as describe_optimizer
from lrmoe.parallel.checkpoint.state import (
    Item,
    differences,
    names_of,
    saved_tensors,
    tensors_of,
    to_load,
    to_save,
)
from lrmoe.parallel.checkpoint.table import Row, row
from lrmoe.parallel.checkpoint.table import ranges as ranges_of
from lrmoe.parallel.meeting import all_gather_json

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on every rank, and says on which it failed."""


class _Stateful(Protocol):
    """A recalibrator or a policy."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Policy(_Stateful, Protocol):
    name: str


@dataclass(frozen=True)
class Loaded:
    """Where a checkpoint was made, and what was given to :func:`save` as ``extra``."""

    step: int
    extra: Any


def save(
    folder: str | os.PathLike[str],
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    recalibrator: _Stateful | None = None,
    policy: _Policy | None = None,
    extra: Any = None,
    group: dist.ProcessGroup | None = None,
    world: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
) -> Path:
    """Writes ``folder/step-...``; every rank calls it between two steps. A checkpoint of the same step is replaced.

    Args:
        folder: of all checkpoints of a run, which all ranks can reach.
        step: optimizer steps done.
        model: whose parameters and persistent buffers to save.
        optimizer: of parameters of ``model``.
        recalibrator: what :func:`lrmoe.attach` returned.
        policy: the balancing policy, ``ExpertParallel.policy``.
        extra: anything that JSON can hold, e.g. a scheduler's state; rank 0's is saved.
        group: the expert-parallel group that the marked parameters are spread over; the default group if None.
        world: all ranks that save together; the default group if None.
        timeout_s: seconds that lrmoe's own collectives wait; those of torch.distributed.checkpoint wait as long as the
            group does.

    Returns:
        the new checkpoint.

    Raises:
        ValueError: on every rank, before anything is written, if there is something that cannot be saved, or a
            parameter is neither marked as experts nor the same on all ranks of ``group``.
        CheckpointError: on every rank, if one cannot write; no checkpoint appears then.
        RankFailure: if a rank is lost or too late; no checkpoint appears then.
    """
    folder = Path(folder)
    ranks = _Ranks(group, world, timeout_s)

    def look() -> tuple[dict[str, Tensor], list[list[str]], Row]:
        require_count("step", step)
        tensors = tensors_of(model)
        names = [] if optimizer is None else names_of(model, optimizer)
        return tensors, names, row(tensors, ranks.group, optimizer=optimizer, names=names, compare=True)

    tensors, names, mine = ranks.together("looking at what to save", look)
    table = ranks.tabulate(mine)

    def describe() -> tuple[list[Item], dict[str, Any]]:
        ranges = ranges_of(table, ranks.place)
        items = [Item(f"model.{name}", tensor, ranges.get(name)) for name, tensor in tensors.items()]
        if optimizer is not None:
            items += items_of(optimizer, names, ranges)
        manifest = {
            "ranks": ranks.size,
            "optimizer": None if optimizer is None else describe_optimizer(optimizer, names),
            "recalibrator": None if recalibrator is None else recalibrator.state_dict(),
            "policy": None if policy is None else {"name": policy.name, "state": policy.state_dict()},
            "extra": extra,
        }
        try:
            strict_json.dumps(manifest)
        except (TypeError, ValueError) as error:
            raise ValueError(f"extra, or an option of the optimizer, is nothing that JSON can hold: {error}") from None
        return items, manifest

    items, manifest = ranks.together("describing what to save", describe)
    partial = folders.partial_of(folder, step)
    try:
        ranks.first("making the checkpoint's folder", lambda: folders.begin(folder, step))
        files = ranks.together("writing the checkpoint", lambda: _write(items, partial, ranks))
        ranks.first("finishing the checkpoint", lambda: folders.commit(partial, step, files, manifest))
    except BaseException:
        if ranks.rank == 0:
            folders.discard(partial)
        raise
    return folders.final_of(folder, step)


def load(
    checkpoint: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    recalibrator: _Stateful | None = None,
    policy: _Policy | None = None,
    group: dist.ProcessGroup | None = None,
    world: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
) -> Loaded:
    """Restores what :func:`save` wrote, on any number of ranks, in place; every rank calls it.

    Load only what you trust: the index of torch.distributed.checkpoint is a pickle.

    Args:
        checkpoint: what :func:`save` or :func:`newest` returned.
        model, optimizer, recalibrator, policy: as for :func:`save`; what is None is not restored. The optimizer may be
            new: it gets the state it was saved with.
        group, world, timeout_s: as for :func:`save`.

    Raises:
        ValueError: on every rank, before model and optimizer are touched, if this is no complete checkpoint, or one of
            another model, optimizer, policy or configuration; names what is missing and what does not fit.
        CheckpointError: on every rank, if one cannot read. The model is then partly loaded: do not train on.
        RankFailure: if a rank is lost or too late.
    """
    path = Path(checkpoint)
    ranks = _Ranks(group, world, timeout_s)

    def look() -> tuple[dict[str, Any], dict[str, Tensor], list[list[str]], Row]:
        manifest = folders.read_manifest(path)
        tensors = tensors_of(model)
        names = [] if optimizer is None else names_of(model, optimizer)
        return manifest, tensors, names, row(tensors, ranks.group, source=[path.name, manifest["step"]])

    manifest, tensors, names, mine = ranks.together("looking at the checkpoint", look)
    table = ranks.tabulate(mine)

    def prepare() -> tuple[dict[str, Tensor], list[Callable[[], None]]]:
        ranges = ranges_of(table, ranks.place)
        saved = saved_tensors(FileSystemReader(path).read_metadata().state_dict_metadata)
        items = [Item(f"model.{name}", tensor, ranges.get(name)) for name, tensor in tensors.items()]
        lines = differences(items, saved, "model.")
        finish: list[Callable[[], None]] = []
        if optimizer is not None:
            restored = Restored(optimizer, names, ranges, manifest["optimizer"], saved)
            lines += restored.differences or differences(restored.items, saved, "optimizer.")
            items += restored.items
            finish = [restored.adopt]
        if lines:
            shown = "\n  ".join(lines[:10]) + (f"\n  and {len(lines) - 10} more" if len(lines) > 10 else "")
            raise ValueError(f"{path} does not fit this model and optimizer:\n  {shown}")
        _restore_plain(path, manifest, recalibrator, policy)
        state, after = to_load(items, saved)
        return state, after + finish

    state, finish = ranks.together("preparing to load the checkpoint", prepare)

    def read() -> None:
        with torch.no_grad(), _quiet():
            # Each rank reads what it needs; nothing has to be agreed on.
            dcp_load(state, storage_reader=FileSystemReader(path), no_dist=True)
            for step in finish:
                step()

    ranks.together("reading the checkpoint", read)
    return Loaded(manifest["step"], manifest["extra"])


def _write(items: list[Item], partial: Path, ranks: _Ranks) -> list[str]:
    """Writes the tensors, all ranks together, and returns the names of the files."""
    writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
    with _quiet():
        metadata = dcp_save(
            to_save(items), storage_writer=writer, process_group=ranks.world, no_dist=ranks.world is None
        )
    return sorted({entry.relative_path for entry in (metadata.storage_data or {}).values()})


def _restore_plain(
    path: Path, manifest: Mapping[str, Any], recalibrator: _Stateful | None, policy: _Policy | None
) -> None:
    for name, part in (("recalibrator", recalibrator), ("policy", policy)):
        if part is not None and manifest[name] is None:
            raise ValueError(f"{path} holds no state of a {name}; load it without {name}=")
    if policy is not None:
        if manifest["policy"]["name"] != policy.name:
            raise ValueError(
                f"{path} was saved with policy {manifest['policy']['name']!r}, this is {policy.name!r}; continue with "
                "the saved policy, or load without policy="
            )
        try:
            policy.load_state_dict(manifest["policy"]["state"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}; or load without policy=, which then begins anew") from None
    if recalibrator is not None:
        recalibrator.load_state_dict(manifest["recalibrator"])


class _Ranks:
    """The ranks that save or load together: what fails on one of them fails on all."""

    def __init__(
        self, group: dist.ProcessGroup | None, world: dist.ProcessGroup | None, timeout_s: float | None
    ) -> None:
        default = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self.group, self.world = group or default, world or default
        self.timeout_s = timeout_s
        self.rank = 0 if self.world is None else self.world.rank()
        self.size = 1 if self.world is None else self.world.size()
        self.place = 0 if self.group is None else self.group.rank()

    def tabulate(self, row: Row) -> list[Row]:
        """The rows of all ranks of the expert-parallel group."""
        if self.group is None:
            return [row]
        return all_gather_json(row, self.group, what="experts of a checkpoint", timeout_s=self.timeout_s)

    def first(self, what: str, action: Callable[[], Any]) -> None:
        """Runs ``action`` on the first rank alone; the others wait for it."""
        self.together(what, lambda: action() if self.rank == 0 else None)

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Runs ``action`` on every rank. Where it raises on one, all raise, and say on which it was."""
        error: BaseException | None = None
        try:
            value = action()
        except (Exception, CheckpointException) as caught:
            error = caught
        own = None if error is None else [isinstance(error, ValueError), _text(error)]
        reports = [own] if self.world is None else all_gather_json(own, self.world, what=what, timeout_s=self.timeout_s)
        failed = {rank: report for rank, report in enumerate(reports) if report is not None}
        if not failed:
            return value
        texts = list(dict.fromkeys(text for _, text in failed.values()))
        if len(failed) < self.size:
            texts = [f"rank {rank}: {text}" for rank, (_, text) in failed.items()]
        if all(is_value for is_value, _ in failed.values()):
            raise ValueError("\n".join(texts)) from error
        raise CheckpointError(f"{what} failed: " + "\n".join(texts)) from error


def _text(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_text(failure[0])}" for rank, failure in error.failures.items())
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning of torch.distributed.checkpoint that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
