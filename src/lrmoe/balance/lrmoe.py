"""LRMoE: recalibrate first, then plan the fewest replicas that the recalibrated demand needs under a budget.

Redistributing rows never changes their sum, so that under a capacity below the mean load no placement fits. Dropping
backward rows first does change it, and what is left needs fewer replicas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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
            least that can be reached, to 0.2 % of the mean.
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

    def _placement(self, load_E: Sequence[int], quota_E: Sequence[int], num_ranks: int) -> Placement:
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
            level = min([least_level(home, self.slots, relative=0.002), *(other.most for other in others)])
            found = fewest(home, level, self.slots, others)
        return found or found_of(home, [])

    def _exact(self, home: Placement, lam_GE: Tensor, capacity: float) -> Found:
        """Under the capacity with every row kept."""
        if home.most <= capacity:
            return found_of(home, [])
        others = self._ultraep(home, lam_GE, capacity)
        found = fewest(home, capacity, self.slots, others)
        if found is None:
            raise self._exceeded(home, capacity, others, "Without a drop nothing may be left out: set drop > 0, ")
        return found

    def _shrinking(self, home: Placement, capacity: float) -> tuple[Placement, Found]:
        """Quota, plan, shrink, until every rank fits."""
        floor_E = [
            min(quota, max(math.ceil(self.min_keep * load), 1))
            for load, quota in zip(home.load_E, home.quota_E, strict=True)
        ]
        floored = self._placement(home.load_E, floor_E, len(home.demand_G))
        if (found := fewest(home, capacity, self.slots)) is not None:
            return home, found
        # Fast, and where that shrinks past what fits, slowly.
        for growth in (2.0, 1.2):
            above, fits = self._shrink(home, floor_E, capacity, growth)
            if fits is not None:
                break
        else:
            above, fits = home, floored
            if fewest(floored, capacity, self.slots) is None:
                mend = f"Every expert that could help is down to its least (min_keep={self.min_keep:g}): lower it, "
                raise self._exceeded(floored, capacity, [], mend)
        # Between the quotas that do not fit and those that do may be larger ones that do.
        for _ in range(4):
            quota_E = [(a + b) // 2 for a, b in zip(above.quota_E, fits.quota_E, strict=True)]
            middle = self._placement(home.load_E, quota_E, len(home.demand_G))
            if closest(middle, capacity, self.slots).most <= capacity:
                fits = middle
            else:
                above = middle
        return fits, fewest(fits, capacity, self.slots) or closest(fits, capacity, self.slots)

    def _shrink(
        self, home: Placement, floor_E: list[int], capacity: float, growth: float
    ) -> tuple[Placement, Placement | None]:
        """The last quotas that do not fit, and the first that do; None where quotas end before.

        An export gets smaller with its expert's quota, so that a little stays missing each time: from the fourth time
        on, ``growth`` times as much is taken as the time before in proportion to what is missing.
        """
        short = closest(home, capacity, self.slots)
        for attempt in itertools.count():
            quota_E = self._shrunk(home, short, floor_E, capacity, times=growth ** max(attempt - 2, 0))
            if quota_E is None:
                break
            lower = self._placement(home.load_E, quota_E, len(home.demand_G))
            short = closest(lower, capacity, self.slots)
            if short.most <= capacity:
                return home, lower
            home = lower
        return home, None

    def _shrunk(
        self, home: Placement, short: Found, floor_E: list[int], capacity: float, times: float
    ) -> list[int] | None:
        """Quotas lower by ``times`` what ``short`` leaves above the capacity; None if none can be lowered.

        First of what the overfull ranks' experts keep at home, so that the exports can stay what they are; then of all
        that these experts keep; where they are all down to their floor, of everybody's, which makes room for more
        exports. In proportion to what each can give.
        """
        if self.backward_cost == 0:
            return None
        moved_E = [0] * len(home.quota_E)
        for expert, _, _, kept in short.exports:
            moved_E[expert] += kept
        room_E = [quota - floor for quota, floor in zip(home.quota_E, floor_E, strict=True)]
        at_home_E = [
            max(min(room, quota - moved - 1), 0)
            for room, quota, moved in zip(room_E, home.quota_E, moved_E, strict=True)
        ]
        quota_E = list(home.quota_E)
        missing = 0
        for rank, demand in enumerate(short.demand_G):
            if demand > capacity:
                rows = math.ceil(times * (demand - capacity) / self.backward_cost)
                experts = home.experts_G[rank]
                is_enough = sum(at_home_E[e] for e in experts) >= rows
                missing += _take(quota_E, at_home_E if is_enough else room_E, experts, rows)
        if quota_E == home.quota_E:
            _take(quota_E, room_E, range(len(quota_E)), missing)
        return None if quota_E == home.quota_E else quota_E

    def _ultraep(self, home: Placement, lam_GE: Tensor, level: float) -> list[Found]:
        """UltraEP's plan, and its probes at this level: what an exact plan must not be worse than."""
        loads = HomeLoads.of(lam_GE)
        ultraep = UltraEP(slots=self.slots)
        planned = ultraep.fast_exports(loads)
        if planned is None:
            planned = ultraep.least_exports(loads)
        threshold = int(level / (self.forward_cost + self.backward_cost))
        probed = [probe(loads, threshold, slots=self.slots, floor=floor) for floor in (None, 1)]
        return [found_of(home, exports) for exports in (planned, *probed) if exports is not None]

    def _exceeded(self, home: Placement, capacity: float, others: Sequence[Found], mend: str) -> BudgetExceeded:
        """What the best plan needs, at no matter which level."""
        level = min([least_level(home, self.slots), *(other.most for other in others)])
        best = fewest(home, level, self.slots, others) or found_of(home, [])
        return BudgetExceeded(
            self.name,
            demand=best.most,
            capacity=capacity,
            rank=best.demand_G.index(best.most),
            would_fit=level,
            mend=mend + "or allow a larger capacity or more slots.",
            unit=f" (at {self.forward_cost:g} a row and {self.backward_cost:g} a kept row)",
        )


def _finish(lam_GE: Tensor, home: Placement, found: Found, extra: int) -> Plan:
    quota_E = torch.tensor(home.quota_E, dtype=torch.int64, device="cpu")
    if not found.exports:
        plan = home_plan(lam_GE, quota_E)
        return Plan(plan.hosts, plan.rows_EG, plan.quota_EG, lam_GE, extra)
    hosts, rows_EG = build_plan(lam_GE, home.homes, [(e, rank, rows) for e, rank, rows, _ in found.exports])
    home_E1 = torch.tensor(home.homes, device="cpu").unsqueeze(1)
    quota_EG = torch.zeros_like(rows_EG).scatter_(1, home_E1, quota_E.unsqueeze(1))
    for expert, rank, _, kept in found.exports:
        quota_EG[expert, rank] += kept
        quota_EG[expert, home.homes[expert]] -= kept
    return Plan(hosts, rows_EG, quota_EG, lam_GE, extra)


def _take(quota_E: list[int], room_E: list[int], experts: list[int] | range, rows: int) -> int:
    """Lowers the quotas of ``experts`` in place by ``rows``, and returns how many rows are still missing."""
    room = [room_E[e] for e in experts]
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
