"""Ranks that die or stop, and runs that are killed: no hang, an error that names the rank, the same losses afterwards.

These tests start processes of their own, with rank 0 holding the store, as torchrun's users have it.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from distributed.tiny_run import TinyRun, start_group
from distributed.world import fork_server

from lrmoe.parallel import RankFailure
from lrmoe.parallel.checkpoint import newest
from lrmoe.parallel.checkpoint import save_load as checkpoints

TIMEOUT_S = 2.5


def train_for_ever(end: Connection, rank: int, size: int, port: int) -> None:
    """Reports each step, and a failure with how long the step of it took."""
    run = TinyRun(start_group(rank, size, port, timeout_s=60), timeout_s=TIMEOUT_S)
    while True:
        start = time.monotonic()
        try:
            run.train(1)
        except RankFailure as error:
            end.send((type(error).__name__, str(error), error.what, error.ranks, time.monotonic() - start))
            raise
        end.send(run.step)


def train_with_checkpoints(
    end: Connection, rank: int, size: int, port: int, folder: str, last: int, slow: bool
) -> None:
    """Reports each loss; saves every second step, slowly on request, so that a kill hits it."""
    original = checkpoints.FileSystemWriter.write_data

    def write_data(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        time.sleep(0.5)
        return result

    if slow:
        checkpoints.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    run = TinyRun(start_group(rank, size, port, timeout_s=60), timeout_s=20)
    run.train_to(last, folder, 2, lambda step, loss: end.send((step, loss)))


@contextmanager
def processes(size: int, function: Callable[..., None], *args: Any) -> Iterator[tuple[list[BaseProcess], list[Any]]]:
    """One process a rank, and the end of a pipe to each; all are killed in the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = fork_server()
    ranks: list[BaseProcess] = []
    ends = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            ranks.append(context.Process(target=function, args=(theirs, rank, size, port, *args), daemon=True))
            ranks[-1].start()
            theirs.close()
            ends.append(ours)
        yield ranks, ends
    finally:
        for process in ranks:
            process.kill()
            process.join(10)


def receive(end: Connection, timeout: float = 60.0) -> Any:
    assert end.poll(timeout), "nothing came in time"
    return end.recv()


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_and_nobody_hangs(how: signal.Signals, lost: int) -> None:
    """In the middle of training of three ranks. Rank 0 is the one whose process also holds the store."""
    with processes(3, train_for_ever) as (ranks, ends):
        while receive(ends[lost]) < 3:
            pass
        pid = ranks[lost].pid
        assert pid is not None
        os.kill(pid, how)
        for rank in set(range(3)) - {lost}:
            while isinstance(found := receive(ends[rank]), int):
                pass
            name, message, what, named, seconds = found
            assert name == "RankFailure"
            assert named == (lost,)
            assert message.startswith(f"{what}: rank {lost} did not arrive")
            assert what
            # Its own timeout, the roll call, and what the machine is slow.
            assert seconds < 4 * TIMEOUT_S + 10
            ranks[rank].join(15)
            assert ranks[rank].exitcode == 1


def reports(ends: list[Connection], last: int) -> Iterator[tuple[int, float]]:
    """What rank 0 reports, until the run is over or was killed."""
    step = 0
    while step < last:
        try:
            step, loss = receive(ends[0])
        except EOFError:
            return
        yield step, loss


def test_a_run_killed_at_any_moment_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    last, size = 9, 2
    with processes(size, train_with_checkpoints, str(tmp_path / "whole"), last, False) as (_, ends):
        expected = dict(reports(ends, last))
    assert len(set(expected.values())) == last

    folder = tmp_path / "killed"

    def kill(ranks: list[BaseProcess]) -> None:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join(10)

    found: dict[int, float] = {}

    def compare(step: int, loss: float) -> None:
        found[step] = loss
        assert loss == expected[step], step

    # Before anything is saved, in the middle of a save, and between two saves.
    for moment in ("step 1", "save of 4", "step 7"):
        with processes(size, train_with_checkpoints, str(folder), last, moment == "save of 4") as (ranks, ends):
            if moment == "save of 4":
                partial = folder / ".step-00000004.partial"
                end = time.monotonic() + 60
                while not (partial.is_dir() and any(partial.iterdir())):
                    assert time.monotonic() < end
                    time.sleep(0.005)
                kill(ranks)
                assert partial.is_dir()
                assert newest(folder) == folder / "step-00000002"
                while ends[0].poll(0):
                    try:
                        compare(*ends[0].recv())
                    except EOFError:
                        break
            else:
                for step, loss in reports(ends, last):
                    compare(step, loss)
                    if step == int(moment.split()[1]):
                        kill(ranks)
    with processes(size, train_with_checkpoints, str(folder), last, False) as (ranks, ends):
        resumed = list(reports(ends, last))
        for step, loss in resumed:
            compare(step, loss)
        for process in ranks:
            process.join(30)
        assert [process.exitcode for process in ranks] == [0] * size
    assert resumed[0][0] in (5, 7)
    assert found == expected
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in (2, 4, 6, 8)]
