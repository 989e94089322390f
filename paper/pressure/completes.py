"""What completes when the batch grows and the memory of a rank does not.

A rank holds its experts, its slots and the bytes of its rows; a *pressure* of p is p times the tokens. A policy that
computes every row can only move rows between ranks: what is beyond the capacity of a rank does not complete. LRMoE
lowers the number of rows that the backward keeps, by its quota, as far as ``min_keep`` allows.

Nothing runs here but the planners; bytes are arithmetic. Shapes: E experts, G ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lrmoe.balance import BudgetExceeded, Plan, Policy, get
from lrmoe.evenness import max_over_mean
from lrmoe.studies.loads import mean, scaled_loads
from lrmoe.studies.replay import Choice, Setting
from lrmoe.studies.routing import Routing
from lrmoe.studies.systems import SYSTEMS, Peaks, System
from paper.pressure.pair_bytes import PairBytes, Slopes, slopes

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the ranks may hold, and how far LRMoE may go.

    Args:
        budget: bytes a rank has for the experts, slots and rows of a layer.
        pair: bytes of a row.
        min_keep: share of its rows that every expert's backward keeps at least, under LRMoE.
    """

    budget: float
    pair: PairBytes
    min_keep: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Completed:
    """Of one plan under a budget; shares are of all routed rows.

    Args:
        completes: rows that their rank has room for. Of LRMoE a row counts whose backward its quota leaves out.
        batch: the largest part of this batch, all experts alike, that every rank has room for: the fullest decides.
        backward: rows whose backward is computed.
        demand: bytes of the fullest rank, beyond its experts and slots.
    """

    completes: float
    batch: float
    backward: float
    demand: float


def completed(plan: Plan, available: float, pair: PairBytes, top_k: int) -> Completed:
    """What completes of a plan with ``available`` bytes a rank for its rows."""
    rows_G, kept_G = plan.rows_EG.sum(0).tolist(), plan.quota_EG.sum(0).tolist()
    tokens_G = (plan.lam_GE.sum(1) // top_k).tolist()
    total = sum(rows_G)
    if total == 0:
        return Completed(completes=1.0, batch=1.0, backward=1.0, demand=0.0)
    done = backward = 0
    batch, most = 1.0, 0.0
    for tokens, rows, kept in zip(tokens_G, rows_G, kept_G, strict=True):
        demand = _demand(pair, tokens, rows, kept)
        # Bytes are in proportion: of a share of its rows and tokens a rank needs that share.
        share = 1.0 if demand <= available else max(available, 0.0) / demand
        batch, most = min(batch, share), max(most, demand)
        done += int(share * rows)
        backward += int(share * kept)
    return Completed(completes=done / total, batch=batch, backward=backward / total, demand=most)


def _demand(pair: PairBytes, tokens: int, rows: int, kept: int) -> float:
    return max(pair.forward(tokens, rows), pair.backward(tokens, rows, kept))


def least_drop_plan(lam_GE: Tensor, available: float, limits: Limits, *, slots: int, top_k: int) -> Plan:
    """LRMoE's plan that drops least of those that let most rows complete.

    First without a drop; then from the drop that a perfectly even plan would need, the planner going on from there
    where slots bind; where the forward is the fuller peak, with the forward evened out instead. Where nothing fits,
    every expert is down to ``min_keep``.
    """
    pair, rows = limits.pair, max(int(lam_GE.sum()) // len(lam_GE), 1)
    near = slopes(pair, rows // top_k, rows)
    most = 1.0 - limits.min_keep
    found: list[Plan] = []

    def rank(plan: Plan) -> tuple[float, float]:
        result = completed(plan, available, pair, top_k)
        return round(result.completes, 9), result.backward

    capacity = available - near.own
    for attempt in range(4):
        # Where the slopes promised too much, a little less.
        drop = 0.0 if attempt == 0 else max(1.0 - (capacity / rows - near.row) / near.kept, _BARELY)
        plan = _under(lam_GE, capacity, near, limits, slots, drop) if drop <= most else None
        if plan is not None:
            found.append(plan)
            result = completed(plan, available, pair, top_k)
            if result.completes == 1.0:
                return plan
            if attempt:
                capacity -= 1.02 * max(result.demand - available, 0.0)
    found.append(get("lrmoe", slots=slots).plan(lam_GE, drop=most))
    found += _forward_first(lam_GE, available, limits, slots, near)
    return max(found, key=rank)


_BARELY = 1e-9
"""A drop that leaves nothing out, but lets the planner do so where slots bind."""


def _under(lam_GE: Tensor, capacity: float, near: Slopes, limits: Limits, slots: int, drop: float) -> Plan | None:
    """The planner's own answer, or None where it has none."""
    if capacity <= 0:
        return None
    policy = get(
        "lrmoe",
        slots=slots,
        capacity=capacity,
        forward_cost=near.row,
        backward_cost=near.kept,
        min_keep=limits.min_keep,
    )
    try:
        return policy.plan(lam_GE, drop=drop)
    except BudgetExceeded:
        return None


def _forward_first(lam_GE: Tensor, available: float, limits: Limits, slots: int, near: Slopes) -> list[Plan]:
    """The forward's rows under their own limit, with replicas alone; then the drop that brings the backward under."""
    capacity = available - near.own_forward
    if near.forward == 0 or capacity <= 0:
        return []
    policy = get("lrmoe", slots=slots, capacity=capacity, forward_cost=near.forward, backward_cost=0.0)
    try:
        plan = policy.plan(lam_GE)
    except BudgetExceeded:
        return []
    busiest = max(int(plan.rows_EG.sum(0).max()), 1)
    drop = 1.0 - ((available - near.own) / busiest - near.row) / near.kept
    if drop <= 0:
        return [plan]
    # Quotas are whole rows of each expert; the margin is for their rounding.
    drop += lam_GE.shape[1] / max(int(lam_GE.sum()), 1)
    return [policy.plan(lam_GE, drop=drop)] if drop <= 1.0 - limits.min_keep else []


@dataclass(frozen=True, kw_only=True)
class Pressured:
    """The records of a study, for every policy and pressure; see :func:`under_pressure`."""

    records: list[Record]

    def of(self, policy: str, pressure: float) -> Record:
        """One of them."""
        return next(r for r in self.records if (r["policy"], r["pressure"]) == (policy, pressure))


def under_pressure(
    choices: Sequence[Choice],
    routing: Routing,
    setting: Setting,
    limits: Limits,
    *,
    tokens: int,
    top_k: int,
    pressures: Sequence[float],
    progress: Callable[[str], None] | None = None,
) -> Pressured:
    """Plays the loads, scaled to each pressure, to every policy under the budget.

    Policies from history see every record's loads once before they count (the first step twice), so that none starts
    blind.

    Args:
        choices: of the policies; ``lrmoe`` plans by :func:`least_drop_plan`, all others compute every row.
        tokens: of a rank at pressure 1, the mean.
        top_k: experts a token.

    Returns:
        Records with ``policy``, ``system``, ``pressure``, ``reason`` (why it cannot run, or None), and means over the
        loads' records of ``completes``, ``batch``, ``backward`` (see :class:`Completed`), ``busiest`` (largest over
        mean rows of a rank), ``replicas``; the least of ``completes_least`` and ``kept_least`` (of an expert's rows,
        the share its backward keeps by plan); the most of ``held`` (experts and slots, bytes) and ``demand`` (rows,
        bytes), of the fullest rank.
    """
    for choice in choices:
        if choice.name == "lrmoe" and (unused := sorted(set(choice.options) - {"slots"})):
            raise ValueError(
                f"policies={choice.label!r}: {unused[0]} has no effect here: costs and capacity follow from the bytes"
            )
    records = []
    for choice in choices:
        for pressure in pressures:
            if progress is not None:
                progress(f"{choice.label} at {pressure:g} x")
            scaled = [scaled_loads(lam_GE, round(tokens * pressure), top_k) for lam_GE in routing.lam]
            record: Record = {"policy": choice.label, "system": choice.name, "pressure": pressure, "reason": None}
            try:
                record |= _play(choice, routing, scaled, setting, limits, top_k)
            except ValueError as error:
                record |= dict.fromkeys(FIELDS) | {"reason": str(error)}
            records.append(record)
    return Pressured(records=records)


FIELDS = (
    "completes",
    "completes_least",
    "batch",
    "backward",
    "kept_least",
    "busiest",
    "replicas",
    "held",
    "demand",
)


def _play(
    choice: Choice, routing: Routing, lam: Sequence[Tensor], setting: Setting, limits: Limits, top_k: int
) -> Record:
    policy = setting.make(choice)
    system = SYSTEMS[choice.name](setting.sizes, policy)
    places = list(zip(routing.step, routing.layer, lam, strict=True))
    by_step = [list(group) for _, group in itertools.groupby(places, key=lambda place: place[0])]
    for _, layer, lam_GE in by_step[0]:
        policy.plan(lam_GE, layer=layer)
        policy.observe(lam_GE, layer=layer)
    policy.step()
    rows: list[Record] = []
    for group in by_step:
        for _, layer, lam_GE in group:
            rows.append(_one(choice, policy, system, lam_GE, layer, limits, top_k))
            policy.observe(lam_GE, layer=layer)
        policy.step()
    result: Record = {
        name: mean([row[name] for row in rows]) for name in ("completes", "batch", "backward", "busiest", "replicas")
    }
    result |= {"completes_least": min(row["completes"] for row in rows)}
    result |= {"kept_least": min(row["kept_least"] for row in rows)}
    return result | {name: max(row[name] for row in rows) for name in ("held", "demand")}


def _one(
    choice: Choice, policy: Policy, system: System, lam_GE: Tensor, layer: int, limits: Limits, top_k: int
) -> Record:
    if choice.name == "lrmoe":
        # Its slots are there whether a plan fills them or not.
        held = _held(system, Peaks())
        plan = least_drop_plan(lam_GE, limits.budget - held, limits, slots=policy.slots, top_k=top_k)
    else:
        plan = policy.plan(lam_GE, layer=layer)
        copies = max((len(experts) for experts in plan.slots), default=0)
        held = _held(system, Peaks(replicas=copies, layer_replicas=copies))
    result = completed(plan, limits.budget - held, limits.pair, top_k)
    rows_E, kept_E = plan.rows_EG.sum(1), plan.quota_EG.sum(1)
    loaded_E = rows_E > 0
    return {
        "completes": result.completes,
        "batch": result.batch,
        "backward": result.backward,
        "kept_least": float((kept_E / rows_E.clamp(min=1))[loaded_E].min()) if bool(loaded_E.any()) else 1.0,
        # There are rows: loads without any are refused before.
        "busiest": max_over_mean(plan.rows_EG.sum(0).tolist()),
        "replicas": plan.num_replicas,
        "held": held,
        "demand": result.demand,
    }


def _held(system: System, peaks: Peaks) -> float:
    held = system.memory(peaks)
    return held.weights + held.gradients
