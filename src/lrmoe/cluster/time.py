"""Seconds of one MoE layer on paper: a roofline for each phase, and for the step the slowest rank of each.

A *phase* is what ranks do between two moments at which they wait for each other; its time is that of the slowest rank,
and a layer takes the sum over its phases. Phases have the names that the engine's straggler clock
(:mod:`lrmoe.parallel.phase_timer`) gives them. Nothing is taken to overlap.

S instances of experts on a rank, E experts, G ranks, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lrmoe.balance import Plan
from lrmoe.cluster.buffers import Elementwise
from lrmoe.cluster.hardware import Hardware
from lrmoe.cluster.memory import BF16, Precision
from lrmoe.cluster.model import ModelShape
from lrmoe.config import Save

Pass = Literal["forward", "backward"]
Kind = Literal["compute", "network"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """``seconds_G`` of each rank, fp64."""

    name: str
    of: Pass
    kind: Kind
    seconds_G: Tensor

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return float(self.seconds_G.max())

    @property
    def mean(self) -> float:
        """What it would take if all ranks had the same to do."""
        return float(self.seconds_G.mean())


@dataclass(frozen=True)
class LayerTime:
    """All phases of one layer and microbatch, in order."""

    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        """Sum over phases of the slowest rank."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def balanced(self) -> float:
        """Sum over phases of the mean rank."""
        return sum(phase.mean for phase in self.phases)

    def of(self, which: Pass | Kind) -> float:
        """Seconds of one pass, or of computing or the network alone."""
        return sum(phase.seconds for phase in self.phases if which in (phase.of, phase.kind))

    def __getitem__(self, name: str) -> float:
        """Seconds of the phases of this name; KeyError if there is none."""
        found = [phase.seconds for phase in self.phases if phase.name == name]
        if not found:
            raise KeyError(f"no phase {name!r}; there are {', '.join(dict.fromkeys(p.name for p in self.phases))}")
        return sum(found)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        phases = [{"name": p.name, "of": p.of, "kind": p.kind, "seconds_G": p.seconds_G.tolist()} for p in self.phases]
        return {"seconds": self.seconds, "balanced": self.balanced, "phases": phases}


def grouped_gemm_seconds(
    rows_S: Sequence[int] | Tensor, inner: int, outer: int, hardware: Hardware, *, element_bytes: float = 2
) -> float:
    """(rows, inner) times an (inner, outer) of each group: the slower of arithmetic, on whole tiles, and memory."""
    rows_S = torch.as_tensor(rows_S, dtype=torch.int64, device="cpu")
    used = int((rows_S > 0).sum())
    if not used:
        return hardware.launch_s
    tile = hardware.tile_rows
    tiled = int(((rows_S + tile - 1) // tile).sum()) * tile
    rows = int(rows_S.sum())
    flops = 2 * tiled * inner * _tiled(outer, tile)
    moved = element_bytes * (rows * (inner + outer) + used * inner * outer)
    return _roofline(flops, moved, used, hardware)


def grouped_wgrad_seconds(
    rows_S: Sequence[int] | Tensor, left: int, right: int, hardware: Hardware, *, element_bytes: float = 2
) -> float:
    """For each group (left, rows) times (rows, right); groups without rows are written as zeros."""
    rows_S = torch.as_tensor(rows_S, dtype=torch.int64, device="cpu")
    tile = hardware.tile_rows
    rows = int(rows_S.sum())
    # The rows are the inner dimension here, which is walked through in smaller steps than a tile.
    inner = int(((rows_S + _INNER - 1) // _INNER).sum()) * _INNER if tile > 1 else rows
    flops = 2 * inner * _tiled(left, tile) * _tiled(right, tile)
    moved = element_bytes * (rows * (left + right) + rows_S.numel() * left * right)
    return _roofline(flops, moved, int((rows_S > 0).sum()), hardware)


_INNER = 32


def exchange_seconds(bytes_GG: Tensor, hardware: Hardware) -> Tensor:
    """fp64 (G,): an all-to-all of which rank s sends ``bytes_GG[s, d]`` to rank d.

    A rank sends and receives at once, inside its node and out of it at once; the slowest of the four counts. What it
    sends to itself is free.
    """
    num_ranks = bytes_GG.shape[0]
    node_G = torch.arange(num_ranks, device="cpu") // hardware.ranks_per_node
    same_GG = node_G.unsqueeze(0) == node_G.unsqueeze(1)
    bytes_GG = bytes_GG.to(torch.float64) * (1 - torch.eye(num_ranks, dtype=torch.float64, device="cpu"))
    if not bool(bytes_GG.any()):
        return torch.zeros(num_ranks, dtype=torch.float64, device="cpu")
    seconds_G = torch.zeros(num_ranks, dtype=torch.float64, device="cpu")
    for mask_GG, rate in ((same_GG, hardware.intra_bytes_per_s), (~same_GG, hardware.inter_bytes_per_s)):
        part_GG = bytes_GG * mask_GG
        busiest_G = torch.maximum(part_GG.sum(1), part_GG.sum(0)) / (rate * hardware.link_efficiency)
        seconds_G = torch.maximum(seconds_G, busiest_G)
    return seconds_G + hardware.latency_s


def weight_bytes(plan: Plan, size: float) -> Tensor:
    """fp64 (G, G): ``size`` bytes from the home of each expert to each of its replicas."""
    num_ranks = plan.lam_GE.shape[0]
    bytes_GG = torch.zeros(num_ranks, num_ranks, dtype=torch.float64, device="cpu")
    for ranks in plan.hosts:
        for rank in ranks[1:]:
            bytes_GG[ranks[0], rank] += size
    return bytes_GG


def layer_time(
    plan: Plan,
    model: ModelShape,
    hardware: Hardware,
    *,
    precision: Precision = BF16,
    save: Save = "preactivation",
    elementwise: Elementwise = "plain",
    resend: bool = True,
    plan_s: float = 0.0,
) -> LayerTime:
    """One MoE layer's routed experts, forward and backward, under a plan; of one rank, on one device.

    Args:
        plan: rows and kept rows of every rank and expert; its loads give the tokens.
        model: D, F and K.
        save: with "input" the up projection of kept rows runs again.
        elementwise: of the activation, see :data:`~lrmoe.cluster.buffers.Elementwise`.
        resend: replicas come again for the backward, as where all layers share their slots.
        plan_s: that every rank takes to plan.
    """
    D, F, a = model.dim, model.expert_dim, precision.activation
    num_ranks, num_experts = plan.lam_GE.shape
    alloc_GEG = plan.alloc
    rows_GG = alloc_GEG.sum(1).to(torch.float64)
    share_EG = plan.quota_EG.to(torch.float64) / plan.rows_EG.clamp(min=1)
    kept_GG = torch.einsum("sed,ed->sd", alloc_GEG.to(torch.float64), share_EG)
    del alloc_GEG
    dropping = not torch.equal(plan.quota_EG, plan.rows_EG)
    pairs_G, kept_pairs_G, rows_G = rows_GG.sum(1), kept_GG.sum(1), plan.rows_EG.sum(0).to(torch.float64)
    tokens_G = pairs_G / model.top_k
    replicas_GG = weight_bytes(plan, model.expert_params * precision.weight)
    gradients_GG = weight_bytes(plan, model.expert_params * precision.gradient).t()
    experts = _Experts(D, F, a, hardware, save, elementwise)
    launch = hardware.launch_s

    def indexed(rows_G: Tensor) -> Tensor:
        """Rows of D numbers, read and written once."""
        return rows_G * (2 * D * a) / hardware.index_rate + launch

    def sent(bytes_GG: Tensor) -> Tensor:
        return exchange_seconds(bytes_GG, hardware)

    def per_rank(counts_EG: Tensor, seconds: Callable[[Tensor], float]) -> Tensor:
        return torch.tensor(
            [seconds(counts_S) for counts_S in _instances(plan, counts_EG)], dtype=torch.float64, device="cpu"
        )

    # The experts' order of the rows is another one than they arrive in.
    reordered_G = indexed(rows_G) if num_ranks > 1 else torch.zeros(1, dtype=torch.float64, device="cpu")
    counts_GG = torch.full((num_ranks, num_ranks), 8.0 * num_experts, dtype=torch.float64, device="cpu")
    planned_G = torch.full((num_ranks,), plan_s, dtype=torch.float64, device="cpu")
    phases: list[tuple[str, Pass, Kind, Tensor]] = [
        ("sort", "forward", "compute", _sorted_seconds(pairs_G, hardware)),
        ("loads of all ranks", "forward", "network", sent(counts_GG)),
        ("plan", "forward", "compute", planned_G),
        ("weights to replicas", "forward", "network", sent(replicas_GG)),
        ("dispatch", "forward", "compute", indexed(pairs_G)),
        ("tokens to experts", "forward", "network", sent(rows_GG * D * a)),
        ("forward experts", "forward", "compute", per_rank(plan.rows_EG, experts.forward) + reordered_G),
        ("outputs to tokens", "forward", "network", sent(rows_GG.t() * D * a)),
        ("combine", "forward", "compute", indexed(pairs_G)),
    ]
    if resend:
        phases.append(("weights to replicas", "backward", "network", sent(replicas_GG)))
    if dropping or num_ranks == 1:
        # One device scores its pairs also where it keeps them all.
        phases += [
            ("select", "backward", "compute", rows_G / hardware.select_rate + hardware.select_start),
            ("scores to experts", "backward", "network", sent(rows_GG * 4)),
            ("kept flags to tokens", "backward", "network", sent(rows_GG.t())),
        ]
    phases += [
        ("dispatch gradients", "backward", "compute", indexed(kept_pairs_G)),
        ("gradients to experts", "backward", "network", sent(kept_GG * D * a)),
        ("routing weights to experts", "backward", "network", sent(kept_GG * 4)),
        ("backward experts", "backward", "compute", per_rank(plan.quota_EG, experts.backward)),
        ("gradients to tokens", "backward", "network", sent(kept_GG.t() * D * a)),
        ("combine gradients", "backward", "compute", indexed(kept_pairs_G)),
        ("routing weight gradients to tokens", "backward", "network", sent(kept_GG.t() * 4)),
    ]
    if dropping:
        # The sum rule: a token's gradient times its output.
        phases.append(("router gradient", "backward", "compute", indexed(tokens_G)))
    phases.append(("gradients of replicas home", "backward", "network", sent(gradients_GG)))
    return LayerTime(tuple(Phase(name=n, of=of, kind=kind, seconds_G=s) for n, of, kind, s in phases))


@dataclass(frozen=True)
class _Experts:
    """Seconds of a rank's experts for the rows of each of its instances."""

    dim: int
    width: int
    element_bytes: float
    hardware: Hardware
    save: Save
    elementwise: Elementwise

    def forward(self, rows_S: Tensor) -> float:
        """Up projection, activation and down projection: 6 D F operations a row."""
        D, F = self.dim, self.width
        return self._gemm(rows_S, D, 2 * F) + self._activation(rows_S, "forward") + self._gemm(rows_S, F, D)

    def backward(self, rows_S: Tensor) -> float:
        """Both projections' gradients for rows and for weights: 12 D F operations a kept row, 16 with save="input"."""
        D, F = self.dim, self.width
        down = self._gemm(rows_S, D, F) + self._wgrad(rows_S, D, F)
        up = self._wgrad(rows_S, 2 * F, D) + self._gemm(rows_S, 2 * F, D) + self._gather(rows_S)
        again = self._gather(rows_S) + self._gemm(rows_S, D, 2 * F) if self.save == "input" else 0.0
        return down + self._activation(rows_S, "backward") + up + again

    def _gemm(self, rows_S: Tensor, inner: int, outer: int) -> float:
        return grouped_gemm_seconds(rows_S, inner, outer, self.hardware, element_bytes=self.element_bytes)

    def _wgrad(self, rows_S: Tensor, left: int, right: int) -> float:
        return grouped_wgrad_seconds(rows_S, left, right, self.hardware, element_bytes=self.element_bytes)

    def _gather(self, rows_S: Tensor) -> float:
        moved = int(rows_S.sum()) * 2 * self.dim * self.element_bytes
        return moved / self.hardware.index_rate + self.hardware.launch_s

    def _activation(self, rows_S: Tensor, which: Pass) -> float:
        each = activation_bytes(which, self.element_bytes, self.elementwise)
        return int(rows_S.sum()) * self.width * each / self.hardware.glu_rate + self.hardware.launch_s


def activation_bytes(which: Pass, element_bytes: float, elementwise: Elementwise) -> float:
    """Read and written by the activation for each of a row's F numbers.

    Fused, it reads gate and up and writes phi; in the backward it reads those and t, and writes the gradients of both
    and phi, scaled. The plain operations pass over 10 and 41 numbers in fp32 or better, and over 4 and 7 more in half
    precision; in blocks they do the same, in the cache.
    """
    if elementwise == "fused":
        return element_bytes * (3 if which == "forward" else 6)
    wide = max(4.0, element_bytes)
    half = element_bytes < 4
    if which == "forward":
        return 10 * wide + (4 * (element_bytes + wide) / 2 if half else 0)
    return 41 * wide + (7 * (element_bytes + wide) / 2 if half else 0)


def calibrate(
    hardware: Hardware,
    *,
    gemms: Sequence[tuple[Sequence[int], int, int, float]],
    glu_bytes_per_s: float | None = None,
    index_bytes_per_s: float | None = None,
    select: Sequence[tuple[int, float]] = (),
    sort: Sequence[tuple[int, float]] = (),
) -> Hardware:
    """The same hardware with its constants from measurements.

    Args:
        hardware: its tiles stay.
        gemms: at least two measured grouped products, (rows of each group, inner, outer, seconds), of different sizes:
            their line gives the rate and what a group costs beside it; nothing else then starts late.
        glu_bytes_per_s, index_bytes_per_s: measured; None leaves them as they are.
        select, sort: (pairs, seconds) of at least two selections, and sortings, of different sizes, or none.

    Raises:
        ValueError: if the products or selections are too few, or take no longer the larger they are.
    """
    points = [(_gemm_flops(rows_S, inner, outer, hardware.tile_rows), s) for rows_S, inner, outer, s in gemms]
    slope, start = _line("gemms", points)
    groups = sum(sum(rows > 0 for rows in rows_S) for rows_S, *_ in gemms)
    changed: dict[str, Any] = {
        "flops": 1 / slope,
        "gemm_efficiency": 1.0,
        "launch_s": 0.0,
        "group_s": start * len(points) / groups,
    }
    for name, value in (
        ("glu_bytes_per_s", glu_bytes_per_s),
        ("index_bytes_per_s", index_bytes_per_s),
    ):
        if value is not None:
            changed[name] = value
    for name, measured in (("select", select), ("sort", sort)):
        if measured:
            each, changed[f"{name}_s"] = _line(name, measured)
            changed[f"{name}_pairs_per_s"] = 1 / each
    return replace(hardware, **changed, source=f"{hardware.source}; calibrated on {len(points)} grouped products")


def _sorted_seconds(pairs_G: Tensor, hardware: Hardware) -> Tensor:
    rate = hardware.sort_pairs_per_s
    return (hardware.sort_s or 0.0) + (torch.zeros_like(pairs_G) if rate is None else pairs_G / rate)


def _line(name: str, points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, start >= 0) of the least-squares line."""
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"{name} holds {len(points)} measurements; at least two of different sizes make a line")
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    if slope <= 0:
        raise ValueError(f"{name}: larger ones took no longer than smaller ones; measure larger ones")
    return slope, max(0.0, mean_y - slope * mean_x)


def _instances(plan: Plan, counts_EG: Tensor) -> list[Tensor]:
    """For each rank the rows of its instances."""
    hosted: list[list[int]] = [[] for _ in range(counts_EG.shape[1])]
    for expert, ranks in enumerate(plan.hosts):
        for rank in ranks:
            hosted[rank].append(expert)
    return [
        counts_EG[torch.tensor(experts, dtype=torch.int64, device="cpu"), rank] for rank, experts in enumerate(hosted)
    ]


def _gemm_flops(rows_S: Sequence[int] | Tensor, inner: int, outer: int, tile: int) -> int:
    rows_S = torch.as_tensor(rows_S, dtype=torch.int64, device="cpu")
    return 2 * int(((rows_S + tile - 1) // tile).sum()) * tile * inner * _tiled(outer, tile)


def _roofline(flops: float, moved: float, groups: int, hardware: Hardware) -> float:
    arithmetic = flops / (hardware.flops * hardware.gemm_efficiency)
    return max(arithmetic, moved / hardware.memory_bandwidth) + groups * hardware.group_s + hardware.launch_s


def _tiled(size: int, tile: int) -> int:
    return -(-size // tile) * tile
