"""The straggler clock: the worked example, whose time counts, and what it says of itself."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch.distributed as dist
from distributed.tiny_run import TinyRun
from distributed.world import run_world

from lrmoe.parallel import phase_timer
from lrmoe.parallel.phase_timer import CriticalPath, PhaseTimer


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        return self.now


def example(group: dist.ProcessGroup) -> list[tuple[CriticalPath, dict[str, Any], str]]:
    phase_timer.time = hands = Hands()  # type: ignore[assignment]
    try:
        clock = PhaseTimer(bytes_per_s=1e9)
        results = []
        for _ in range(2):
            for name, seconds in (("A", (3.0, 1.0)), ("B", (1.0, 2.0)), ("A", (0.5, 0.25))):
                with clock.phase(name):
                    hands.now += seconds[group.rank()]
                hands.now += 100.0  # between phases nothing counts
                if name == "A":
                    clock.transfer("rows", *((2_000_000_000, 0), (0, 500_000_000))[group.rank()])
            path = clock.collect(group)
            results.append((path, path.to_dict(), str(path)))
        return results
    finally:
        phase_timer.time = time


def test_the_critical_path_is_the_sum_of_the_slowest() -> None:
    both = run_world(2, example)
    assert both[0] == both[1]
    # A second collection counts from zero.
    assert both[0][0] == both[0][1]
    path, table, text = both[0][0]
    first, second = path.phases
    assert (first.name, first.passes, first.critical_s, first.mean_s) == ("A", 2, 3.5, 2.375)
    assert first.per_rank_s == (3.5, 1.25)
    assert (second.name, second.passes, second.critical_s, second.mean_s) == ("B", 1, 2.0, 1.5)
    (rows,) = path.transfers
    assert (rows.name, rows.passes, rows.critical_s, rows.per_rank_s) == ("rows", 2, 4.0, (4.0, 1.0))
    assert (path.compute_s, path.transfer_s, path.critical_s, path.mean_compute_s) == (5.5, 4.0, 9.5, 3.875)
    assert json.loads(json.dumps(table))["critical_s"] == 9.5
    label = "modelled, not wall time: thread CPU seconds, critical path over ranks; transfers at 1 GB/s"
    assert table["label"] == label
    assert text.splitlines()[0] == label
    assert text.splitlines()[2].split() == ["A", "2", "3.5", "2.375", "1.47"]
    assert text.splitlines()[-1].split() == ["all", "9.5", "6.375", "1.49"]


def test_only_work_of_this_thread_counts() -> None:
    clock = PhaseTimer(bytes_per_s=1)
    with clock.phase("asleep"):
        time.sleep(0.2)
    with clock.phase("at work"):
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
    asleep, at_work = clock.collect().phases
    assert asleep.critical_s < 0.05
    assert 0.1 <= at_work.critical_s < 0.15
    assert clock.collect().critical_s == 0.0


def differ(group: dist.ProcessGroup, extra: bool) -> str:
    clock = PhaseTimer(bytes_per_s=1)
    with clock.phase("both"):
        pass
    if extra and group.rank() == 1:
        with clock.phase("more"):
            pass
    elif not extra:
        clock.transfer("rows" if group.rank() == 0 else "weights", 1)
    with pytest.raises(ValueError, match="did not pass the same phases") as caught:
        clock.collect(group)
    return str(caught.value)


def test_ranks_that_passed_different_phases() -> None:
    for message in run_world(2, differ, True):
        assert "number 2 is phase 'more' on rank 1 of the group and nothing on rank 0" in message
    for message in run_world(2, differ, False):
        assert "number 2 is transfer 'weights' on rank 1 of the group and transfer 'rows' on rank 0" in message


def test_misuse() -> None:
    for value in (0.0, -1.0, float("nan"), "fast"):
        with pytest.raises(ValueError, match="bytes_per_s="):
            PhaseTimer(bytes_per_s=value)  # type: ignore[arg-type]
    clock = PhaseTimer(bytes_per_s=1)
    with clock.phase("outer"), pytest.raises(RuntimeError, match="'inner' begins inside 'outer'"), clock.phase("inner"):
        pass
    with pytest.raises(KeyError), clock.phase("failed"):
        raise KeyError
    # What failed is not counted, and does not block what follows.
    with clock.phase("after"):
        pass
    assert [phase.name for phase in clock.collect().phases] == ["outer", "after"]


def timed_run(group: dist.ProcessGroup) -> tuple[CriticalPath, dict[str, int]]:
    clock = PhaseTimer(bytes_per_s=1e9)
    run = TinyRun(group, clock=clock)
    run.train(1)
    clock.collect(group)
    run.ep.metrics()
    run.train(2)
    return clock.collect(group), run.ep.metrics()["sent_bytes"]


def test_the_engine_under_the_clock() -> None:
    results = run_world(2, timed_run)
    (path, first), (_, second) = results
    assert results[0][0] == results[1][0]
    assert path.critical_s > path.mean_compute_s > 0
    assert all(phase.passes % 4 == 0 and min(phase.per_rank_s) > 0 for phase in path.phases)  # 2 layers, 2 steps
    # What one of two ranks sends, the other receives: the busier direction is priced.
    for transfer in path.transfers:
        sent, received = first[transfer.name], second[transfer.name]
        assert max(sent, received) / 1e9 <= transfer.critical_s * (1 + 1e-9) <= (sent + received) / 1e9 * (1 + 2e-9)
