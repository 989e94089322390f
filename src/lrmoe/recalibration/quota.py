"""How many pairs the backward of each expert keeps, from the loads alone. All integer, all on the loads' device.

The quotas of N pairs at drop rho add up to round((1 - rho) N) exactly, or to the number of experts that have any pairs,
if that is more: each of them keeps at least one. An expert that kept none would have a gradient of zero whatever its
pairs are, and no weight on other pairs could make up for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.config import Quota


def quotas(kind: Quota, load_E: Tensor, drop: float) -> Tensor:
    """int64 (E,), 0 <= quota <= load. ``load_E`` int64: pairs routed to each expert (padding not counted).

    ``expert``: every expert keeps the share 1 - drop of its load, by largest remainder, and at least one pair.
    ``level``: only the most loaded drop, down to a common cap.
    ``pooled``: as ``expert``; the backward splits their sum anew (:mod:`lrmoe.recalibration.pooling`).
    """
    # In fp64, which an int64 tensor times a float would not be.
    target = torch.floor((1.0 - drop) * load_E.sum().to(torch.float64) + 0.5).to(torch.int64)
    target = torch.maximum(target, (load_E > 0).sum())
    return level(load_E, target) if kind == "level" else _same_share(load_E, drop, target)


def _same_share(load_E: Tensor, drop: float, target: Tensor) -> Tensor:
    share_E = load_E.to(torch.float64) * (1.0 - drop)
    loaded_E = (load_E > 0).to(torch.int64)
    quota_E = torch.maximum(share_E.floor().to(torch.int64), loaded_E)
    missing = target - quota_E.sum()
    # Experts already lifted to one pair have a negative remainder.
    filled_E = round_up(quota_E, share_E - quota_E, load_E, missing)
    # Lifting the smallest can overshoot the target; what is too much is taken from the largest.
    levelled_E = loaded_E + level(quota_E - loaded_E, torch.clamp(target - loaded_E.sum(), min=0))
    return torch.where(missing >= 0, filled_E, levelled_E)


def level(load_E: Tensor, target: Tensor) -> Tensor:
    """Water-filling: min(load, cap) with the integer cap that reaches ``target`` (int64 scalar, <= sum of loads).

    What a fractional cap leaves over goes to the largest loads, lower index first.
    """
    num = load_E.numel()
    rising_E = load_E.sort().values
    below_E = rising_E.cumsum(0) - rising_E
    places_E = torch.arange(num, 0, -1, device=load_E.device)
    # Places whose load lies under the cap: those where capping everybody at their load does not reach the target.
    under = (below_E + places_E * rising_E <= target).sum()
    below = torch.cat([below_E, rising_E.sum(dim=0, keepdim=True)])[under]
    cap = torch.where(under < num, (target - below) // torch.clamp(num - under, min=1), rising_E[-1])
    quota_E = torch.minimum(load_E, cap)
    room_E = load_E > cap
    by_load_E = torch.argsort(torch.where(room_E, load_E, -1), descending=True, stable=True)
    return quota_E + _first(by_load_E, target - quota_E.sum()) * room_E


def round_up(quota_E: Tensor, remainder_E: Tensor, load_E: Tensor, missing: Tensor) -> Tensor:
    """One more for the ``missing`` largest remainders, lower index first, where the load allows it."""
    room_E = quota_E < load_E
    by_remainder_E = torch.argsort(torch.where(room_E, remainder_E, -torch.inf), descending=True, stable=True)
    return quota_E + _first(by_remainder_E, missing) * room_E


def _first(order_E: Tensor, count: Tensor) -> Tensor:
    """1 for the first ``count`` entries of ``order_E``, else 0."""
    chosen_E = (torch.arange(order_E.numel(), device=order_E.device) < count).to(torch.int64)
    return torch.zeros_like(order_E).scatter_(0, order_E, chosen_E)
