"""What planning costs as ranks are added: bytes that every rank gathers and keeps, and the planner's own time.

E experts, G ranks, L layers, N pairs of a rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.balance import Policy, home_ranks
from lrmoe.config import require_count


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Bytes of one rank that grow with the number of ranks.

    Attributes:
        gathered: counts of all ranks for all experts, received for each layer and microbatch: 8 G E.
        plans: of all layers until their backward; loads, rows and quotas: 3 * 8 L G E.
        alloc: from which source to which rank, while one layer's rows are laid out: 8 G E G.
        scores: sent in the backward where anything is dropped, 4 bytes a pair and 1 back.
    """

    gathered: int
    plans: int
    alloc: int
    scores: int


def metadata(*, num_experts: int, ranks: int, layers: int, pairs: int) -> Metadata:
    """From the sizes.

    Raises:
        ValueError: unless 1 <= ranks <= num_experts.
    """
    home_ranks(num_experts, ranks)
    layers, pairs = require_count("layers", layers), require_count("pairs", pairs)
    table = 8 * ranks * num_experts
    return Metadata(gathered=table, plans=3 * layers * table, alloc=table * ranks, scores=5 * pairs)


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Thread CPU seconds on this machine, medians: of ``policy.plan`` and of its ``plan.alloc``."""

    ranks: int
    experts: int
    plan_s: float
    alloc_s: float
    replicas: int


def measure_planning(policy: Policy, lam_NGE: Sequence[Tensor], *, drop: float = 0.0) -> Planning:
    """Plans given loads, one after the other, and takes the time.

    Args:
        policy: one that plans from the loads of the microbatch.
        lam_NGE: loads (G, E) of at least one microbatch.
        drop: of the backward.
    """
    if not lam_NGE:
        raise ValueError("lam_NGE is empty; give the loads of at least one microbatch")
    plan_s, alloc_s, replicas = [], [], []
    for lam_GE in lam_NGE:
        start = time.thread_time()
        plan = policy.plan(lam_GE, drop=drop)
        middle = time.thread_time()
        alloc_GEG = plan.alloc
        end = time.thread_time()
        del alloc_GEG
        plan_s.append(middle - start)
        alloc_s.append(end - middle)
        replicas.append(plan.num_replicas)
    ranks, experts = lam_NGE[0].shape
    middle_of = len(plan_s) // 2
    return Planning(
        ranks=ranks,
        experts=experts,
        plan_s=sorted(plan_s)[middle_of],
        alloc_s=sorted(alloc_s)[middle_of],
        replicas=sorted(replicas)[middle_of],
    )


def skewed_loads(*, num_experts: int, ranks: int, pairs: int, power: float, seed: int) -> Tensor:
    """int64 (G, E): ``pairs`` pairs of each rank, over experts whose popularity falls as (1 + place) ** -power, in an
    order that is drawn; synthetic."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    popularity_E = torch.arange(1, num_experts + 1, dtype=torch.float64, device="cpu").pow(-power)
    popularity_E = popularity_E[torch.randperm(num_experts, generator=generator, device="cpu")]
    exact_E = pairs * popularity_E / popularity_E.sum()
    # Every source as the popularity says, give or take a tenth, and rounded so that each has its pairs.
    noise_GE = 1 + 0.2 * (torch.rand(ranks, num_experts, generator=generator, dtype=torch.float64, device="cpu") - 0.5)
    exact_GE = exact_E * noise_GE
    upto_GE = (exact_GE.cumsum(1) * (pairs / exact_GE.sum(1, keepdim=True))).round().to(torch.int64)
    return upto_GE.diff(dim=1, prepend=torch.zeros(ranks, 1, dtype=torch.int64, device="cpu"))
