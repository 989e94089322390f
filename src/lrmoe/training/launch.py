"""Starts the processes of a run on this machine and watches over them: with the first that fails all of them end."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lrmoe.training.world import join_world, torchrun_size

# A rank that loses another complains of it; this long the others get to say what it was that happened to them.
_GRACE_SECONDS = 8.0

Work = Callable[..., int]


class RunFailure(RuntimeError):
    """A run over several processes that one of them has ended; the message is one line that names the rank."""


@dataclass(frozen=True, slots=True)
class _Complaint:
    """Why a rank ended. ``bad input``: what a user can mend; ``lost``: it waited in vain for other ranks, for
    ``missing`` if it knows them; ``failed``: else."""

    kind: Literal["bad input", "lost", "failed"]
    message: str
    trace: str = ""
    missing: tuple[int, ...] = ()


@dataclass(slots=True)
class _Worker:
    """``dead`` and what it posted, an exit code or a complaint, are as of the last :meth:`look`."""

    process: Any
    mail: Connection
    result: int | None = None
    complaint: _Complaint | None = None
    dead: bool = False

    def look(self) -> None:
        # In this order: what a process posts just before its end is not missed.
        self.dead = self.process.exitcode is not None
        try:
            while not self.mail.closed and self.mail.poll():
                posted = self.mail.recv()
                if isinstance(posted, _Complaint):
                    self.complaint = posted
                else:
                    self.result = posted
        except (EOFError, OSError):
            self.mail.close()

    @property
    def is_suspect(self) -> bool:
        """Whether it failed of itself, and not because another rank did."""
        if self.complaint is not None:
            return self.complaint.kind != "lost"
        return self.dead and self.result is None


def warm_up() -> None:
    """Begins to import what the workers need, in a process that they are then forked from. Optional: it saves time
    where this process has something to do before :func:`launch`."""
    if _method() == "forkserver":
        multiprocessing.set_forkserver_preload(_IMPORTS)
        with _without_interrupts():
            forkserver.ensure_running()


# Once for all workers; by themselves, each would import the same on the same few cores.
_IMPORTS = ["lrmoe.training.run", "lrmoe.terminal"]


def _method() -> str:
    # CUDA does not survive a fork once a library has as much as asked for it.
    has_fork_server = "forkserver" in multiprocessing.get_all_start_methods()
    return "forkserver" if has_fork_server and torch.version.cuda is None and torch.version.hip is None else "spawn"


def launch(work: Work, *args: Any, size: int, timeout: float) -> int:
    """Runs ``work(world, *args)`` in ``size`` processes of this machine that find each other over torch.distributed.

    They end when this process does, however it ends.

    Args:
        work: a function at the top level of a module, called with its :class:`World` first; returns an exit code.
        args: anything that pickles.
        size: how many processes.
        timeout: seconds a collective waits for the other ranks.

    Returns:
        The largest exit code.

    Raises:
        ValueError: if a rank raised one, with its message.
        RunFailure: if a rank failed or was killed; the others are then stopped.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    warm_up()
    context: Any = multiprocessing.get_context(_method())
    workers: list[_Worker] = []
    # Held open, and never written to: a worker ends when its end closes.
    lifelines: list[Connection] = []
    try:
        with _without_interrupts():
            for rank in range(size):
                lifeline, held = context.Pipe(duplex=False)
                mail, post = context.Pipe(duplex=False)
                parts = (rank, size, store.port, timeout, lifeline, post, work, args)
                process = context.Process(target=_main, args=parts, name=f"rank {rank}")
                process.start()
                # The worker's ends are its own now; a copy here would keep them open.
                lifeline.close()
                post.close()
                workers.append(_Worker(process, mail))
                lifelines.append(held)
        _watch(workers)
    finally:
        _stop(workers)
        for held in lifelines:
            held.close()
    return max(worker.result or 0 for worker in workers)


def _watch(workers: list[_Worker]) -> None:
    """Returns when all have ended well."""
    deadline: float | None = None
    while not all(worker.dead for worker in workers):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        running = [worker.process.sentinel for worker in workers if not worker.dead]
        wait([*running, *(worker.mail for worker in workers if not worker.mail.closed)], left)
        for worker in workers:
            worker.look()
        if any(worker.is_suspect for worker in workers):
            break
        if any(worker.complaint is not None and worker.complaint.missing for worker in workers):
            break
        if any(worker.complaint is not None for worker in workers):
            deadline = deadline or time.monotonic() + _GRACE_SECONDS
            if time.monotonic() >= deadline:
                break
    for rank, worker in enumerate(workers):
        if worker.is_suspect:
            _raise_suspect(rank, worker)
    _raise_lost(workers)


def _raise_suspect(rank: int, worker: _Worker) -> None:
    complaint = worker.complaint
    if complaint is None:
        code = worker.process.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise RunFailure(f"rank {rank} {how}; the other ranks were stopped; continue with --resume")
    if complaint.kind == "bad input":
        raise ValueError(complaint.message)
    sys.stderr.write(complaint.trace)
    raise RunFailure(f"rank {rank} failed: {complaint.message}; the other ranks were stopped")


def _raise_lost(workers: list[_Worker]) -> None:
    complaints = {rank: worker.complaint for rank, worker in enumerate(workers) if worker.complaint is not None}
    if complaints:
        silent = [rank for rank in range(len(workers)) if rank not in complaints and not workers[rank].dead]
        rank, complaint = max(complaints.items(), key=lambda item: bool(item[1].missing))
        missing = ", ".join(map(str, complaint.missing or silent))
        who = f"rank {missing} did not answer" if missing else "the ranks lost each other"
        raise RunFailure(f"{who}; all were stopped; continue with --resume (rank {rank} says: {complaint.message})")


def _stop(workers: list[_Worker]) -> None:
    for kill, seconds in ((False, 3.0), (True, 10.0)):
        running = [worker.process for worker in workers if worker.process.is_alive()]
        for process in running:
            (process.kill if kill else process.terminate)()
        deadline = time.monotonic() + seconds
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))


class _without_interrupts:
    """Processes started inside do not get the Ctrl-C of the terminal: this process gets it and stops them."""

    def __enter__(self) -> None:
        self._before = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


def _main(
    rank: int,
    size: int,
    port: int,
    timeout: float,
    lifeline: Connection,
    post: Connection,
    work: Work,
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    # What torchrun would set, and libraries read.
    threads = max(1, (os.cpu_count() or 1) // size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    # FSDP2 chooses the layout of experts, of which DTensor says that another would be faster.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    code = 1
    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        code = work(join_world(timeout=timeout, store=store, rank=rank, size=size), *args)
        post.send(code)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        post.send(code)
    except (ValueError, OSError) as error:
        post.send(_Complaint("bad input", str(error)))
        code = 2
    except BaseException as error:  # Not all libraries' errors are Exceptions, and none may go without a word.
        post.send(_complaint_of(error))
    finally:
        post.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Past the interpreter's shutdown, in which process groups whose peers are gone may wait for them.
        os._exit(code)


def _complaint_of(error: BaseException) -> _Complaint:
    message = " ".join(str(error).split()) or type(error).__name__
    if not is_loss(error):
        return _Complaint("failed", message, traceback.format_exc())
    return _Complaint("lost", message, missing=tuple(getattr(error, "ranks", ())))


def is_loss(error: BaseException) -> bool:
    """Whether an error says that another rank did not do its part."""
    from lrmoe.parallel.collectives import RankFailure

    if isinstance(error, (RankFailure, dist.DistError)):
        return True
    # gloo's own errors have no class.
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in ("gloo", "NCCL", "Connection"))


def _end_with_parent(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def in_a_line(error: RuntimeError) -> str | None:
    """What to tell the user of a run that several processes could not finish together; None for any other error."""
    if isinstance(error, RunFailure):
        return str(error)
    if torchrun_size() is not None and is_loss(error):
        return f"rank {os.environ['RANK']} stopped: {error}; continue with --resume"
    return None


__all__ = ["RunFailure", "in_a_line", "launch", "warm_up"]
