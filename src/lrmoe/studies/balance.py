"""What each balancing policy makes of given loads, and from how many tokens on its replicas pay.

Nothing runs here but the planners: rows are counted, not timed, and the break-even is arithmetic with stated rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lrmoe.balance import BudgetExceeded, Plan, Policy, get, home_ranks
from lrmoe.balance.fixed import home_plan
from lrmoe.balance.policy import planned_quotas
from lrmoe.config import Quota
from lrmoe.studies.expert import Expert
from lrmoe.studies.loads import mean, scaled_loads

Record = dict[str, Any]
TOKENS = tuple(2**n for n in range(6, 17))
"""Tokens of a rank at which the break-even is looked at: 64 to 65536."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A policy and the drop it plans with."""

    label: str
    policy: Policy
    drop: float = 0.0
    quota: Quota = "expert"


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

    Ratios are to the mean rows of a rank and means over the matrices; counts are sums. The forward and the backward
    appear apart: ``forward_home`` and ``forward`` are the busiest rank's rows without and with replicas,
    ``backward_home`` and ``backward`` its kept rows under the quotas without and with replicas. ``fits`` is False where
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
    record["forward_home"] = mean([_busiest(plan.rows_EG, plan) for plan in homes])
    record["backward_home"] = mean([_busiest(plan.quota_EG, plan) for plan in homes])
    plans: list[Plan] = []
    try:
        plans = [policy.plan(lam_GE, drop=contender.drop, quota=contender.quota) for lam_GE in loads]
    except BudgetExceeded as error:
        record["fits"], record["reason"] = False, str(error)
    fits = record["fits"]
    record["forward"] = mean([_busiest(plan.rows_EG, plan) for plan in plans]) if fits else None
    record["backward"] = mean([_busiest(plan.quota_EG, plan) for plan in plans]) if fits else None
    record["kept_rows"] = sum(int(plan.quota_EG.sum()) for plan in plans) if fits else None
    record["replicas"] = sum(plan.num_replicas for plan in plans) if fits else None
    record["moved_rows"] = sum(plan.moved_rows for plan in plans) if fits else None
    record["moved_kept_rows"] = sum(_moved(plan) for plan in plans) if fits else None
    record["extra_dropped"] = sum(plan.extra_dropped for plan in plans) if fits else None
    record["replica_bytes"] = sum(map(expert.replica_bytes, plans)) if fits else None
    return record


def break_even(contender: Contender, loads: Sequence[Tensor], *, top_k: int, expert: Expert) -> Record:
    """From how many tokens a rank on the replicas of a policy save more time than they cost.

    The loads are scaled to each size of :data:`TOKENS`. Saved is the busiest rank's expert time without replicas minus
    with them, under the same quotas; the cost is :meth:`Expert.replica_seconds`. Rows travel to another rank with and
    without replicas, so that their all-to-all is left out.

    Args:
        contender: with a policy that has no capacity, as sizes differ.
        loads: one or several matrices; what is said of a size is the mean over them.
        top_k: experts a token, to turn tokens into rows.
        expert: sizes and rates.

    Returns:
        ``tokens``: the crossover, interpolated between the last size at which replicas do not pay and the next; None
        where they do not at the largest, 0 where they do at the smallest. ``sizes``: for each size the milliseconds
        ``saved`` and their ``cost``, and the ``replicas``.
    """
    sizes = [_size(contender, [scaled_loads(lam_GE, t, top_k) for lam_GE in loads], t, expert) for t in TOKENS]
    losing = [i for i, size in enumerate(sizes) if size["saved"] <= size["cost"]]
    crossover: float | None = 0.0
    if losing and losing[-1] == len(sizes) - 1:
        crossover = None
    elif losing:
        below, above = sizes[losing[-1]], sizes[losing[-1] + 1]
        lost, won = (size["saved"] - size["cost"] for size in (below, above))
        # Without replicas nothing is lost: they begin somewhere between the two, which the larger is safe for.
        share = -lost / (won - lost) if below["replicas"] else 1.0
        crossover = below["tokens"] + share * (above["tokens"] - below["tokens"])
    return {"policy": contender.label, "tokens": crossover, "sizes": sizes}


def advice(record: Record) -> str:
    """One sentence about a break-even."""
    policy = record["policy"]
    if all(size["replicas"] == 0 for size in record["sizes"]):
        return f"{policy}: plans no replica for these loads at any size; leave replicas off (slots=0)"
    if record["tokens"] is None:
        return (
            f"{policy}: replicas cost more than they save up to {TOKENS[-1]:,} tokens a rank; leave them off (slots=0)"
        )
    if record["tokens"] == 0.0:
        return f"{policy}: replicas pay from {TOKENS[0]} tokens a rank on"
    return (
        f"{policy}: replicas pay from about {record['tokens']:,.0f} tokens a rank on; below that, leave them off "
        "(slots=0)"
    )


def _size(contender: Contender, loads: Sequence[Tensor], tokens: int, expert: Expert) -> Record:
    saved, cost, replicas = [], [], 0
    for lam_GE in loads:
        home = home_plan(lam_GE, planned_quotas(lam_GE, contender.drop, contender.quota))
        plan = contender.policy.plan(lam_GE, drop=contender.drop, quota=contender.quota)
        saved.append(1e3 * expert.row_seconds * (_longest(home) - _longest(plan)))
        cost.append(1e3 * expert.replica_seconds(plan))
        replicas += plan.num_replicas
    return {"tokens": tokens, "saved": mean(saved), "cost": mean(cost), "replicas": replicas / len(loads)}


def _longest(plan: Plan) -> int:
    """The busiest rank's work, in forwards of a row."""
    return int((plan.rows_EG + 2 * plan.quota_EG).sum(0).max())


def _busiest(table_EG: Tensor, plan: Plan) -> float:
    """The largest sum of a rank over the mean rows of a rank; 1 where there is no row."""
    rows = int(plan.rows_EG.sum())
    return float(table_EG.sum(0).max()) * table_EG.shape[1] / rows if rows else 1.0


def _moved(plan: Plan) -> int:
    num_experts, num_ranks = plan.rows_EG.shape
    home_E1 = torch.tensor(home_ranks(num_experts, num_ranks), device="cpu").unsqueeze(1)
    return int(plan.quota_EG.sum() - plan.quota_EG.gather(1, home_E1).sum())
