"""The pool that the distributed tests run on: groups of every size, errors that arrive, nothing that hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from distributed.world import WorldError, run_world
from torch import Tensor


def total_of_ranks(group: dist.ProcessGroup, start: int) -> tuple[int, int, Tensor, int]:
    total = torch.tensor(start + group.rank())
    dist.all_reduce(total)
    return group.rank(), dist.get_world_size(), total, os.getpid()


def fail_on(group: dist.ProcessGroup, rank: int) -> None:
    if group.rank() == rank:
        raise KeyError("the reason")
    dist.barrier(group)


def die_on(group: dist.ProcessGroup, rank: int) -> None:
    if group.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def sleep(group: dist.ProcessGroup, seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_world_has_exactly_its_ranks(size: int) -> None:
    results = run_world(size, total_of_ranks, 10)
    assert [(rank, world) for rank, world, _, _ in results] == [(rank, size) for rank in range(size)]
    assert all(total == 10 * size + sum(range(size)) for _, _, total, _ in results)


def test_processes_are_kept() -> None:
    first = [pid for *_, pid in run_world(4, total_of_ranks, 0)]
    assert first[:2] == [pid for *_, pid in run_world(2, total_of_ranks, 0)]
    assert len(set(first) | {os.getpid()}) == 5


def test_a_call_is_cheap() -> None:
    run_world(4, total_of_ranks, 0)
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        run_world(4, total_of_ranks, 0)
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 0.5


def test_an_error_arrives_with_its_traceback_and_the_others_do_not_wait_for_it() -> None:
    start = time.monotonic()
    with pytest.raises(WorldError, match=r"rank 1: (?s:.*)fail_on(?s:.*)KeyError: 'the reason'"):
        run_world(2, fail_on, 1)
    assert time.monotonic() - start < 15
    assert run_world(2, total_of_ranks, 0)[1][2] == 1


def test_a_dead_or_late_rank_is_an_error_and_the_next_call_starts_anew() -> None:
    with pytest.raises(WorldError, match="rank 1 died"):
        run_world(2, die_on, 1)
    with pytest.raises(WorldError, match="rank 0, 1 had not returned"):
        run_world(2, sleep, 30.0, timeout=0.5)
    assert run_world(2, total_of_ranks, 0)[0][2] == 1


def test_sizes_the_pool_has_not() -> None:
    with pytest.raises(ValueError, match="size=5"):
        run_world(5, sleep, 0.0)
