"""UltraEP (arXiv 2606.04101): replicas from the exact loads of this microbatch, down to the mean load.

Every rank above a threshold T exports rows of its experts, the hottest first, to the rank with the most room; T is the
mean with a tolerance where that works at once (the fast path), else the least at which it does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from torch import Tensor

from lrmoe.balance.fixed import require_fit
from lrmoe.balance.plan import Plan, build_plan, home_ranks
from lrmoe.balance.policy import ExactPolicy, planned_quotas, require_capacity, require_loads
from lrmoe.balance.quotas import split_quotas
from lrmoe.config import Quota, require_count, require_number

Exports = list[tuple[int, int, int]]
"""(expert, rank, rows) of each replica, in planned order."""


class UltraEP(ExactPolicy):
    """Replicates until every rank is at the mean load; the drop is applied to the finished plan.

    Args:
        slots: replicas a rank may hold.
        tolerance: how far above the mean the fast path aims, as a fraction.
        floor: rows that a replica must at least take where the fast path fails. The fast path asks for an even share
            of what is to be moved instead.
        fast_path: try the mean with the tolerance, and twice a per cent of the largest load more, before searching
            for the least threshold.
        capacity: rows that the backward of a rank may keep (with drop 0: all its rows); None for no limit.

    Raises:
        ValueError: if an option is out of range.
    """

    name = "ultraep"

    def __init__(
        self,
        *,
        slots: int = 1,
        tolerance: float = 0.01,
        floor: int = 1024,
        fast_path: bool = True,
        capacity: float | None = None,
    ) -> None:
        self.slots = require_count("slots", slots)
        self.tolerance = require_number("tolerance", tolerance)
        if not 0.0 <= self.tolerance <= 1.0:
            raise ValueError(f"tolerance={tolerance!r} must be in [0, 1]: how far above the mean load to aim")
        self.floor = require_count("floor", floor, least=1)
        if not isinstance(fast_path, bool):
            raise ValueError(f"fast_path={fast_path!r} must be True or False")
        self.fast_path = fast_path
        self.capacity = require_capacity(capacity)

    def plan(self, lam_GE: Tensor, *, drop: float = 0.0, quota: Quota = "expert", layer: int = 0) -> Plan:
        """The plan on the exact loads. See :meth:`lrmoe.balance.policy.Policy.plan`."""
        lam_GE = require_loads(lam_GE)
        quota_E = planned_quotas(lam_GE, drop, quota)
        home = HomeLoads.of(lam_GE)
        exports = self.fast_exports(home) if self.fast_path else None
        plan = None if exports is None else _finish(lam_GE, quota_E, exports)
        if plan is None or (self.capacity is not None and int(plan.quota_EG.sum(0).max()) > self.capacity):
            searched = _finish(lam_GE, quota_E, self.least_exports(home))
            if plan is None or searched.quota_EG.sum(0).max() < plan.quota_EG.sum(0).max():
                plan = searched
        require_fit(
            self.name,
            plan,
            self.capacity,
            f"An exact plan keeps the sum of all rows, here {home.mean:,} a rank; allow more rows a rank or slots, or "
            "use the policy 'lrmoe' with a drop.",
        )
        return plan

    def fast_exports(self, home: HomeLoads) -> Exports | None:
        """What to export at the mean with the tolerance, or None if that is not possible in three tries."""
        threshold = _ceil(home.mean * (1.0 + self.tolerance))
        for _ in range(3):
            exports = probe(home, threshold, slots=self.slots, floor=None)
            if exports is not None:
                return exports
            threshold += -(-home.most // 100)
        return None

    def least_exports(self, home: HomeLoads) -> Exports:
        """What to export at the least threshold that bisection finds possible with the fixed floor.

        At the largest load nothing has to move, so there always is one. What is possible at a threshold need not be so
        at a higher one: exports then are smaller and may fall below the floor (or, rarely, fall on other ranks).
        Bisection may then stop above the least.
        """
        low, high = home.mean, max(home.most, home.mean)
        found: Exports = []
        while low < high:
            middle = (low + high) // 2
            exports = probe(home, middle, slots=self.slots, floor=self.floor)
            if exports is None:
                low = middle + 1
            else:
                high, found = middle, exports
        return found


@dataclass(frozen=True, slots=True)
class HomeLoads:
    """The loads with every expert at home, and the order in which they are looked at.

    Args:
        load_E: rows of each expert.
        load_G: rows of each rank.
        ranks: by load, largest first, lower rank first among equals.
        experts_G: of each rank by load, likewise.
    """

    load_E: list[int]
    load_G: list[int]
    ranks: list[int]
    experts_G: list[list[int]]

    @classmethod
    def of(cls, lam_GE: Tensor) -> HomeLoads:
        num_ranks, num_experts = lam_GE.shape
        load_E = lam_GE.sum(0).tolist()
        load_G, experts_G = [0] * num_ranks, [[] for _ in range(num_ranks)]  # type: list[int], list[list[int]]
        for expert, home in enumerate(home_ranks(num_experts, num_ranks)):
            load_G[home] += load_E[expert]
            experts_G[home].append(expert)
        for experts in experts_G:
            experts.sort(key=lambda e: -load_E[e])
        return cls(load_E, load_G, sorted(range(num_ranks), key=lambda r: -load_G[r]), experts_G)

    @property
    def mean(self) -> int:
        """The mean load of a rank, rounded up: the least threshold any exact plan can reach."""
        return -(-sum(self.load_G) // len(self.load_G))

    @property
    def most(self) -> int:
        """The largest load of a rank."""
        return max(self.load_G)


def probe(home: HomeLoads, threshold: int, *, slots: int, floor: int | None) -> Exports | None:
    """What every rank above ``threshold`` exports so that none is above it, or None.

    A rank exports its experts from the hottest on, each to the rank with the most room among those with a free slot and
    no instance of it (lower rank first among equals), as much as is needed, there is room for and the expert has beyond
    one row, which stays at home.

    Args:
        floor: rows a replica must at least take; None for an even share of what is still to be moved over the ranks
            that could take it.
    """
    excess = sum(max(load - threshold, 0) for load in home.load_G)
    if excess > sum(max(threshold - load, 0) for load in home.load_G):
        return None
    # Ranks with room and a free slot, by room; the last has the most, the lower rank last among equals.
    open_ranks = sorted((threshold - load, -r) for r, load in enumerate(home.load_G) if load < threshold and slots)
    free = [slots] * len(home.load_G)
    exports: Exports = []
    for source in home.ranks:
        need = home.load_G[source] - threshold
        if need <= 0:
            break
        for expert in home.experts_G[source]:
            spare = home.load_E[expert] - 1
            taken: set[int] = set()
            while need > 0 and spare > 0:
                candidates = [place for place in open_ranks if -place[1] not in taken] if taken else open_ranks
                if not candidates:
                    break
                room, negated = candidates[-1]
                rows = min(need, room, spare)
                if rows < (-(-need // len(candidates)) if floor is None else floor):
                    break
                target = -negated
                exports.append((expert, target, rows))
                taken.add(target)
                need -= rows
                spare -= rows
                free[target] -= 1
                del open_ranks[bisect_left(open_ranks, (room, negated))]
                if free[target] and room > rows:
                    insort(open_ranks, (room - rows, negated))
            if need <= 0:
                break
        if need > 0:
            return None
    return exports


def _finish(lam_GE: Tensor, quota_E: Tensor, exports: Exports) -> Plan:
    num_ranks, num_experts = lam_GE.shape
    hosts, rows_EG = build_plan(lam_GE, home_ranks(num_experts, num_ranks), exports)
    return Plan(hosts, rows_EG, split_quotas(quota_E, rows_EG, hosts), lam_GE)


def _ceil(value: float) -> int:
    return -int(-value // 1)
