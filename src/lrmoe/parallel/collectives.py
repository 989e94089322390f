"""The collectives that expert parallelism needs, as one primitive: every rank sends every other rank some rows.

G ranks of the group. Rows are sent as bytes, so any dtype travels on any backend. All ranks exchange with all others
directly, whatever their counts: each of them notices a lost rank at once, on its own connection, and not through a
neighbour. No function here is differentiable.

A failure is a :class:`RankFailure`, which names the collective and the ranks that did not arrive, and nothing waits
for ever: a collective waits ``timeout_s`` seconds (the group's own timeout if None), and finding out who is missing
takes a few seconds more. With NCCL the host does not wait for a collective; a lost rank is then found by torch's
watchdog, which ends the process when the group's timeout is over.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# How long, after the last sign of a rank, the survivors of a failure wait for the others to report.
ROLL_CALL_S = 5.0
_OPERATIONS = ("sum", "max", "min")


class RankFailure(RuntimeError):
    """A collective that not all ranks completed.

    Attributes:
        what: the label of the collective.
        ranks: the global ranks that did not arrive; empty if all did, and the collective itself failed.
    """

    def __init__(self, message: str, *, what: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.what = what
        self.ranks = tuple(ranks)


@dataclass
class Traffic:
    """Bytes that this rank sent to other ranks, by the label of the collective; what it kept itself is not counted."""

    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, count: int) -> None:
        self.bytes[what] = self.bytes.get(what, 0) + count


def all_to_all_rows(
    rows: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    what: str,
    timeout_s: float | None = None,
    traffic: Traffic | None = None,
) -> Tensor:
    """Sends the first ``send[0]`` rows to rank 0, the next ``send[1]`` to rank 1 and so on.

    Args:
        rows: (sum(send), ...), any dtype and layout, contiguous or not.
        send: rows for each rank of the group.
        receive: rows from each rank; every rank must know them beforehand (see :func:`all_gather_counts`).
        group: the default group if None.
        what: the label under which a failure and the traffic are reported.
        timeout_s: seconds to wait; the group's own timeout if None.
        traffic: where to count the bytes.

    Returns:
        (sum(receive), ...), in ascending order of rank. In a group of one it may be ``rows`` itself.

    Raises:
        ValueError: if the counts do not fit the group or the rows.
        RankFailure: if a rank is lost or too late.
    """
    group = resolve(group)
    size = group.size()
    for name, counts in (("send", send), ("receive", receive)):
        if len(counts) != size or any(count < 0 for count in counts):
            raise ValueError(f"{what}: {name}={list(counts)} must be {size} non-negative numbers, one a rank")
    if sum(send) != rows.shape[0]:
        raise ValueError(f"{what}: send={list(send)} adds up to {sum(send)}, but there are {rows.shape[0]} rows")
    rank = group.rank()
    if send[rank] != receive[rank]:
        raise ValueError(f"{what}: rank {rank} sends itself {send[rank]} rows and expects {receive[rank]}")
    row_shape = rows.shape[1:]
    row_bytes = math.prod(row_shape) * rows.element_size()
    if traffic is not None:
        traffic.add(what, (sum(send) - send[rank]) * row_bytes)
    with torch.no_grad():
        rows = rows.detach().contiguous()
        if size == 1:
            return rows
        outgoing = _as_bytes(rows, row_bytes)
        incoming = outgoing.new_empty(sum(receive), row_bytes)
        _exchange(incoming, outgoing, list(receive), list(send), group, what, timeout_s)
        return incoming.view(-1).view(rows.dtype).view(sum(receive), *row_shape)


def all_gather_counts(
    counts: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    what: str,
    timeout_s: float | None = None,
    traffic: Traffic | None = None,
) -> Tensor:
    """Every rank's ``counts``, (n,) of one length and dtype on all ranks, as (G, n) in order of rank.

    Raises:
        ValueError: if ``counts`` has not one dimension.
        RankFailure: if a rank is lost or too late.
    """
    group = resolve(group)
    if counts.dim() != 1:
        raise ValueError(f"{what}: counts has shape {tuple(counts.shape)}; it must be (n,)")
    each = [1] * group.size()
    rows_Gn = counts.detach().expand(group.size(), -1)
    return all_to_all_rows(rows_Gn, each, each, group, what=what, timeout_s=timeout_s, traffic=traffic)


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    what: str,
    op: str = "sum",
    timeout_s: float | None = None,
    traffic: Traffic | None = None,
) -> Tensor:
    """Reduces ``tensor`` over the ranks, in place, with a result that is the same on all of them bit for bit.

    Each rank reduces one part for all, in ascending order of rank, so the result depends on no backend's algorithm.

    Args:
        tensor: of one shape and dtype on all ranks; sums are taken in its dtype.
        op: "sum", "max" or "min".

    Returns:
        ``tensor``.

    Raises:
        ValueError: for another ``op``.
        RankFailure: if a rank is lost or too late; ``tensor`` is then unchanged.
    """
    group = resolve(group)
    if op not in _OPERATIONS:
        raise ValueError(f"{what}: op={op!r} must be one of {', '.join(_OPERATIONS)}")
    size, rank = group.size(), group.rank()
    if size == 1:
        return tensor
    with torch.no_grad():
        part = -(-tensor.numel() // size)
        parts = [max(0, min(part, tensor.numel() - part * owner)) for owner in range(size)]
        mine = [parts[rank]] * size
        options: dict[str, Any] = {"timeout_s": timeout_s, "traffic": traffic}
        gathered = all_to_all_rows(tensor.reshape(-1), parts, mine, group, what=what, **options).view(size, -1)
        if op == "sum":
            reduced = gathered[0].clone()
            for other in gathered[1:]:
                reduced += other
        else:
            reduced = gathered.amax(0) if op == "max" else gathered.amin(0)
        whole = all_to_all_rows(reduced.repeat(size), mine, parts, group, what=what, **options)
        return tensor.copy_(whole.view(tensor.shape))


def resolve(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, the default one if None.

    Raises:
        ValueError: if there is none.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    return found


def device_of(group: dist.ProcessGroup) -> torch.device:
    """A device that the group's backend can send from."""
    return torch.device("cpu" if "cpu:" in str(dist.get_backend_config(group)) else "cuda")


def _as_bytes(rows: Tensor, row_bytes: int) -> Tensor:
    # Not view(-1): a tensor of one element is contiguous with any stride.
    flat = rows.as_strided((rows.numel(),), (1,))
    return flat.view(torch.uint8).view(rows.shape[0], row_bytes)


def _exchange(
    incoming: Tensor,
    outgoing: Tensor,
    receive: list[int],
    send: list[int],
    group: dist.ProcessGroup,
    what: str,
    timeout_s: float | None,
) -> None:
    options = dist.AllToAllOptions()
    if timeout_s is not None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s} must be positive, or None for the group's own timeout")
        options.timeout = timedelta(seconds=timeout_s)
    start = time.monotonic()
    try:
        work = group.alltoall_base(incoming, outgoing, receive, send, options)
        if timeout_s is None:
            work.wait()
        else:
            # The backend's own timeout comes first where it has one: it closes the connections, and so ends the waiting
            # of the others.
            work.wait(timedelta(seconds=timeout_s + 1.0))
    except RuntimeError as error:
        elapsed = time.monotonic() - start
        raise _failure(error, group, what, elapsed, timeout_s) from error


def _failure(
    error: RuntimeError, group: dist.ProcessGroup, what: str, elapsed: float, timeout_s: float | None
) -> RankFailure:
    """Calls the roll through the group's store and says who did not answer."""
    call = _RollCall(group, what, ROLL_CALL_S if timeout_s is None else min(ROLL_CALL_S, timeout_s))
    call.start()
    while call.is_alive() and time.monotonic() < call.last_sign + call.patience + 1.5:
        call.join(0.05)
    heard = dict(call.heard)
    global_ranks = dist.get_process_group_ranks(group)
    absent = [rank for rank in range(group.size()) if rank not in heard]
    timed_out = "time" in str(error).lower()
    reason = f"no answer within {elapsed:.1f} s" if timed_out else f"a connection was lost after {elapsed:.1f} s"
    mend = "See the log of what is missing for the cause, then start again from the last complete checkpoint."
    if not call.complete and all(global_ranks[rank] != 0 for rank in heard):
        ranks = [0]
        message = (
            f"{what}: rank 0 did not arrive ({reason}): the store of the process group, which rank 0 usually holds, "
            f"does not answer, so nothing is known of the other ranks. {mend}"
        )
    elif absent:
        ranks = [global_ranks[rank] for rank in absent]
        names = ", ".join(str(rank) for rank in ranks)
        message = f"{what}: rank{'s' * (len(ranks) > 1)} {names} did not arrive ({reason}). {mend}"
    else:
        ranks = []
        message = f"{what}: all ranks are there, but the collective failed ({reason}): {error}"
    elsewhere = {global_ranks[rank]: label for rank, label in sorted(heard.items()) if label != what}
    if elsewhere:
        places = ", ".join(f"rank {rank} in {label!r}" for rank, label in elsewhere.items())
        message += f" Ranks in another collective: {places}."
    return RankFailure(message, what=what, ranks=ranks)


class _RollCall(threading.Thread):
    """Each survivor leaves a note in the group's store and reads those of the others.

    A thread, because a store whose process was stopped never answers.
    """

    def __init__(self, group: dist.ProcessGroup, what: str, patience: float) -> None:
        super().__init__(daemon=True, name="lrmoe roll call")
        self.store = group.get_group_store()
        self.rank, self.size = group.rank(), group.size()
        self.what = what
        self.patience = patience
        self.last_sign = time.monotonic()
        self.heard: Mapping[int, str] = {self.rank: what}
        self.complete = False

    def run(self) -> None:
        # However the others trickle in, this ends.
        end = time.monotonic() + 3 * self.patience
        try:
            self.store.set(_note(self.rank), self.what)
            while len(self.heard) < self.size and time.monotonic() < min(self.last_sign + self.patience, end):
                for rank in range(self.size):
                    if rank not in self.heard and self.store.check([_note(rank)]):
                        # A new dictionary: the other thread may be copying the old one.
                        self.heard = {**self.heard, rank: self.store.get(_note(rank)).decode()}
                        self.last_sign = time.monotonic()
                time.sleep(0.02)
        except RuntimeError:
            return  # The process that holds the store is gone.
        self.complete = True
        self.last_sign = time.monotonic()
        if self.rank == 0:
            # The store may be this process's: the others have to read it to the end.
            time.sleep(1.0)


def _note(rank: int) -> str:
    return f"lrmoe/failed/{rank}"
