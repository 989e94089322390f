"""Loads in the order in which a run meets them: of a recorded trace, or synthetic ones, which say so."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrmoe.balance.plan import home_ranks
from lrmoe.balance.shapes import WORKLOADS
from lrmoe.balance.workloads import skew_of, workload, zipf
from lrmoe.config import require_count
from lrmoe.studies.loads import mean


@dataclass(frozen=True, kw_only=True)
class Routing:
    """N records of a run, in order.

    Args:
        source: what the loads are, in words.
        synthetic: no router made them.
        lam: int64 (G, E) of each record.
        step, microbatch, layer: of each record.
        layers: their names.
        about: what a trace says of its model: ``dim``, ``expert_dim``, ``top_k``.
    """

    source: str
    synthetic: bool
    lam: list[Tensor]
    step: list[int]
    microbatch: list[int]
    layer: list[int]
    layers: list[str]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Records, ranks, experts."""
        return (len(self.lam), *self.lam[0].shape)

    def produced(self) -> dict[str, Any]:
        """What the loads came out as, whatever they were meant to be.

        ``skew_mean``, ``skew_p95``, ``skew_max``: largest over mean rows of a rank with every expert at home, of the
        records with any pair, None where none has;
        ``pairs_min``, ``pairs_max`` of a record; and the fewest of a record: ``experts_used``, ``ranks_used`` (with
        rows for their experts) and ``sources_used`` (with pairs of their own).
        """
        _, num_ranks, num_experts = self.shape
        home_E = torch.tensor(home_ranks(num_experts, num_ranks), device="cpu")
        skews = [skew for lam_GE in self.lam if (skew := skew_of(lam_GE)) is not None]
        loads = [lam_GE.sum(0) for lam_GE in self.lam]
        pairs = [int(load_E.sum()) for load_E in loads]
        return {
            "skew_mean": mean(skews) if skews else None,
            "skew_p95": p95(skews) if skews else None,
            "skew_max": max(skews, default=None),
            "pairs_min": min(pairs),
            "pairs_max": max(pairs),
            "experts_used": min(int((load_E > 0).sum()) for load_E in loads),
            "ranks_used": min(len(set(home_E[load_E > 0].tolist())) for load_E in loads),
            "sources_used": min(int(lam_GE.any(1).sum()) for lam_GE in self.lam),
        }


def recorded(path: Path, *, ranks: int | None = None, steps: int | None = None) -> Routing:
    """The loads of a trace, see :func:`lrmoe.training.trace.read_trace`.

    Args:
        path: a run folder, its trace, or a part.
        ranks: to deal the loads out over; needed where they were recorded on one rank.
        steps: the first so many optimizer steps; None for all.

    Raises:
        ValueError: if the trace cannot be read, or was recorded on one rank and ``ranks`` is None.
    """
    from lrmoe.training.trace import read_trace

    if ranks is not None:
        require_count("ranks", ranks, least=1)
    trace = read_trace(path, ranks=ranks)
    count, num_experts = trace.lam_NGE.shape[1:]
    home_ranks(num_experts, count)
    if ranks is None and count == 1:
        raise ValueError(
            f"{path} was recorded on one rank, where there is nothing to balance: say over how many ranks to deal its "
            "loads out, e.g. ranks=8"
        )
    source = f"recorded, {path}"
    if trace.recorded_on != (count,):
        on = " and ".join(map(str, trace.recorded_on))
        source += (
            f" (recorded on {on} rank{'s' * (on != '1')}; every expert's pairs are dealt out evenly over {ranks} "
            "sources, which differ less than real ones)"
        )
    chosen = range(len(trace))
    if steps is not None:
        kept = set(sorted(set(trace.step_N.tolist()))[: require_count("steps", steps, least=1)])
        chosen = range(sum(step in kept for step in trace.step_N.tolist()))
    layer = trace.layer_N.tolist()
    names = trace.about.get("layers")
    return Routing(
        source=source,
        synthetic=False,
        lam=[torch.from_numpy(trace.lam_NGE[i]).to(torch.int64) for i in chosen],
        step=trace.step_N.tolist()[: len(chosen)],
        microbatch=trace.microbatch_N.tolist()[: len(chosen)],
        layer=layer[: len(chosen)],
        layers=names if isinstance(names, list) else [f"layer {i}" for i in range(max(layer) + 1)],
        about=trace.about,
    )


def synthetic(
    name: str,
    *,
    steps: int,
    ranks: int,
    experts: int,
    tokens: int,
    top_k: int,
    seed: int = 0,
    skew: float | None = None,
) -> Routing:
    """One layer and microbatch a step of a workload of :mod:`lrmoe.balance.workloads`, every source with its own draws.

    Args:
        name: one of :data:`lrmoe.balance.shapes.WORKLOADS`.
        skew: of ``zipf``: largest over mean rows of a rank; default 2.

    Raises:
        ValueError: if the name is not known, a number is out of range, or ``skew`` is given for another workload.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload={name!r} is not known; choose one of {', '.join(WORKLOADS)}")
    if name == "zipf":
        skew = 2.0 if skew is None else skew
        lam_NGE = zipf(skew, steps, ranks, experts, tokens, top_k, seed)
        what = f"Zipf's law at max/mean {skew:g}"
    elif skew is not None:
        raise ValueError(f"skew={skew!r} is of the workload 'zipf'; leave it out with {name!r}")
    else:
        lam_NGE = workload(name, steps, ranks, experts, tokens, top_k, seed)
        what = name
    return Routing(
        source=f"synthetic, {what}, {tokens:,} tokens a rank, {top_k} experts a token, seed {seed}",
        synthetic=True,
        lam=list(lam_NGE),
        step=list(range(steps)),
        microbatch=[0] * steps,
        layer=[0] * steps,
        layers=["synthetic layer"],
        about={"top_k": top_k},
    )


def p95(values: list[float]) -> float:
    """What 95 % of the values do not exceed: the smallest of them with that property; NaN of none."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else math.nan
