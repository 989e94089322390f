"""The plans of the running step, so that a recomputed forward runs by the plan of the forward it repeats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.balance.plan import Plan
from lrmoe.balance.policy import Policy
from lrmoe.config import Quota


@dataclass(slots=True)
class _Entry:
    masked_GE: Tensor
    drop: float
    plan: Plan
    observed: bool


class PlanBook:
    """One plan for each layer and microbatch of the running step.

    A forward with the loads of the one before at its place is taken for its recompute, by activation checkpointing:
    it gets the same plan, and the policy is not told of it again. All ranks see the same loads, and so do the same.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._entries: dict[int, dict[tuple[int, int], _Entry]] = {}

    def plan(
        self,
        real_GE: Tensor,
        masked_GE: Tensor,
        *,
        layer_key: int,
        layer: int,
        step: int,
        microbatch: int,
        drop: float,
        quota: Quota,
        training: bool,
    ) -> Plan:
        """The plan for these loads.

        Args:
            layer_key: tells layers apart that have the same number, say those of two models.
            training: a backward follows; only of such forwards the policy is told.

        Raises:
            BudgetExceeded: if the policy has none that fits.
        """
        entries = self._entries.setdefault(layer_key, {})
        for place in [place for place in entries if place[0] != step]:
            del entries[place]
        entry = entries.get((step, microbatch))
        if (
            entry is None
            or entry.drop != drop
            or not torch.equal(entry.plan.lam_GE, real_GE)
            or not torch.equal(entry.masked_GE, masked_GE)
        ):
            plan = self.policy.plan(real_GE, drop=drop, quota=quota, layer=layer)
            entry = entries[(step, microbatch)] = _Entry(masked_GE, drop, plan, observed=False)
        if training and not entry.observed:
            entry.observed = True
            self.policy.observe(real_GE, layer=layer)
        return entry.plan
