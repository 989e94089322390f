"""What the backward passes of a layer did: running totals for metrics, and full records for inspection.

Both are fed by the backward operator, which runs exactly once per forward that is trained on. Activation
checkpointing replays forwards, never backwards, so nothing here is counted twice.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lrmoe.evenness import max_over_mean

# What is read of a layer, by the names under which it is logged: means over layers and steps, and sums.
SHARES = ("kept_share", "kept_importance_share", "variance_share", "load_max_over_mean")
# Means over the backwards in which sequences could be told apart.
BY_SEQUENCE = ("sequence_kept_share_min", "sequence_kept_share_median", "sequence_kept_share_max")
SECONDS = ("forward_seconds", "backward_seconds")
NONFINITE = "nonfinite_backwards"


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardCall:
    """One backward of one layer. T tokens, K choices, E experts.

    ``kept_TK`` bool; ``weight_TK`` fp32, 0 where dropped; ``importance_TK`` fp64, the metric R the selection used
    (0 for masked pairs); ``quota_E``, as the forward set it, and ``load_E`` int64. ``kept_TK.sum()`` exceeds
    ``quota_E.sum()`` only where an expert had more non-finite scores than quota (they are always kept) or an error
    budget raised the quota; with ``quota="pooled"`` single experts keep more or fewer.
    """

    step: int
    layer: int
    microbatch: int
    kept_TK: Tensor
    weight_TK: Tensor
    importance_TK: Tensor
    quota_E: Tensor
    load_E: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardStats:
    """Scalars of one backward, on the device they were computed on (no synchronisation). The last three may be NaN or
    infinite, as the gradients they are of.

    ``load_E``, ``kept_E`` int64 pairs; ``importance_total``, ``importance_kept`` sums of R, fp64;
    ``variance``: V*, the least variance any unbiased design with these quotas has, in units of R, fp64; an expert that
    keeps nothing counts with its sum of R.
    """

    load_E: Tensor
    kept_E: Tensor
    importance_total: Tensor
    importance_kept: Tensor
    variance: Tensor


class Meter:
    """Totals of one layer since the last :meth:`reset`. Device-side until :meth:`totals`.

    A backward whose importance is not finite, as of a step that a loss scaler is about to skip, adds nothing to the
    sums of importance, where one NaN would make every later share NaN; it is counted instead. Its loads and kept pairs
    count like any others: they are whole numbers, true of the forward, and the same on ranks of which only some met the
    NaN.

    Attributes:
        watch: called with the routed pairs per expert, int64 (E,) on the device, of each backward, where somebody sets
            it; of this rank's part of them under expert parallelism.
        watched: whether :meth:`take_sums` is wanted; without it no sums are kept for it.
    """

    _ids: ClassVar[Iterator[int]] = itertools.count(1)
    _all: ClassVar[weakref.WeakValueDictionary[int, Meter]] = weakref.WeakValueDictionary()

    def __init__(self, *, watched: bool = False) -> None:
        self.handle = next(Meter._ids)
        Meter._all[self.handle] = self
        self.watched = watched
        self._untaken_sums_3: Tensor | None = None
        self._untaken_load_E: Tensor | None = None
        self.watch: Callable[[Tensor], None] | None = None
        self.reset()

    @classmethod
    def find(cls, handle: int) -> Meter | None:
        """The living meter with this handle (0 is nobody's)."""
        return cls._all.get(handle)

    def reset(self) -> None:
        self.backwards = 0
        self.forward_seconds = 0.0
        self.backward_seconds = 0.0
        # Pairs routed and kept; the sums of R, of kept R and of V*, and of how many backwards they are.
        self._pairs_2E: Tensor | None = None
        self._sums_3: Tensor | None = None
        self._summed: Tensor | None = None
        # The least, the median and the most that sequences kept, and of how many backwards they are the sums.
        self._sequences_4: Tensor | None = None

    def add(self, stats: BackwardStats, *, routed_E: Tensor | None = None) -> None:
        """Adds one backward; ``routed_E`` its loads where ``stats`` covers only this rank's part of them."""
        self.backwards += 1
        if self.watch is not None:
            self.watch(stats.load_E)
        self._untaken_load_E = _plus(self._untaken_load_E, stats.load_E if routed_E is None else routed_E)
        sums_3 = torch.stack([stats.importance_total, stats.importance_kept, stats.variance])
        finite = sums_3.isfinite().all()
        sums_3 = torch.where(finite, sums_3, 0.0)
        if self.watched:
            self._untaken_sums_3 = _plus(self._untaken_sums_3, sums_3)
        self._sums_3 = _plus(self._sums_3, sums_3)
        self._summed = _plus(self._summed, finite.to(torch.int64))
        self._pairs_2E = _plus(self._pairs_2E, torch.stack([stats.load_E, stats.kept_E]))

    def add_sequences(self, found_4: Tensor) -> None:
        """Adds what one backward kept of sequences: :func:`lrmoe.experts.sequences.kept_by_sequence`."""
        self._sequences_4 = _plus(self._sequences_4, found_4)

    @property
    def load_E(self) -> Tensor | None:
        """Routed pairs per expert in the forwards trained on since the last reset; None before the first."""
        return None if self._pairs_2E is None else self._pairs_2E[0]

    def take_load_E(self) -> Tensor | None:
        """Routed pairs per expert, int64, in the forwards trained on since the last call, of all expert-parallel ranks;
        None if there were none.

        A sum of its own, for the one consumer that balances the router: :meth:`reset` leaves it alone, so reading
        metrics never hides loads from the selection bias. Where a step was skipped and nobody took its loads, the next
        one's are added to them: the bias then moves once, by what all the tokens since its last move chose.
        """
        load_E, self._untaken_load_E = self._untaken_load_E, None
        return load_E

    def take_sums(self) -> Tensor | None:
        """(3,) fp64 on the device: the sums of R, of kept R and of V* since the last call; None if no backward ran, or
        nobody watches. Sums of their own, like those of :meth:`take_load_E`: they are for the guard. Of a step that was
        skipped what was finite stays in them: it was measured on the very weights that the next attempt begins with."""
        sums_3, self._untaken_sums_3 = self._untaken_sums_3, None
        return sums_3

    def totals(self) -> dict[str, Any] | None:
        """Sums as plain numbers and lists, all finite, or None if no backward ran; synchronises with the device. What
        :func:`shares` takes, and what adds up over ranks."""
        if self._sums_3 is None or self._summed is None or self._pairs_2E is None:
            return None
        load, kept = self._pairs_2E.tolist()
        importance_total, importance_kept, variance = self._sums_3.tolist()
        return {
            "load": load,
            "kept": kept,
            "importance_total": importance_total,
            "importance_kept": importance_kept,
            "variance": variance,
            "sequences": NOTHING["sequences"] if self._sequences_4 is None else self._sequences_4.tolist(),
            NONFINITE: self.backwards - int(self._summed),
            "backwards": self.backwards,
            "forward_seconds": self.forward_seconds,
            "backward_seconds": self.backward_seconds,
        }


def _plus(sum_so_far: Tensor | None, more: Tensor) -> Tensor:
    return more if sum_so_far is None else sum_so_far + more


# The totals of no backward.
NOTHING: dict[str, Any] = {
    "load": [],
    "kept": [],
    "importance_total": 0.0,
    "importance_kept": 0.0,
    "variance": 0.0,
    "sequences": [0.0, 0.0, 0.0, 0.0],
    "backwards": 0,
    NONFINITE: 0,
    "forward_seconds": 0.0,
    "backward_seconds": 0.0,
}


def shares(totals: dict[str, Any]) -> dict[str, Any]:
    """A layer's :meth:`Meter.totals` as they are read: ``load`` and ``kept`` (lists, pairs per expert),
    ``kept_share``, ``kept_importance_share``, ``variance_share`` (V*/sum R), ``load_max_over_mean``, ``backwards``,
    ``nonfinite_backwards`` (how many of them the shares of importance leave out, because theirs was NaN or infinite),
    ``forward_seconds``, ``backward_seconds`` (see :class:`Stopwatch`; CPU tensors only).

    ``sequence_kept_share_min``, ``_median`` and ``_max``: of the sequences of a backward the one that kept the least of
    its pairs, the one in the middle and the one that kept most; means over the backwards that knew their sequences,
    None where none did.

    Where all that there was is left out, nobody knows ``kept_importance_share`` and ``variance_share``: None."""
    load, kept = totals["load"], totals["kept"]
    pairs, total, nonfinite = sum(load), totals["importance_total"], totals[NONFINITE]
    unknown = nonfinite > 0 and total == 0.0
    *sums, told = totals["sequences"]
    return {
        "load": load,
        "kept": kept,
        "kept_share": sum(kept) / pairs if pairs else 1.0,
        "kept_importance_share": None if unknown else totals["importance_kept"] / total if total else 1.0,
        "variance_share": None if unknown else totals["variance"] / total if total else 0.0,
        # Loggers want a number where nothing was routed, as where every token is padding.
        "load_max_over_mean": max_over_mean(load) or 1.0,
        **{key: value / told if told else None for key, value in zip(BY_SEQUENCE, sums, strict=True)},
        "backwards": totals["backwards"],
        NONFINITE: nonfinite,
        "forward_seconds": totals["forward_seconds"],
        "backward_seconds": totals["backward_seconds"],
    }


class Stopwatch:
    """Adds the time of a block to a meter; free when there is none. CPU only: a GPU returns before it is done.

    On one thread it is that thread's CPU time, which other processes on the machine do not stretch; on several, where
    the waiting belongs to the work, wall time.
    """

    def __init__(self, meter: Meter | None, field: str, on_cpu: bool) -> None:
        self._meter = meter if on_cpu else None
        self._field = field
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        if self._meter is not None:
            setattr(self._meter, self._field, getattr(self._meter, self._field) + self._now() - self._start)


_recordings: list[list[BackwardCall]] = []


@contextmanager
def recording() -> Iterator[list[BackwardCall]]:
    """Collects a :class:`BackwardCall` for every backward that runs inside the block, in the order they run."""
    calls: list[BackwardCall] = []
    _recordings.append(calls)
    try:
        yield calls
    finally:
        _recordings[:] = [other for other in _recordings if other is not calls]


def is_recording() -> bool:
    return bool(_recordings)


def record(call: BackwardCall) -> None:
    for calls in _recordings:
        calls.append(call)
