"""How many rows the backward of each expert, and of each of its instances, keeps under a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lrmoe.config import Quota
from lrmoe.recalibration.quota import level, quotas


def rank_quotas(kind: Quota, load_E: Tensor, homes: Sequence[int], drop: float) -> Tensor:
    """int64 (E,), 0 <= quota <= load, of all of an expert's instances together.

    ``expert`` is :func:`lrmoe.recalibration.quota.quotas`, whatever the ranks; so is ``pooled``, whose sum over a
    rank's instances the rank's backward splits anew. ``level`` caps the loads of the *ranks* at one height, so that
    only those above it drop, and every expert of a rank keeps the same share of its load (by largest remainder, lower
    expert first; at least one row if it has any, for which a rank may have to keep more than the height). With one rank
    ``level`` caps the experts' loads, as on one device.

    The sum is round((1 - drop) N), N the sum of the loads, or the number of loaded experts if that is more.
    """
    num_ranks = max(homes) + 1
    if drop == 0.0:
        return load_E.clone()
    if kind != "level" or num_ranks == 1:
        return quotas(kind, load_E, drop)
    loads_G: list[list[int]] = [[] for _ in range(num_ranks)]
    for load, home in zip(load_E.tolist(), homes, strict=True):
        loads_G[home].append(load)
    target = int(torch.floor((1.0 - drop) * load_E.sum().to(torch.float64) + 0.5))
    floor_G = [sum(load > 0 for load in loads) for loads in loads_G]
    kept = _level_above([sum(loads) for loads in loads_G], floor_G, target)
    # Experts lie rank after rank, so the ranks' lists in order are the experts in order.
    return torch.tensor(
        [q for loads, k in zip(loads_G, kept, strict=True) for q in _same_share(loads, k)], device="cpu"
    )


def _level_above(load_G: list[int], floor_G: list[int], target: int) -> list[int]:
    """:func:`level` to ``target``, but no rank keeps less than its floor, even if that makes the sum larger."""
    kept_G = list(floor_G)
    open_ranks = list(range(len(load_G)))
    # A rank that the cap leaves under its floor keeps the floor, which lowers the cap of the others.
    while open_ranks:
        left = max(target - sum(floor_G) + sum(floor_G[rank] for rank in open_ranks), 0)
        loads = torch.tensor([load_G[rank] for rank in open_ranks], device="cpu")
        capped = level(loads, torch.tensor(left, device="cpu")).tolist()
        above = [rank for rank, rows in zip(open_ranks, capped, strict=True) if rows >= floor_G[rank]]
        if len(above) == len(open_ranks):
            for rank, rows in zip(open_ranks, capped, strict=True):
                kept_G[rank] = rows
            break
        open_ranks = above
    return kept_G


def _same_share(loads: list[int], kept: int) -> list[int]:
    """``kept`` rows split in proportion to ``loads``; none that has any gets nothing where there are as many."""
    shares = proportional(loads, kept)
    spare = [e for e, share in enumerate(shares) if share > 1]
    for expert in [e for e, share in enumerate(shares) if share == 0 and loads[e] > 0]:
        if not spare:
            break
        largest = max(spare, key=lambda e: (shares[e], -e))
        shares[largest] -= 1
        shares[expert] = 1
        if shares[largest] == 1:
            spare.remove(largest)
    return shares


def proportional(weights: Sequence[int], total: int) -> list[int]:
    """``total`` <= sum of the weights, split in proportion to them: largest remainder, lower index first.

    No part exceeds its weight: a part is rounded up only from a fraction of it.
    """
    whole = sum(weights)
    if whole == 0:
        return [0] * len(weights)
    parts = [weight * total // whole for weight in weights]
    missing = total - sum(parts)
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(weights[i] * total % whole), i))
    for i in by_remainder[:missing]:
        parts[i] += 1
    return parts


def split_quotas(quota_E: Tensor, rows_EG: Tensor, hosts: Sequence[Sequence[int]]) -> Tensor:
    """int64 (E, G): the quota of each expert split over its instances in proportion to their rows.

    Largest remainder, lower rank first; never above the instance's rows, and at least one of an instance that has any:
    nobody else could keep them. Only where an expert has more such instances than quota can the sum grow.
    """
    home_E1 = torch.tensor([ranks[0] for ranks in hosts], dtype=torch.int64, device="cpu").unsqueeze(1)
    quota_EG = torch.zeros_like(rows_EG).scatter_(1, home_E1, quota_E.unsqueeze(1))
    for expert, ranks in enumerate(hosts):
        if len(ranks) > 1:
            rows = rows_EG[expert].tolist()
            quota = max(int(quota_E[expert]), sum(count > 0 for count in rows))
            quota_EG[expert] = torch.tensor(_same_share(rows, quota), device="cpu")
    return quota_EG
