"""Which rows to move so that every rank is under a level of demand, with few replicas.

The demand of an instance is ``forward_cost * rows + backward_cost * kept``, in any unit: time, bytes or rows. What
moves is kept rows; the forward rows of a replica follow its share of its expert's quota.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace
from typing import Literal

Export = tuple[int, int, int, int]
"""(expert, rank, rows, kept) of a replica."""


class Placement:
    """All experts at home, under given quotas: what the search starts from.

    Args:
        load_E: rows of each expert.
        quota_E: rows of each expert that the backward keeps.
        homes: home rank of each expert.
        num_ranks: G.
        forward_cost: demand of a row.
        backward_cost: demand of a kept row, on top.
    """

    def __init__(
        self,
        load_E: Sequence[int],
        quota_E: Sequence[int],
        homes: Sequence[int],
        num_ranks: int,
        forward_cost: float,
        backward_cost: float,
    ) -> None:
        self.load_E, self.quota_E, self.homes = load_E, quota_E, homes
        self.forward_cost, self.backward_cost = forward_cost, backward_cost
        self.rows_G, self.kept_G = [0] * num_ranks, [0] * num_ranks
        experts_G: list[list[int]] = [[] for _ in range(num_ranks)]
        for expert, home in enumerate(homes):
            self.rows_G[home] += load_E[expert]
            self.kept_G[home] += quota_E[expert]
            experts_G[home].append(expert)
        self.experts_G = experts_G
        # What each expert can give: one kept row stays at home. Sorted, so that each list is a heap.
        self.spare_G = [
            sorted((-self.per_row(e) * (quota_E[e] - 1), e) for e in experts if quota_E[e] > 1) for experts in experts_G
        ]
        self.demand_G = [self.cost(rows, kept) for rows, kept in zip(self.rows_G, self.kept_G, strict=True)]
        self.mean = self.cost(sum(self.rows_G), sum(self.kept_G)) / num_ranks
        self.most = max(self.demand_G)

    def cost(self, rows: int, kept: int) -> float:
        """Demand of so many rows, of which so many are kept."""
        return self.forward_cost * rows + self.backward_cost * kept

    def per_row(self, expert: int) -> float:
        """Demand of a kept row of an expert, with the forward rows that go with it."""
        return self.forward_cost * self.load_E[expert] / self.quota_E[expert] + self.backward_cost


@dataclass(frozen=True, slots=True)
class Found:
    """What one search found.

    Args:
        exports: the replicas, in planned order.
        demand_G: of each rank with them.
        moved_rows: forward rows the replicas take.
    """

    exports: tuple[Export, ...]
    demand_G: tuple[float, ...]
    moved_rows: int

    @property
    def most(self) -> float:
        """The largest demand of a rank."""
        return max(self.demand_G)

    @property
    def rank_key(self) -> tuple[int, int, float]:
        """The smaller the better: replicas, moved rows, largest demand."""
        return len(self.exports), self.moved_rows, self.most

    def excess(self, level: float) -> float:
        """How much all ranks together are above ``level``."""
        return sum(max(demand - level, 0.0) for demand in self.demand_G)


def found_of(placement: Placement, exports: Iterable[tuple[int, int, int]]) -> Found:
    """What given replicas (expert, rank, kept rows) come to."""
    rows_G, kept_G = list(placement.rows_G), list(placement.kept_G)
    full: list[Export] = []
    for expert, rank, kept in exports:
        rows = placement.load_E[expert] * kept // placement.quota_E[expert]
        for place, sign in ((rank, 1), (placement.homes[expert], -1)):
            rows_G[place] += sign * rows
            kept_G[place] += sign * kept
        full.append((expert, rank, rows, kept))
    demand_G = tuple(placement.cost(rows, kept) for rows, kept in zip(rows_G, kept_G, strict=True))
    return Found(tuple(full), demand_G, sum(rows for _, _, rows, _ in full))


Order = Literal["largest", "smallest", "fullest"]
"""Which overfull rank exports next: the one with the largest excess until it is done, the one with the smallest until
it is done, or, one export at a time, whichever is the fullest by then."""

_PASSES: tuple[tuple[bool, Order], ...] = (
    (False, "largest"),
    (True, "largest"),
    (False, "fullest"),
    (True, "smallest"),
    (True, "fullest"),
    (False, "smallest"),
)
"""(best_fit, order) of each pass. None is best for all loads; the first is nearest to UltraEP's."""


class _Pass:
    """One greedy pass; see :func:`export`."""

    def __init__(self, placement: Placement, level: float, slots: int, best_fit: bool) -> None:
        self.placement, self.level, self.best_fit = placement, level, best_fit
        self.rows_G, self.kept_G = list(placement.rows_G), list(placement.kept_G)
        self.demand_G = list(placement.demand_G)
        # Ranks with room and a free slot, by room; among equals the lower rank last.
        self.places = sorted((level - demand, -r) for r, demand in enumerate(self.demand_G) if demand < level and slots)
        self.free_G = [slots] * len(self.demand_G)
        self.spare_G: list[list[tuple[float, int]] | None] = [None] * len(self.demand_G)
        self.moved_E: dict[int, int] = {}
        self.taken_E: dict[int, set[int]] = {}
        self.exports: list[Export] = []
        self.moved_rows = 0

    def is_over(self, source: int) -> bool:
        return self.demand_G[source] > self.level

    def step(self, source: int) -> bool:
        """One export of ``source``, of the expert that has most left to give; False if there is none."""
        spare = self.spare_G[source]
        if spare is None:
            spare = self.spare_G[source] = list(self.placement.spare_G[source])
        while self.places and spare:
            expert = spare[0][1]
            # An expert that finds no place now finds none later: places only fill.
            if not self._export(source, expert):
                heappop(spare)
                continue
            left = self.placement.quota_E[expert] - 1 - self.moved_E[expert]
            if left > 0:
                heapreplace(spare, (-self.placement.per_row(expert) * left, expert))
            else:
                heappop(spare)
            return True
        return False

    def _export(self, source: int, expert: int) -> bool:
        load, quota, cost = self.placement.load_E[expert], self.placement.quota_E[expert], self.placement.cost
        level, places, rows_G, kept_G = self.level, self.places, self.rows_G, self.kept_G
        moved, taken = self.moved_E.get(expert, 0), self.taken_E.setdefault(expert, set())
        spare = quota - 1 - moved
        open_places = [place for place in places if -place[1] not in taken] if taken else places
        if not open_places:
            return False
        per_row = self.placement.per_row(expert)
        kept = max(int((self.demand_G[source] - level) / per_row), 1)
        # Rows are whole, so that the estimate may be one or two short.
        while kept < spare and cost(rows_G[source] - load * kept // quota, kept_G[source] - kept) > level:
            kept += 1
        kept = min(kept, spare)
        wanted = cost(load * kept // quota, kept)
        at = bisect_left(open_places, (wanted, -len(rows_G))) if self.best_fit else -1
        place = open_places[at if at < len(open_places) else -1]
        target = -place[1]
        if place[0] < wanted:
            kept = min(kept, int(place[0] / per_row) + 1)
        while kept and cost(rows_G[target] + load * kept // quota, kept_G[target] + kept) > level:
            kept -= 1
        if kept == 0:
            return False
        rows = load * kept // quota
        self.exports.append((expert, target, rows, kept))
        self.moved_rows += rows
        self.moved_E[expert] = moved + kept
        taken.add(target)
        for rank, sign in ((source, -1), (target, 1)):
            rows_G[rank] += sign * rows
            kept_G[rank] += sign * kept
            self.demand_G[rank] = cost(rows_G[rank], kept_G[rank])
        del places[bisect_left(places, place)]
        self.free_G[target] -= 1
        if self.free_G[target] and self.demand_G[target] < level:
            insort(places, (level - self.demand_G[target], -target))
        return True


def export(
    placement: Placement, level: float, *, slots: int, best_fit: bool, order: Order, partial: bool = False
) -> Found | None:
    """One deterministic greedy pass: every rank above ``level`` exports until it is not.

    A rank exports from the expert that has most left to give: where slots are few, each should take much.

    Args:
        slots: replicas a rank may hold.
        best_fit: export to the rank with the *least* room that takes all that is needed, if one does; else, and
            without this, to the one with the most.
        order: of the ranks that export.
        partial: go on where a rank cannot get under the level, and return what was done.

    Returns:
        What was found, or None if a rank stays above the level and this is not ``partial``.
    """
    run = _Pass(placement, level, slots, best_fit)
    over = [r for r in range(len(run.demand_G)) if run.is_over(r)]
    room = sum(place[0] for place in run.places) * (1 + 1e-12)
    if not partial and sum(run.demand_G[r] for r in over) - level * len(over) > room:
        return None
    over.sort(key=lambda r: run.demand_G[r] if order == "smallest" else -run.demand_G[r])
    while over:
        source = over[0] if order != "fullest" else max(over, key=lambda r: (run.demand_G[r], -r))
        if not run.step(source):
            if not partial:
                return None
            over.remove(source)
        elif not run.is_over(source):
            over.remove(source)
    return Found(tuple(run.exports), tuple(run.demand_G), run.moved_rows)


def fewest(placement: Placement, level: float, slots: int, others: Iterable[Found] = ()) -> Found | None:
    """The best of all passes, and of ``others``, that brings every rank under ``level``; None if none does."""
    if sum(placement.demand_G) > level * len(placement.demand_G) * (1 + 1e-12):
        return None
    passes = [export(placement, level, slots=slots, best_fit=best_fit, order=order) for best_fit, order in _PASSES]
    fitting = [found for found in (*passes, *others) if found is not None and found.most <= level]
    return min(fitting, key=lambda found: found.rank_key, default=None)


def closest(placement: Placement, level: float, slots: int) -> Found:
    """The pass that leaves the least above ``level``, of those that differ most."""
    passes = []
    for best_fit, order in _PASSES[:3]:
        found = export(placement, level, slots=slots, best_fit=best_fit, order=order, partial=True)
        assert found is not None  # As a partial pass always returns.
        passes.append(found)
    return min(passes, key=lambda found: (found.excess(level), found.rank_key))


def least_level(placement: Placement, slots: int, *, relative: float = 0.0) -> float:
    """The least level that the passes reach; :func:`fewest` finds a plan at it.

    Args:
        slots: replicas a rank may hold.
        relative: how far above the least it may be, as a fraction of the mean; at best half the cost of one row.
    """

    def reached(level: float) -> float | None:
        for best_fit, order in _PASSES[:3]:
            found = export(placement, level, slots=slots, best_fit=best_fit, order=order)
            if found is not None:
                # Mostly the same pass gets as low with no room to spare; not always, as it is a greedy one.
                lower = export(placement, found.most, slots=slots, best_fit=best_fit, order=order)
                return level if lower is None else found.most
        return None

    low, high, level = placement.mean, placement.most, placement.mean
    step = max(placement.cost(1, 1) / 2, relative * placement.mean, high * 1e-9)
    while high > low:
        found = reached(level)
        if found is None:
            low = level
        else:
            high = min(high, found)
        if high - low <= step:
            break
        level = (low + high) / 2
    return high
