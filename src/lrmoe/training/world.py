"""The processes of a training run: which one this is, and the few small things they tell each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among those of the run. All methods are collective; a run of one process has none to wait for."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files and speaks to the user."""
        return self.rank == 0

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1, device="cpu"))

    def broadcast(self, value: Any) -> Any:
        """What rank 0 was given, on every rank; anything that pickles."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def agree(self, error: Exception | None) -> None:
        """Ends all ranks if one of them has something to complain of.

        Raises:
            ValueError: on rank 0, with the first complaint.
            SystemExit: on the others, which have nothing to add.
        """
        complaints: list[str | None] = [None if error is None else str(error)] * self.size
        if self.size > 1:
            dist.all_gather_object(complaints, complaints[0])
        for rank, complaint in enumerate(complaints):
            if complaint is not None and self.is_main:
                raise ValueError(complaint if rank == 0 else f"rank {rank}: {complaint}")
        if any(complaint is not None for complaint in complaints):
            raise SystemExit(2)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in fp64; the same bits on every rank."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def mean(self, values: Sequence[float]) -> list[float]:
        """Each value's mean over the ranks."""
        return [value / self.size for value in self.sum(values)]


def torchrun_size() -> int | None:
    """How many processes torchrun has started, of which this is one; None if it has not.

    Raises:
        ValueError: if what torchrun sets is no number.
    """
    told = {name: os.environ.get(name) for name in ("WORLD_SIZE", "RANK")}
    if None in told.values():
        return None
    for name, value in told.items():
        if not str(value).isdecimal():
            raise ValueError(f"the environment has {name}={value!r}, which must be a number: unset it, or use torchrun")
    return int(str(told["WORLD_SIZE"]))


def backend() -> str:
    """NCCL for what is on GPUs, where there are any, beside gloo."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def join_world(*, timeout: float, store: TCPStore | None = None, rank: int = -1, size: int = -1) -> World:
    """Joins the processes of this run, found through ``store`` or, without one, as torchrun says.

    Args:
        timeout: seconds a collective waits for the other ranks.
        store: where all ranks meet; then ``rank`` and ``size`` say which of them this is.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    return World(rank=dist.get_rank(), size=dist.get_world_size())
