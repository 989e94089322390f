"""Where ranks meet: the first message of whatever all ranks of a group have to enter, a layer's call, metrics, a norm.

It says what its rank is about, so that ranks that are not about the same all hear of it, raise, and name it; nothing is
left half done then. It is of one length on all ranks of a group, because a backend that is sent more than it waits for
ends the process: as long as the longest there is, that of a call, which grows with the number of experts.

G ranks, n numbers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.parallel.collectives import Traffic, all_gather_counts, all_to_all_rows, device_of, resolve

# What a rank is about: a call, a call whose arguments it refuses, or something else, whose name follows.
CALL, REFUSED, _OTHER = 1, 2, 3
# int64 numbers before those of the thing itself: the kind, and four that say more about it.
PREFACE = 5
_LEAST = 16
_NAMED = {
    "moves": "ends its step (ExpertParallel.step)",
    "guard": "ends its step (Recalibrator.step)",
    "metrics": "asks for global metrics (global_metrics)",
    "gradient norm": "takes the norm of all gradients (clip_grad_norm_, total_norm)",
    "engines": "makes the first call of an ExpertParallel",
    "straggler clock": "reads a clock (PhaseTimer.collect)",
    "looking at what to save": "saves a checkpoint",
    "looking at the checkpoint": "loads a checkpoint",
}
_lengths: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which call of a layer this is.

    ``trains``: a backward may follow; ``steered``: at a position of its own, and not in evaluation, which has none;
    ``known``: ``layer`` is the layer's number, which evaluation knows of registered layers alone.
    """

    trains: bool
    steered: bool
    known: bool
    layer: int
    step: int
    microbatch: int

    def preface(self) -> list[int]:
        """:data:`PREFACE` numbers."""
        return [CALL, self.trains + 2 * self.steered + 4 * self.known, self.layer, self.step, self.microbatch]


def lengthen(group: dist.ProcessGroup, numbers: int) -> None:
    """Makes room for messages of so many numbers, :data:`PREFACE` included; on all ranks at the same time."""
    _lengths[group] = max(_length(group), numbers)


def gather_numbers(
    numbers: Tensor, group: dist.ProcessGroup, *, what: str, timeout_s: float | None, traffic: Traffic | None
) -> Tensor:
    """What every rank says first, (G, n) on the CPU, kinds unchecked.

    Args:
        numbers: int64, what this rank says, its preface included.
    """
    message = torch.cat([numbers, numbers.new_zeros(_length(group) - numbers.numel())])
    told = all_gather_counts(message, group, what=what, timeout_s=timeout_s, traffic=traffic)
    # The host has to know before anything else is sent that it can be.
    return told.cpu()


def meet(
    what: str,
    numbers: Tensor,
    group: dist.ProcessGroup,
    *,
    timeout_s: float | None = None,
    traffic: Traffic | None = None,
    refuses: bool = False,
) -> Tensor:
    """Every rank's ``numbers``, (G, n) on the CPU, once all are known to have come for the same.

    Args:
        what: what this rank is about.
        numbers: (n,) int64, at most 11 of them.
        refuses: this rank has an error of its own to raise, and takes the others as they are.

    Raises:
        RuntimeError: on all ranks, saying which of them is where.
        RankFailure: if a rank does not come.
    """
    label = struct.unpack("<4q", what.encode()[:32].ljust(32, b"\0"))
    preface = torch.tensor([_OTHER, *label], dtype=torch.int64, device=numbers.device)
    told = gather_numbers(torch.cat([preface, numbers]), group, what=what, timeout_s=timeout_s, traffic=traffic)
    if not refuses and len({tuple(row) for row in told[:, :PREFACE].tolist()}) > 1:
        raise RuntimeError(astray(told))
    return told[:, PREFACE : PREFACE + numbers.numel()]


def astray(told: Tensor) -> str:
    """An error's text, of ranks that are not about the same: which rank is where."""
    rows = [row[:PREFACE] for row in told.tolist()]
    where: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        where.setdefault(_about(row), []).append(rank)
    parts = [_said_of(ranks, about) for about, ranks in where.items()]
    return (
        f"the ranks of the group are not in the same call: {', while '.join(parts)}. Every rank has to make the same "
        "calls in the same order, whatever its tokens: as many microbatches, and evaluation, metrics, norms, "
        "checkpoints and the ends of steps on all ranks or on none"
    )


def same_call(preface: Sequence[int]) -> tuple[int, ...]:
    """What of a call's preface has to be the same on all ranks: all but whether the layer's number is known."""
    kind, mode, *place = preface
    return (kind, mode & 3, *place)


def _said_of(ranks: Sequence[int], about: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {about}"
    verb, _, rest = about.partition(" ")
    plural = {"is": "are", "was": "were"}.get(verb, verb.removesuffix("s"))
    return f"ranks {', '.join(map(str, ranks))} {plural} {rest}"


def _about(row: Sequence[int]) -> str:
    kind, mode, layer, step, microbatch = row
    if kind == REFUSED:
        return "was given arguments that had to be refused, see the error there"
    if kind != CALL:
        name = struct.pack("<4q", *row[1:]).rstrip(b"\0").decode(errors="replace")
        return _NAMED.get(name, f"is in {name!r}")
    trains, own, known = bool(mode & 1), bool(mode & 2), bool(mode & 4)
    named = f"layer {layer}" if known else "a layer"
    if not own:
        how = "" if not trains else " with gradients, in evaluation mode or without lrmoe.attach"
        return f"evaluates {named}{how}"
    # Before the first microbatch of a step.
    outside = "outside a call of the attached model"
    at = f" (step {step}, {f'microbatch {microbatch}' if microbatch >= 0 else outside})"
    return f"trains on {named}{at}" if trains else f"runs {named} without gradients{at}"


def all_gather_json(
    value: Any, group: dist.ProcessGroup | None = None, *, what: str, timeout_s: float | None = None
) -> list[Any]:
    """Every rank's ``value``, anything that JSON can hold, in order of rank. For what is small and rare.

    Raises:
        RuntimeError: on all ranks, if another rank is in another call.
        RankFailure: if a rank is lost or too late.
    """
    group = resolve(group)
    text = json.dumps(value).encode()
    if group.size() == 1:
        return [json.loads(text)]
    device = device_of(group)
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths: list[int] = meet(what, length, group, timeout_s=timeout_s).flatten().tolist()
    message = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).repeat(group.size())
    send = [len(text)] * group.size()
    received = all_to_all_rows(message, send, lengths, group, what=what, timeout_s=timeout_s).cpu()
    return [json.loads(bytes(part.tolist())) for part in torch.split(received, lengths)]


def barrier(group: dist.ProcessGroup | None = None, *, what: str, timeout_s: float | None = None) -> None:
    """Returns when all ranks have come here.

    Raises:
        RuntimeError: on all ranks, if another rank is in another call.
        RankFailure: if a rank is lost or too late.
    """
    group = resolve(group)
    meet(what, torch.empty(0, dtype=torch.int64, device=device_of(group)), group, timeout_s=timeout_s)


def _length(group: dist.ProcessGroup) -> int:
    return _lengths.get(group, _LEAST)
