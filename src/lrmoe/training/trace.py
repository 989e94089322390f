"""Routing traces: the loads of every layer and microbatch that a run trained on, in files that numpy alone reads.

A trace is a folder with ``trace.json``, which says what the axes are, and parts ``part-STEP.npz``, in the order of
their names and each named after its first step::

    part = numpy.load("runs/first/trace/part-00000000.npz")
    part["lam"]                                      # int32 (N, G, E): pairs of each source rank for each expert
    part["step"], part["microbatch"], part["layer"]  # int32 (N,): which forward each of the N records is of

Steps are optimizer steps done before the forward, from 0; layers are numbered in model order. Records ascend by step,
microbatch and layer. Padding is not counted, and forwards of validations are not recorded. A part appears whole.

Shapes: N records, G ranks, E experts.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lrmoe.training.files import read_json, write_json

FORMAT = "lrmoe routing trace, version 1"
FOLDER = "trace"
"""Inside a run folder."""

_AXES = {
    "lam": ["record", "source rank", "expert"],
    "step": ["record"],
    "microbatch": ["record"],
    "layer": ["record"],
}
_COLUMNS = ("step", "microbatch", "layer")
Ints = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Loads in the order in which a run met them.

    Args:
        lam_NGE: int32, pairs of each source rank for each expert.
        step_N, microbatch_N, layer_N: int32.
        recorded_on: numbers of ranks that the parts were recorded on, ascending.
        about: what ``trace.json`` says beside the axes; empty for a part alone.
    """

    lam_NGE: Ints
    step_N: Ints
    microbatch_N: Ints
    layer_N: Ints
    recorded_on: tuple[int, ...]
    about: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lam_NGE)


class TraceWriter:
    """Collects records and writes them in parts.

    Args:
        folder: of the trace; made with the first part.
        about: for ``trace.json``: ``top_k``, ``dim``, ``expert_dim``, ``layers`` (names), whatever helps a reader.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self._folder = folder
        self._about = about
        self._records: list[tuple[int, int, int, Tensor]] = []

    def add(self, layer: int, step: int, microbatch: int, lam_GE: Tensor) -> None:
        """One forward's loads, integers (G, E) on any device; they are read when the part is written."""
        self._records.append((step, microbatch, layer, lam_GE.detach()))

    def flush(self) -> None:
        """Writes what was added since the last call as one part: call between optimizer steps."""
        if not self._records:
            return
        # Backwards tell of the last layer first.
        records = sorted(self._records, key=lambda record: record[:3])
        self._records = []
        lam_NGE = torch.stack([lam_GE.to("cpu", torch.int64) for *_, lam_GE in records])
        if int(lam_NGE.max()) > np.iinfo(np.int32).max:
            raise ValueError(f"a load of {int(lam_NGE.max())} pairs does not fit the trace's 32 bits")
        keys = np.array([record[:3] for record in records], dtype=np.int32)
        columns = {name: keys[:, place] for place, name in enumerate(_COLUMNS)}
        self._folder.mkdir(parents=True, exist_ok=True)
        _write_part(self._folder, {"lam": lam_NGE.to(torch.int32).numpy(), **columns})
        if not (self._folder / "trace.json").exists():
            write_json(self._folder / "trace.json", {"format": FORMAT, "axes": _AXES, **self._about})

    def continue_from(self, step: int) -> None:
        """Drops the records from ``step`` on, which are about to be made again, and what a kill left half written."""
        self._records = []
        if not self._folder.is_dir():
            return
        for leftover in self._folder.glob(".part-*"):
            leftover.unlink()
        for path in _parts(self._folder):
            part = _read_part(path)
            before_N = part["step"] < step
            if before_N.all():
                continue
            if before_N.any():
                _write_part(self._folder, {name: values[before_N] for name, values in part.items()})
            else:
                path.unlink()


def read_trace(path: Path, *, ranks: int | None = None) -> Trace:
    """Reads a trace.

    Args:
        path: the folder of a trace or of a run that has one, or one part.
        ranks: deal the loads out over so many source ranks, see :func:`deal`; None to take them as recorded.

    Raises:
        ValueError: if there is no trace, a file is malformed, or parts were recorded on different numbers of ranks and
            ``ranks`` is None.
    """
    if path.is_dir() and not _parts(path) and (path / FOLDER).is_dir():
        path = path / FOLDER
    paths = _parts(path) if path.is_dir() else [path]
    if not path.exists():
        raise ValueError(
            f"{path} is missing; give what lrmoe train --trace wrote: a run folder, its {FOLDER}/ or a part"
        )
    if not paths:
        raise ValueError(f"{path} holds no part-*.npz of a trace; give what lrmoe train --trace wrote")
    parts = [_read_part(part) for part in paths]
    about = read_json(path / "trace.json") if path.is_dir() and (path / "trace.json").exists() else {}
    if about and about.get("format") != FORMAT:
        raise ValueError(f"{path / 'trace.json'}: format={about.get('format')!r}; this version reads {FORMAT!r}")
    lams = [part["lam"] if ranks is None else deal(part["lam"], ranks) for part in parts]
    shapes = sorted({lam.shape[1:] for lam in lams})
    if len(shapes) > 1:
        found = " and ".join(f"{experts} experts on {count} ranks" for count, experts in shapes)
        raise ValueError(
            f"{path} holds loads of {found}; say over how many ranks to deal them out (ranks), or give a part"
        )
    lam_NGE = np.concatenate(lams)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in _COLUMNS}
    order = np.stack([columns[name].astype(np.int64) for name in _COLUMNS], axis=1)
    for before, after in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
        if after <= before:
            raise ValueError(f"{path}: (step, microbatch, layer) {tuple(after)} comes after {tuple(before)}")
    return Trace(
        lam_NGE=lam_NGE,
        step_N=columns["step"],
        microbatch_N=columns["microbatch"],
        layer_N=columns["layer"],
        recorded_on=tuple(sorted({part["lam"].shape[1] for part in parts})),
        about={name: value for name, value in about.items() if name not in ("format", "axes")},
    )


def deal(lam_NGE: Ints, ranks: int) -> Ints:
    """int32 (N, ranks, E): loads as so many source ranks might have had them, every expert's sum unchanged.

    Where ``ranks`` is a multiple of the recorded ones each source's pairs are shared out evenly over as many new ones;
    else all sources are added up first. Remainders go round, from another rank for each expert. The new sources differ
    less than real ones would.

    Raises:
        ValueError: if a sum does not fit the format's int32.
    """
    count, experts = lam_NGE.shape[1:]
    if ranks == count:
        return lam_NGE
    if ranks % count:
        lam_NGE = lam_NGE.sum(1, keepdims=True, dtype=np.int64)
        count = 1
    share = ranks // count
    turn_1SE = (np.arange(share)[:, None] + np.arange(experts))[None] % share
    dealt_NGSE = (lam_NGE[:, :, None].astype(np.int64) + turn_1SE) // share
    if dealt_NGSE.size and int(dealt_NGSE.max()) > np.iinfo(np.int32).max:
        raise ValueError(
            f"the pairs of an expert, {int(dealt_NGSE.max())} on one of ranks={ranks}, do not fit the trace's int32; "
            "give more ranks"
        )
    dealt: Ints = dealt_NGSE.reshape(len(lam_NGE), ranks, experts).astype(np.int32)
    return dealt


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.npz"))


def _write_part(folder: Path, part: dict[str, Ints]) -> None:
    """In one move, so that a part is there whole or not at all; the same records give the same bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **part)  # type: ignore[arg-type]
    name = f"part-{int(part['step'][0]):08d}.npz"
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read_part(path: Path) -> dict[str, Ints]:
    try:
        with np.load(path, allow_pickle=False) as file:
            part = {name: file[name] for name in ("lam", *_COLUMNS)}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no part of a trace: {error}") from None
    lam_NGE: np.ndarray[Any, Any] = part["lam"]
    expected: Sequence[tuple[str, int]] = [("lam", 3), *((name, 1) for name in _COLUMNS)]
    for name, dims in expected:
        values = part[name]
        if values.dtype.kind not in "iu" or values.ndim != dims or len(values) != len(lam_NGE):
            raise ValueError(
                f"{path}: {name} is {values.dtype} {values.shape}; it must be int32 of {', '.join(_AXES[name])}"
            )
    if not len(lam_NGE) or not 1 <= lam_NGE.shape[1] <= lam_NGE.shape[2]:
        raise ValueError(
            f"{path}: lam has shape {lam_NGE.shape}; it must hold records of at least as many experts as ranks"
        )
    if min(int(values.min()) for values in part.values()) < 0:
        raise ValueError(f"{path} holds negative numbers; loads, steps, microbatches and layers are counts")
    if max(int(values.max()) for values in part.values()) > np.iinfo(np.int32).max:
        raise ValueError(f"{path} holds numbers that do not fit the format's int32")
    return {name: values.astype(np.int32) for name, values in part.items()}
