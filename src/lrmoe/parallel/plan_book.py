"""The plans of the running step, so that a recomputed forward runs by the plan of the forward it repeats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.balance.ownership import ownership_of
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

    Args:
        own: the policy is the user's own, whose plans are checked.

    A forward with the loads of the one before at its place is taken for its recompute, by activation checkpointing:
    it gets the same plan, and the policy is not told of it again. All ranks see the same loads, and so do the same.
    """

    def __init__(self, policy: Policy, *, own: bool) -> None:
        self.policy = policy
        self.own = own
        self._entries: dict[tuple[int, int], dict[tuple[int, int], _Entry]] = {}

    def clear(self) -> None:
        """Forgets the plans: what comes now repeats no forward, and the policy may have placed experts anew."""
        self._entries.clear()

    def plan(
        self,
        real_GE: Tensor,
        masked_GE: Tensor,
        *,
        layer_key: tuple[int, int],
        layer: int,
        step: int,
        microbatch: int,
        drop: float,
        quota: Quota,
        training: bool,
    ) -> tuple[Plan, bool]:
        """The plan for these loads, and whether this is the first forward trained on by it, not its recompute.

        Args:
            layer_key: (meter, layer): neither tells all layers apart, of several models or without meters.
            training: a backward follows; only of such forwards the policy is told.

        Raises:
            BudgetExceeded: if the policy has none that fits.
            ValueError: if the plan of a policy of the user's own breaks a promise.
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
            if self.own:
                plan.validate(self.policy.slots, ownership=ownership_of(self.policy))
            entry = entries[(step, microbatch)] = _Entry(masked_GE, drop, plan, observed=False)
        first = training and not entry.observed
        if first:
            entry.observed = True
            self.policy.observe(real_GE, layer=layer)
        return entry.plan, first
