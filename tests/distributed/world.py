"""A pool of four processes for tests of torch.distributed: started once, so that a test costs milliseconds.

    def add(group: dist.ProcessGroup, value: int) -> Tensor:      # at the top level of the test's module
        total = torch.tensor(value + group.rank())
        dist.all_reduce(total, group=group)
        return total

    totals = run_world(2, add, 10)                                 # [tensor(21), tensor(21)], one a rank

Every call gets a gloo group of its own, which is the *default* group while the function runs: ``dist.new_group``,
device meshes, DDP and FSDP see a world of exactly ``size`` ranks, and nothing of an earlier call.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

import rounding

POOL = 4
# How long the other ranks get to report once one of them has failed.
_GRACE_S = 10.0


class WorldError(AssertionError):
    """A rank's function raised, a rank died, or the call took too long."""


def run_world(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float | None = None,
    breaks_group: bool = False,
) -> list[Any]:
    """Runs ``function(group, *args)`` on ranks 0 .. size-1 and returns what each of them returned.

    Args:
        size: 1 to 4 ranks.
        function: a function at the top level of an importable module. ``group`` is the default group, with ``rank()``
            and ``size()``.
        args: anything that pickles; every rank gets a copy. So must be what the function returns.
        timeout: seconds for the whole call; when they are over, the processes are killed and the next call starts
            new ones.
        group_timeout: seconds that a collective of the group waits; the call's if not given.
        breaks_group: the function leaves a group behind that cannot be used any more.

    Raises:
        WorldError: with the traceback of the rank that failed first.
    """
    global _pool
    if not 1 <= size <= POOL:
        raise ValueError(f"size={size} must be 1 to {POOL}")
    if _pool is None:
        _pool = _Pool()
    try:
        return _pool.run(size, (function, args), timeout, group_timeout or timeout, breaks_group)
    except BaseException:
        if _pool is not None and not _pool.usable:
            close()
        raise


def close() -> None:
    """Kills the processes; a later call starts new ones."""
    global _pool
    if _pool is not None:
        _pool.kill()
        _pool = None


def fork_server() -> ForkServerContext:
    """Starts processes in a moment: what all need is imported once, before there is any thread, and then forked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint", "lrmoe.parallel"])
    return context


class _Pool:
    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self.usable = True
        self.calls = 0
        # Held here, so that it outlives any rank.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = fork_server()
        # The ranks compute as this process does.
        arithmetic = (torch.get_num_threads(), rounding.is_by_shape())
        self.ends: list[Connection] = []
        self.processes = []
        for number in range(POOL):
            ours, theirs = context.Pipe()
            args = (theirs, self.store.port, *arithmetic)
            process = context.Process(target=_serve, args=args, daemon=True, name=f"rank {number}")
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def run(self, size: int, call: tuple[Any, ...], timeout: float, group_timeout: float, breaks: bool) -> list[Any]:
        self.calls += 1
        task = pickle.dumps(call)
        results: dict[int, Any] = {}
        errors: list[str] = []
        self.usable = False
        for rank in range(size):
            self.ends[rank].send_bytes(pickle.dumps((sys.path, task, rank, size, self.calls, group_timeout, breaks)))
        end = time.monotonic() + timeout
        pending = set(range(size))
        while pending:
            left = end - time.monotonic()
            ready = wait([self.ends[rank] for rank in pending], timeout=max(left, 0.0))
            if not ready:
                names = ", ".join(str(rank) for rank in sorted(pending))
                errors.append(f"rank {names} had not returned when the time ({timeout:g} s, or the grace) was over")
                break
            for rank in [rank for rank in sorted(pending) if self.ends[rank] in ready]:
                pending.discard(rank)
                try:
                    succeeded, value = pickle.loads(self.ends[rank].recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].join(1)
                    errors.append(f"rank {rank} died (exit code {self.processes[rank].exitcode})")
                    pending.add(-1)  # its process has to be replaced
                    succeeded = False
                else:
                    if not succeeded:
                        errors.append(f"rank {rank}: {value}")
                if succeeded:
                    results[rank] = pickle.loads(value)
                else:
                    end = min(end, time.monotonic() + _GRACE_S)
            if pending == {-1}:
                break
        self.usable = not pending
        if errors:
            raise WorldError(f"{getattr(call[0], '__name__', call[0])} on {size} ranks\n" + "\n".join(errors))
        return [results[rank] for rank in range(size)]

    def kill(self) -> None:
        self.usable = False
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)
        for end in self.ends:
            end.close()


_pool: _Pool | None = None
atexit.register(close)


def _serve(end: Connection, port: int, threads: int, by_shape: bool) -> None:
    """What a process of the pool does: one call after the other."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if by_shape:
        rounding.by_shape()
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            sys.path[:], task, rank, size, call, timeout, breaks_group = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            function, args = pickle.loads(task)
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"call {call}", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
            value = function(dist.group.WORLD, *args)
            # A rank that is done must not close its connections while another still reads from them.
            if not breaks_group:
                dist.barrier()
            succeeded, value = True, pickle.dumps(value)
        except BaseException:
            succeeded, value = False, traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            if not succeeded:
                # Connections go with the last reference to the group; after a failure the others wait for that.
                gc.collect()
        end.send_bytes(pickle.dumps((succeeded, value)))


def _follow_parent(parent: int) -> None:
    """Ends the process when the one that started it is gone, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
