"""What a step would take on many machines, from ranks that share one: a model of time, not a measurement of it.

Where many ranks share few cores, wall time says nothing: ranks wait for a core, not for each other. So each rank counts
the CPU time of its own thread, phase by phase. Between two collectives all wait for the slowest, so the *critical path*
is the sum over phases of the largest time of a rank; a transfer costs the bytes of the busiest rank at a stated
bandwidth.

Worked example: in phase A ranks 0 and 1 compute 3 s and 1 s, in phase B 1 s and 2 s, and between them rank 0 sends
2 GB at 1 GB/s. Each rank computes 4 s or 3 s, but the critical path is 3 + 2 + 2 = 7 s.

CPU time of one thread: set ``torch.set_num_threads(1)``. Work on a GPU is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from lrmoe.config import require_number
from lrmoe.parallel.meeting import all_gather_json


@dataclass(frozen=True)
class PhaseTime:
    """One phase, or one kind of transfer, over all its passes.

    Attributes:
        name: as it was given.
        passes: how often it was entered.
        critical_s: sum over passes of the largest time of a rank.
        mean_s: sum over passes of the mean time of the ranks.
        per_rank_s: sum over passes, of each rank.
    """

    name: str
    passes: int
    critical_s: float
    mean_s: float
    per_rank_s: tuple[float, ...]


@dataclass(frozen=True)
class CriticalPath:
    """What :meth:`PhaseTimer.collect` found, the same on all ranks.

    Attributes:
        phases: computation, in order of first appearance.
        transfers: the same for bytes, priced.
        bytes_per_s: the bandwidth that they were priced at.
    """

    phases: tuple[PhaseTime, ...]
    transfers: tuple[PhaseTime, ...]
    bytes_per_s: float

    @property
    def label(self) -> str:
        """What the numbers are; shown wherever they are."""
        return (
            "modelled, not wall time: thread CPU seconds, critical path over ranks; "
            f"transfers at {self.bytes_per_s / 1e9:g} GB/s"
        )

    @property
    def compute_s(self) -> float:
        return sum(phase.critical_s for phase in self.phases)

    @property
    def transfer_s(self) -> float:
        return sum(transfer.critical_s for transfer in self.transfers)

    @property
    def critical_s(self) -> float:
        """Computation and transfers, none of them overlapped."""
        return self.compute_s + self.transfer_s

    @property
    def mean_compute_s(self) -> float:
        """What the computation would take if every phase were balanced."""
        return sum(phase.mean_s for phase in self.phases)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values, the label among them."""
        return {
            "label": self.label,
            "critical_s": self.critical_s,
            "compute_s": self.compute_s,
            "mean_compute_s": self.mean_compute_s,
            "transfer_s": self.transfer_s,
            "bytes_per_s": self.bytes_per_s,
            "phases": [asdict(phase) for phase in self.phases],
            "transfers": [asdict(transfer) for transfer in self.transfers],
        }

    def __str__(self) -> str:
        rows = [("", "passes", "critical s", "mean s", "max/mean")]
        for kind, items in (("", self.phases), ("transfer: ", self.transfers)):
            for item in items:
                rows.append(_row(kind + item.name, item.passes, item.critical_s, item.mean_s))
        mean = self.mean_compute_s + sum(transfer.mean_s for transfer in self.transfers)
        rows.append(_row("all", "", self.critical_s, mean))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if not i else cell.rjust(width) for i, (cell, width) in enumerate(pairs)
            ).rstrip()
            for pairs in (list(zip(row, widths, strict=True)) for row in rows)
        ]
        return "\n".join([self.label, *lines])


class PhaseTimer:
    """Times this rank's own work, phase by phase.

        clock = PhaseTimer(bytes_per_s=50e9)
        with clock.phase("experts forward"):
            ...
        clock.transfer("rows to experts", sent, received)
        print(clock.collect(group))

    Every rank has to pass the same phases and transfers in the same order, however little it has to do in them.

    Args:
        bytes_per_s: what a rank can send, and receive at the same time, in a second.

    Raises:
        ValueError: unless ``bytes_per_s`` is a positive number.
    """

    def __init__(self, *, bytes_per_s: float) -> None:
        self.bytes_per_s = require_number("bytes_per_s", bytes_per_s)
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s={bytes_per_s} must be positive: bytes that a rank sends in a second")
        self._events: list[tuple[str, str, float]] = []
        self._running: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the CPU time of the calling thread in this block. A block left by an exception is not counted.

        Raises:
            RuntimeError: inside another phase, whose time would count twice.
        """
        if self._running is not None:
            raise RuntimeError(f"phase {name!r} begins inside {self._running!r}; end that one first")
        self._running = name
        start = time.thread_time()
        try:
            yield
            self._events.append(("phase", name, time.thread_time() - start))
        finally:
            self._running = None

    def transfer(self, name: str, sent: int, received: int = 0) -> None:
        """Counts bytes that this rank exchanges with other ranks; the larger of the two directions costs time."""
        self._events.append(("transfer", name, max(sent, received) / self.bytes_per_s))

    def collect(self, group: dist.ProcessGroup | None = None, *, timeout_s: float | None = None) -> CriticalPath:
        """Gathers what all ranks counted since the last call, and starts anew. Call it on every rank of the group.

        Args:
            group: the default group if None; without torch.distributed there is one rank.
            timeout_s: seconds to wait for other ranks; the group's own timeout if None.

        Raises:
            ValueError: on every rank, if they did not pass the same phases and transfers in the same order.
            RankFailure: if a rank is lost or too late.
        """
        events, self._events = self._events, []
        if group is None and not (dist.is_available() and dist.is_initialized()):
            ranks = [events]
        else:
            ranks = all_gather_json(events, group, what="straggler clock", timeout_s=timeout_s)
        _check_alike(ranks)
        return CriticalPath(_totals(ranks, "phase"), _totals(ranks, "transfer"), self.bytes_per_s)


def _check_alike(ranks: Sequence[Sequence[Any]]) -> None:
    first = ranks[0]
    for rank, events in enumerate(ranks):
        for place in range(max(len(first), len(events))):
            here, there = (_named(side[place]) if place < len(side) else "nothing" for side in (events, first))
            if here != there:
                raise ValueError(
                    f"the ranks did not pass the same phases: number {place + 1} is {here} on rank {rank} of the group "
                    f"and {there} on rank 0; enter every phase on every rank, also with no work in it"
                )


def _named(event: Sequence[Any]) -> str:
    return f"{event[0]} {event[1]!r}"


def _totals(ranks: Sequence[Sequence[Any]], kind: str) -> tuple[PhaseTime, ...]:
    passes: dict[str, list[tuple[float, ...]]] = {}
    for events in zip(*ranks, strict=True):
        if events[0][0] == kind:
            passes.setdefault(events[0][1], []).append(tuple(seconds for _, _, seconds in events))
    return tuple(
        PhaseTime(
            name=name,
            passes=len(times),
            critical_s=sum(max(time_of_ranks) for time_of_ranks in times),
            mean_s=sum(sum(time_of_ranks) / len(time_of_ranks) for time_of_ranks in times),
            per_rank_s=tuple(sum(column) for column in zip(*times, strict=True)),
        )
        for name, times in passes.items()
    )


def _row(name: str, passes: object, critical_s: float, mean_s: float) -> tuple[str, str, str, str, str]:
    ratio = f"{critical_s / mean_s:.2f}" if mean_s > 0 else "-"
    return name, str(passes), f"{critical_s:.4g}", f"{mean_s:.4g}", ratio
