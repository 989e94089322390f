"""What one rank of a cluster can do: a data sheet's numbers, and what of them is reached."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lrmoe.config import require_count, require_number

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One rank and its links. Rates are per second and rank; links carry that much each way at the same time.

    Args:
        name: shown in tables.
        flops: multiplications and additions of a matrix product at its best, in the dtype that is trained in.
        memory_bytes: what a rank has.
        memory_bandwidth: bytes read and written.
        intra_bytes_per_s: to ranks of the same node.
        inter_bytes_per_s: to ranks of other nodes.
        ranks_per_node: consecutive ranks make a node.
        source: where the numbers are from.
        gemm_efficiency: share of ``flops`` that large products reach.
        link_efficiency: share of the links' rates that large transfers reach.
        tile_rows: products compute rows, and columns, of each expert in whole tiles of so many.
        launch_s: before any product or pass over memory starts.
        group_s: of each group with rows in a grouped product, beside its arithmetic.
        latency_s: before any collective starts.
        glu_bytes_per_s: of the activation between the projections; None for ``memory_bandwidth``.
        index_bytes_per_s: of gathering and adding up rows; None for ``memory_bandwidth``.
        select_s: before any pair is scored and selected; None for ``launch_s``, as
            where its many small operations are put in line while earlier ones run.
        select_pairs_per_s: scored and selected; None for :data:`SELECT_BYTES` a pair at ``memory_bandwidth``.
        sort_s, sort_pairs_per_s: the same of sorting pairs by expert in the forward; None for no time at all.

    Raises:
        ValueError: naming the field and its value.
    """

    name: str
    flops: float
    memory_bytes: float
    memory_bandwidth: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    ranks_per_node: int = 8
    source: str = "given"
    gemm_efficiency: float = 0.6
    link_efficiency: float = 0.8
    tile_rows: int = 128
    launch_s: float = 5e-6
    group_s: float = 0.0
    latency_s: float = 2e-5
    glu_bytes_per_s: float | None = None
    index_bytes_per_s: float | None = None
    select_s: float | None = None
    select_pairs_per_s: float | None = None
    sort_s: float | None = None
    sort_pairs_per_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("name", "source"):
            if not isinstance(getattr(self, field), str):
                raise ValueError(f"{field}={getattr(self, field)!r} must be text")
        for field in ("ranks_per_node", "tile_rows"):
            object.__setattr__(self, field, require_count(field, getattr(self, field), least=1))
        for field in _POSITIVE:
            value = getattr(self, field)
            if value is None and field in _OPTIONAL:
                continue
            number = require_number(field, value)
            if not 0 < number < math.inf:
                raise ValueError(f"{field}={value!r} must be a finite number above 0")
        for field in ("gemm_efficiency", "link_efficiency"):
            if getattr(self, field) > 1:
                raise ValueError(f"{field}={getattr(self, field)!r} must be at most 1: a share of the peak")
        for field in ("launch_s", "group_s", "latency_s", "select_s", "sort_s"):
            value = getattr(self, field)
            if value is None and field in ("select_s", "sort_s"):
                continue
            if not 0 <= require_number(field, value) < math.inf:
                raise ValueError(f"{field}={value!r} must be a finite number >= 0, in seconds")

    @property
    def glu_rate(self) -> float:
        """``glu_bytes_per_s`` or its default."""
        return self.glu_bytes_per_s or self.memory_bandwidth

    @property
    def index_rate(self) -> float:
        """``index_bytes_per_s`` or its default."""
        return self.index_bytes_per_s or self.memory_bandwidth

    @property
    def select_start(self) -> float:
        """``select_s`` or its default."""
        return self.launch_s if self.select_s is None else self.select_s

    @property
    def select_rate(self) -> float:
        """``select_pairs_per_s`` or its default."""
        return self.select_pairs_per_s or self.memory_bandwidth / SELECT_BYTES


SELECT_BYTES = 400
"""Read and written for one pair as it is scored and selected: about fifty passes over one number."""

_OPTIONAL = ("glu_bytes_per_s", "index_bytes_per_s", "select_pairs_per_s", "sort_pairs_per_s")
_POSITIVE = (
    "flops",
    "memory_bytes",
    "memory_bandwidth",
    "intra_bytes_per_s",
    "inter_bytes_per_s",
    "gemm_efficiency",
    "link_efficiency",
    *_OPTIONAL,
)

PRESETS: dict[str, Hardware] = {
    "h100": Hardware(
        name="H100",
        flops=989e12,
        memory_bytes=80 * _GIB,
        memory_bandwidth=3.35e12,
        intra_bytes_per_s=450e9,
        inter_bytes_per_s=50e9,
        source="NVIDIA H100 data sheet, SXM: BF16 without sparsity, 80 GB of HBM3 (GiB, as the driver tells), NVLink "
        "900 GB/s in both directions together; DGX H100 data sheet: one ConnectX-7 of 400 Gb/s a GPU",
    ),
    "h200": Hardware(
        name="H200",
        flops=989e12,
        memory_bytes=141 * _GIB,
        memory_bandwidth=4.8e12,
        intra_bytes_per_s=450e9,
        inter_bytes_per_s=50e9,
        source="NVIDIA H200 data sheet, SXM: BF16 without sparsity, 141 GB of HBM3e (GiB, as the driver tells), NVLink "
        "900 GB/s in both directions together; DGX H200 data sheet: one ConnectX-7 of 400 Gb/s a GPU",
    ),
    "a100": Hardware(
        name="A100",
        flops=312e12,
        memory_bytes=80 * _GIB,
        memory_bandwidth=2.039e12,
        intra_bytes_per_s=300e9,
        inter_bytes_per_s=25e9,
        source="NVIDIA A100 data sheet, 80 GB SXM: BF16 without sparsity, 80 GB of HBM2e (GiB, as the driver tells), "
        "NVLink 600 GB/s in both directions together; DGX A100 data sheet: one ConnectX-6 of 200 Gb/s a GPU",
    ),
}
"""By name. Efficiencies, tile and latencies are the defaults of :class:`Hardware`: assumptions, on no data sheet."""


def hardware(which: str | Path) -> Hardware:
    """A preset by name, or one's own from a small TOML or JSON file with the fields of :class:`Hardware`::

        name = "my node"
        flops = 4e14
        memory_bytes = 8.5e10
        memory_bandwidth = 2e12
        intra_bytes_per_s = 2e11
        inter_bytes_per_s = 2.5e10

    Raises:
        ValueError: if it is neither, or naming the field that is missing, unknown or out of range. TOML needs Python
            3.11; on 3.10 write JSON.
    """
    if isinstance(which, str) and which.lower() in PRESETS:
        return PRESETS[which.lower()]
    path = Path(which)
    if not path.is_file():
        raise ValueError(f"hardware={str(which)!r} is no preset ({', '.join(PRESETS)}) and no .toml or .json file")
    return _checked(_read(path), path)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            found = json.loads(text)
        elif sys.version_info >= (3, 11):
            import tomllib

            found = tomllib.loads(text)
        else:
            raise ValueError("TOML needs Python 3.11; write the same fields as a .json file")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds {type(found).__name__}; it must hold the fields of a hardware")
    return found


def _checked(found: Mapping[str, Any], path: Path) -> Hardware:
    known = {field.name for field in fields(Hardware)}
    needed = ("flops", "memory_bytes", "memory_bandwidth", "intra_bytes_per_s", "inter_bytes_per_s")
    if unknown := sorted(set(found) - known):
        raise ValueError(f"{path}: {', '.join(unknown)} is no field of a hardware; they are {', '.join(sorted(known))}")
    if missing := [field for field in needed if field not in found]:
        raise ValueError(f"{path}: {', '.join(missing)} is missing")
    try:
        return Hardware(**{"name": path.stem, "source": path.name, **found})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
