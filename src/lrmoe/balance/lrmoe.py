"""LRMoE: recalibrate first, then plan the fewest replicas that the recalibrated demand needs under a budget.

Redistributing rows never changes their sum, so that under a capacity below the mean load no placement fits. Dropping
backward rows first does change it, and what is left needs fewer replicas.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from lrmoe.balance.fixed import home_plan
from lrmoe.balance.plan import Plan, build_plan, home_ranks
from lrmoe.balance.policy import BudgetExceeded, ExactPolicy, planned_quotas, require_capacity, require_loads
from lrmoe.balance.quotas import proportional
from lrmoe.balance.search import Found, Placement, closest, fewest, found_of, least_level
from lrmoe.balance.ultraep import HomeLoads, UltraEP, probe
from lrmoe.config import Quota, require_count, require_number


class LRMoE(ExactPolicy):
    """Fewest replicas, then fewest moved rows, under a capacity or near the mean demand.

    The demand of an instance is ``forward_cost * rows + backward_cost * kept``.

    Args:
        slots: replicas a rank may hold.
        forward_cost: of a row; with ``backward_cost`` in the unit of ``capacity`` (time, bytes). A backward does about
            twice the work of a forward, hence 1 and 2. To bound the backward's rows alone, 0 and 1.
        backward_cost: of a row that the backward keeps.
        capacity: what a rank may hold: the memory budget. With a drop, quotas shrink further where the slots do not
            suffice, and the plan says by how much (``extra_dropped``); without a drop nothing ever is left out.
        target: without a capacity, how much of the mean demand a rank may have; where the slots do not suffice, the
            least that can be reached.
        min_keep: share of its rows that an expert keeps at least when quotas shrink for a capacity.
        threshold: without a capacity, the largest home demand over the mean from which on replicas are planned.

    Raises:
        ValueError: if an option is out of range.
    """

    name = "lrmoe"

    def __init__(
        self,
        *,
        slots: int = 1,
        forward_cost: float = 1.0,
        backward_cost: float = 2.0,
        capacity: float | None = None,
        target: float = 1.05,
        min_keep: float = 0.5,
        threshold: float = 1.05,
    ) -> None:
        self.slots = require_count("slots", slots)
        self.forward_cost = _require("forward_cost", forward_cost, 0.0, math.inf)
        self.backward_cost = _require("backward_cost", backward_cost, 0.0, math.inf)
        if self.forward_cost + self.backward_cost == 0:
            raise ValueError("forward_cost=0 and backward_cost=0: nothing has a cost; give at least one, e.g. 1 and 2")
        self.capacity = require_capacity(capacity)
        self.target = _require("target", target, 1.0, math.inf)
        self.min_keep = _require("min_keep", min_keep, 0.0, 1.0)
        self.threshold = _require("threshold", threshold, 1.0, math.inf)

    def should_plan(self, lam_GE: Tensor) -> bool:
        """Whether a rank's home demand, nothing dropped, is above the capacity, or ``threshold`` times the mean."""
        load_E = require_loads(lam_GE).sum(0).tolist()
        home = self._placement(load_E, load_E, len(lam_GE))
        return self.slots > 0 and self._uneven(home)

    def plan(self, lam_GE: Tensor, *, drop: float = 0.0, quota: Quota = "expert", layer: int = 0) -> Plan:
        """The plan for these loads. See :meth:`lrmoe.balance.policy.Policy.plan`."""
        lam_GE = require_loads(lam_GE)
        quota_E = planned_quotas(lam_GE, drop, quota)
        home = self._placement(lam_GE.sum(0).tolist(), quota_E.tolist(), len(lam_GE))
        if self.capacity is None:
            found = self._soft(home, lam_GE, exact=drop == 0)
        elif drop == 0:
            found = self._exact(home, lam_GE, self.capacity)
        else:
            home, found = self._shrinking(home, self.capacity)
        extra = int(quota_E.sum()) - sum(home.quota_E)
        return _finish(lam_GE, home, found, extra)

    def _placement(self, load_E: list[int], quota_E: list[int], num_ranks: int) -> Placement:
        homes = home_ranks(len(load_E), num_ranks)
        return Placement(load_E, quota_E, homes, num_ranks, self.forward_cost, self.backward_cost)

    def _uneven(self, home: Placement) -> bool:
        if self.capacity is not None:
            return home.most > self.capacity
        return home.mean > 0 and home.most >= self.threshold * home.mean

    def _soft(self, home: Placement, lam_GE: Tensor, exact: bool) -> Found:
        """Under ``target`` times the mean, or as near to it as the slots allow."""
        level = self.target * home.mean
        if not self._uneven(home) or home.most <= level or not self.slots:
            return found_of(home, [])
        others = self._ultraep(home, lam_GE, level) if exact else []
        found = fewest(home, level, self.slots, others)
        if found is None:
            level = min([least_level(home, self.slots), *(other.most for other in others)])
            found = fewest(home, level, self.slots, others)
        return found or found_of(home, [])

    def _exact(self, home: Placement, lam_GE: Tensor, capacity: float) -> Found:
        """Under the capacity with every row kept."""
        if home.most <= capacity:
            return found_of(home, [])
        others = self._ultraep(home, lam_GE, capacity)
        found = fewest(home, capacity, self.slots, others)
        if found is None:
            would_fit = min([least_level(home, self.slots), *(other.most for other in others)])
            raise self._exceeded(home, capacity, would_fit, "Without a drop nothing may be left out: set drop > 0, ")
        return found

    def _shrinking(self, home: Placement, capacity: float) -> tuple[Placement, Found]:
        """Quota, plan, shrink, until every rank fits."""
        floor_E = [
            min(quota, max(math.ceil(self.min_keep * load), 1))
            for load, quota in zip(home.load_E, home.quota_E, strict=True)
        ]
        for attempt in itertools.count():
            if home.most <= capacity:
                return home, found_of(home, [])
            found = fewest(home, capacity, self.slots)
            if found is not None:
                return home, found
            short = closest(home, capacity, self.slots)
            # With few rows missing, one less may turn the rounding of another: from the fifth time on more and more.
            quota_E = self._shrunk(home, short, floor_E, capacity, more=2 ** max(attempt - 3, 0) - 1)
            if quota_E is None:
                mend = f"Every expert that could help is down to its least (min_keep={self.min_keep:g}): lower it, "
                floored = self._placement(list(home.load_E), floor_E, len(home.demand_G))
                raise self._exceeded(floored, capacity, least_level(floored, self.slots), mend)
            home = self._placement(list(home.load_E), quota_E, len(home.demand_G))
        raise AssertionError("unreachable: the count has no end")

    def _shrunk(
        self, home: Placement, short: Found, floor_E: list[int], capacity: float, more: int
    ) -> list[int] | None:
        """Quotas lower by what ``short`` leaves above the capacity, and ``more`` rows a rank; None if none can be.

        First those of the overfull ranks' experts; where these are all down to their floor, everybody's, which makes
        room for more exports. In proportion to what each expert can give.
        """
        if self.backward_cost == 0:
            return None
        quota_E = list(home.quota_E)
        missing = 0
        for rank, demand in enumerate(short.demand_G):
            if demand > capacity:
                rows = math.ceil((demand - capacity) / self.backward_cost) + more
                missing += _take(quota_E, floor_E, home.experts_G[rank], rows)
        if quota_E == home.quota_E:
            _take(quota_E, floor_E, range(len(quota_E)), missing)
        return None if quota_E == home.quota_E else quota_E

    def _ultraep(self, home: Placement, lam_GE: Tensor, level: float) -> list[Found]:
        """UltraEP's plan, and its probe at this level: what an exact plan must not be worse than."""
        loads = HomeLoads.of(lam_GE)
        ultraep = UltraEP(slots=self.slots)
        planned = ultraep.fast_exports(loads)
        if planned is None:
            planned = ultraep.least_exports(loads)
        threshold = int(level / (self.forward_cost + self.backward_cost))
        probed = probe(loads, threshold, slots=self.slots, floor=None)
        return [found_of(home, exports) for exports in (planned, probed) if exports is not None]

    def _exceeded(self, home: Placement, capacity: float, would_fit: float, mend: str) -> BudgetExceeded:
        short = closest(home, capacity, self.slots)
        return BudgetExceeded(
            self.name,
            demand=short.most,
            capacity=capacity,
            rank=short.demand_G.index(short.most),
            would_fit=would_fit,
            mend=mend + "or allow a larger capacity or more slots.",
            unit=f" (at {self.forward_cost:g} a row and {self.backward_cost:g} a kept row)",
        )


def _finish(lam_GE: Tensor, home: Placement, found: Found, extra: int) -> Plan:
    quota_E = torch.tensor(home.quota_E, dtype=torch.int64)
    if not found.exports:
        plan = home_plan(lam_GE, quota_E)
        return Plan(plan.hosts, plan.rows_EG, plan.quota_EG, lam_GE, extra)
    hosts, rows_EG = build_plan(lam_GE, home.homes, [(e, rank, rows) for e, rank, rows, _ in found.exports])
    home_E1 = torch.tensor(home.homes).unsqueeze(1)
    quota_EG = torch.zeros_like(rows_EG).scatter_(1, home_E1, quota_E.unsqueeze(1))
    for expert, rank, _, kept in found.exports:
        quota_EG[expert, rank] += kept
        quota_EG[expert, home.homes[expert]] -= kept
    return Plan(hosts, rows_EG, quota_EG, lam_GE, extra)


def _take(quota_E: list[int], floor_E: list[int], experts: list[int] | range, rows: int) -> int:
    """Lowers the quotas of ``experts`` in place by ``rows``, and returns how many rows are still missing."""
    room = [quota_E[e] - floor_E[e] for e in experts]
    given = min(rows, sum(room))
    for expert, part in zip(experts, proportional(room, given), strict=True):
        quota_E[expert] -= part
    return rows - given


def _require(field: str, value: object, least: float, most: float) -> float:
    number = require_number(field, value)
    if not least <= number <= most or math.isinf(number):
        upper = f"<= {most:g}" if most < math.inf else "finite"
        raise ValueError(f"{field}={value!r} must be >= {least:g} and {upper}")
    return number
