"""What each balancing policy makes of given loads: rows, replicas and bytes, counted and not timed.

Whether replicas pay is decided in :mod:`lrmoe.studies.price`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lrmoe.balance import BudgetExceeded, Plan, get, home_ranks
from lrmoe.balance.fixed import home_plan
from lrmoe.balance.policy import planned_quotas
from lrmoe.config import Quota
from lrmoe.evenness import max_over_mean, mean_of_known
from lrmoe.studies.expert import Expert
from lrmoe.studies.price import Contender

Record = dict[str, Any]


def contenders(
    *, drop: float = 0.2, quota: Quota = "expert", slots: int = 1, capacity: float | None = None, floor: int = 1024
) -> list[Contender]:
    """Fixed ownership, UltraEP, UltraEP's plan with the drop applied to it, and LRMoE without and with the drop.

    Args:
        drop, quota: of the backward, see :class:`lrmoe.LRMoEConfig`.
        slots: replicas a rank may hold.
        capacity: rows that the backward of a rank may keep, or None.
        floor: rows that UltraEP's replicas must at least take where its fast path fails.
    """
    costs: Record = {} if capacity is None else {"forward_cost": 0.0, "backward_cost": 1.0}
    ultraep = get("ultraep", slots=slots, floor=floor, capacity=capacity)
    mine = get("lrmoe", slots=slots, capacity=capacity, **costs)
    found = [
        Contender(label="fixed", policy=get("fixed", capacity=capacity)),
        Contender(label="ultraep", policy=ultraep),
        Contender(label="lrmoe", policy=mine),
    ]
    if drop:
        found.insert(2, Contender(label=f"ultraep, {drop:.0%} dropped after", policy=ultraep, drop=drop, quota=quota))
        found.append(Contender(label=f"lrmoe, {drop:.0%}", policy=mine, drop=drop, quota=quota))
    return found


def measure(contender: Contender, loads: Sequence[Tensor], expert: Expert | None = None) -> Record:
    """What a policy makes of one or several load matrices, e.g. of several layers or steps.

    Ratios are of the busiest rank to the mean of the same rows, so at least 1, and means over the matrices that have
    any pair, None where none has; counts are sums. The forward and the backward appear apart: ``forward_home`` and
    ``forward`` are rows without and with replicas, ``backward_home`` and ``backward`` kept rows under the quotas
    without and with replicas, over the mean of the kept rows. ``fits`` is False where
    a capacity is exceeded for any matrix; then ``reason`` says by how much, and what depends on a plan is None.
    """
    expert = expert or Expert()
    policy = contender.policy
    record: Record = {
        "policy": contender.label,
        "drop": contender.drop,
        "slots": policy.slots,
        "matrices": len(loads),
        "fits": True,
        "reason": None,
    }
    homes = [home_plan(lam_GE, planned_quotas(lam_GE, contender.drop, contender.quota)) for lam_GE in loads]
    record["forward_home"] = _busiest([plan.rows_EG for plan in homes])
    record["backward_home"] = _busiest([plan.quota_EG for plan in homes])
    plans: list[Plan] = []
    try:
        plans = [policy.plan(lam_GE, drop=contender.drop, quota=contender.quota) for lam_GE in loads]
    except BudgetExceeded as error:
        record["fits"], record["reason"] = False, str(error)
    fits = record["fits"]
    record["forward"] = _busiest([plan.rows_EG for plan in plans]) if fits else None
    record["backward"] = _busiest([plan.quota_EG for plan in plans]) if fits else None
    record["kept_rows"] = sum(int(plan.quota_EG.sum()) for plan in plans) if fits else None
    record["replicas"] = sum(plan.num_replicas for plan in plans) if fits else None
    record["moved_rows"] = sum(plan.moved_rows for plan in plans) if fits else None
    record["moved_kept_rows"] = sum(_moved(plan) for plan in plans) if fits else None
    record["extra_dropped"] = sum(plan.extra_dropped for plan in plans) if fits else None
    record["replica_bytes"] = sum(map(expert.replica_bytes, plans)) if fits else None
    return record


def _busiest(tables: Sequence[Tensor]) -> float | None:
    """The largest sum of a rank over the mean sum of a rank, of (E, G) each; mean over those with any row."""
    return mean_of_known([max_over_mean(table_EG.sum(0).tolist()) for table_EG in tables])


def _moved(plan: Plan) -> int:
    num_experts, num_ranks = plan.rows_EG.shape
    home_E1 = torch.tensor(home_ranks(num_experts, num_ranks), device="cpu").unsqueeze(1)
    return int(plan.quota_EG.sum() - plan.quota_EG.gather(1, home_E1).sum())
