"""Fixed ownership, as in Megatron-LM: every expert is computed on its home rank, whatever the loads."""

from __future__ import annotations

from torch import Tensor

from lrmoe.balance.plan import Plan, build_plan, home_ranks
from lrmoe.balance.policy import BudgetExceeded, ExactPolicy, planned_quotas, require_capacity, require_loads
from lrmoe.balance.quotas import split_quotas
from lrmoe.config import Quota, require_count


class Fixed(ExactPolicy):
    """No replicas.

    Args:
        slots: taken so that one call can make any policy; no expert is ever copied, so the policy's own ``slots``
            are 0.
        capacity: rows that the backward of a rank may keep (with drop 0: all its rows); None for no limit.
    """

    name = "fixed"

    def __init__(self, *, slots: int = 0, capacity: float | None = None) -> None:
        require_count("slots", slots)
        self.slots = 0
        self.capacity = require_capacity(capacity)

    def plan(self, lam_GE: Tensor, *, drop: float = 0.0, quota: Quota = "expert", layer: int = 0) -> Plan:
        """All rows at home. See :meth:`lrmoe.balance.policy.Policy.plan`."""
        lam_GE = require_loads(lam_GE)
        quota_E = planned_quotas(lam_GE, drop, quota)
        plan = home_plan(lam_GE, quota_E)
        require_fit(self.name, plan, self.capacity, "Allow more rows a rank, drop more, or use the policy 'lrmoe'.")
        return plan


def home_plan(lam_GE: Tensor, quota_E: Tensor) -> Plan:
    """The plan without replicas."""
    num_ranks, num_experts = lam_GE.shape
    hosts, rows_EG = build_plan(lam_GE, home_ranks(num_experts, num_ranks), [])
    return Plan(hosts, rows_EG, split_quotas(quota_E, rows_EG, hosts), lam_GE)


def require_fit(policy: str, plan: Plan, capacity: float | None, mend: str) -> None:
    """Checks the kept rows of every rank against ``capacity``.

    Raises:
        BudgetExceeded: if a rank keeps more.
    """
    if capacity is None:
        return
    kept = plan.quota_EG.sum(0).tolist()
    most = max(kept)
    if most > capacity:
        rank = kept.index(most)
        raise BudgetExceeded(policy, demand=most, capacity=capacity, rank=rank, would_fit=most, mend=mend)
