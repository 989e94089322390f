"""FlexMoE (arXiv 2304.03946): slots change hands one at a time, while the ranks' loads are too uneven."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from torch import Tensor

from lrmoe.balance.ownership import HistoryPolicy, LayerHistory, Slots, add_step_loads, require_slots
from lrmoe.balance.plan import Ownership, home_ranks
from lrmoe.config import require_count, require_number
from lrmoe.evenness import max_over_mean


class FlexMoE(HistoryPolicy):
    """vExperts: every rank has a number of slots, an expert owns one or more of them anywhere, with optimizer state.

    After a step in which the largest load of a rank was above ``threshold`` times the mean, slots pass from the experts
    with the least load a slot to the one with the most, as long as that improves the estimated cost; see
    :func:`adjust`. Rows are shared evenly by the slots, sources on a rank with a slot first. Slots of one rank that
    hold the same expert share its weights.

    Complexity: a step looks at one candidate for each slot of the coldest experts, each in O(slots + G), at most
    ``max_changes`` times a layer; planning O(E G).
    Memory: weights, gradients *and optimizer state* of ``slots`` experts a rank in every layer, and while slots move
    the old and the new state of those at once.

    Known limits: one step late, and slots that move carry six to nine times the weights' bytes; not open source, so
    that some rules are restatements: the ties (all of the coldest experts are tried, and of equal costs the more even
    one wins), the order of local rows, the form of the cost.

    Args:
        slots: vExperts a rank holds, in total (not on top of its own); not published as a default.
        threshold: largest over mean load from which on slots move; not published.
        sync_cost: of adding up one expert's gradients over its ranks, at 2 (k - 1) / k for k ranks, in rows that could
            be computed in that time. Above 0, slots are also exchanged to spread experts over fewer ranks.
        max_changes: slots of a layer that may pass at one step.
        interval: steps between two looks at the loads.

    Raises:
        ValueError: if an option is out of range; from :meth:`prepare` or the first loads on, if there are fewer slots
            than experts, or a rank has fewer than it owns experts.
    """

    name = "flexmoe"
    ownership: Ownership = "placed"

    def __init__(
        self,
        *,
        slots: int = 2,
        threshold: float = 1.1,
        sync_cost: float = 0.0,
        max_changes: int = 10,
        interval: int = 1,
    ) -> None:
        super().__init__()
        self.slots = require_count("slots", slots, least=1)
        self.threshold = _require("threshold", threshold, 1.0)
        self.sync_cost = _require("sync_cost", sync_cost, 0.0)
        self.max_changes = require_count("max_changes", max_changes)
        self.interval = require_count("interval", interval, least=1)

    def _check(self, num_experts: int, num_ranks: int) -> None:
        require_slots(self.name, self.slots, num_experts, num_ranks)

    def _initial(self, num_experts: int, num_ranks: int) -> Slots:
        """Every rank's own experts, then those with the fewest slots so far that it does not have, the lowest first."""
        homes = home_ranks(num_experts, num_ranks)
        placement = [[e for e, home in enumerate(homes) if home == rank] for rank in range(num_ranks)]
        count_E = [1] * num_experts
        for held in placement:
            while len(held) < self.slots:
                expert = min(range(num_experts), key=lambda e: (e in held, count_E[e], e))
                held.append(expert)
                count_E[expert] += 1
        return tuple(map(tuple, placement))

    def _remember(self, history: LayerHistory, lam_GE: Tensor) -> None:
        add_step_loads(history, lam_GE)

    def _decide(self, history: LayerHistory) -> Slots | None:
        if self._steps % self.interval or not history.observed:
            return None
        return adjust(
            history.loads[0].tolist(),
            history.placement,
            threshold=self.threshold,
            sync_cost=self.sync_cost,
            max_changes=self.max_changes,
        )


def adjust(
    load_E: Sequence[int],
    placement: Slots,
    *,
    threshold: float = 1.0,
    sync_cost: float = 0.0,
    max_changes: int | None = None,
) -> Slots:
    """The placement after the changes that pay for these loads; a slot that changes keeps its place.

    While the largest load is above ``threshold`` times the mean: the expert with the most load a slot gets one slot of
    the experts with the least (of those that have two), the one where the largest cost of a rank, and among equals the
    sum of the costs' squares, becomes the least. The first change that does not lower them ends it. Then, if gradients
    have a cost, pairs of slots are exchanged while that lowers their cost and no rank's largest.
    """
    state = _State(load_E, placement, sync_cost)
    changes = 0
    while state.imbalance() > threshold and (max_changes is None or changes < max_changes):
        found = _best(state, _expansions(state))
        if found is None or found[0] >= state.key():
            break
        state.swap(found[1])
        changes += 1
    while state.sync_cost and (max_changes is None or changes < max_changes):
        before = state.sync_total()
        found = _best(state, _migrations(state), below=before)
        if found is None or found[0][0] > state.key()[0]:
            break
        state.swap(found[1])
        changes += 1
    return tuple(map(tuple, state.held))


_Swap = tuple[tuple[int, int, int], ...]
"""Slots that get another expert: (rank, slot, expert)."""


class _State:
    """A placement and its cost, in exact fractions: rounding would decide between equal candidates."""

    def __init__(self, load_E: Sequence[int], placement: Slots, sync_cost: float) -> None:
        self.load_E, self.sync_cost = load_E, Fraction(sync_cost)
        self.held = [list(slots) for slots in placement]
        self.count_E = [0] * len(load_E)
        self.ranks_E: list[dict[int, int]] = [{} for _ in load_E]
        for rank, slots in enumerate(self.held):
            for expert in slots:
                self._add(expert, rank, 1)
        self.cost_G = [self._cost(rank) for rank in range(len(self.held))]

    def share(self, expert: int) -> Fraction:
        """Load of a slot of this expert."""
        return Fraction(self.load_E[expert], self.count_E[expert])

    def imbalance(self) -> float:
        """Largest over mean load of a rank; 1 without load."""
        return max_over_mean([sum(map(self.share, slots), Fraction(0)) for slots in self.held]) or 1.0

    def key(self) -> tuple[Fraction, Fraction]:
        """The smaller the better."""
        return max(self.cost_G), sum((cost * cost for cost in self.cost_G), Fraction(0))

    def sync_total(self) -> Fraction:
        """Cost of all experts' gradients together."""
        return sum((self._sync(expert) * len(ranks) for expert, ranks in enumerate(self.ranks_E)), Fraction(0))

    def swap(self, changes: _Swap) -> None:
        """Gives slots to other experts."""
        touched: set[int] = set()
        for rank, slot, expert in changes:
            old = self.held[rank][slot]
            touched |= {rank, *self.ranks_E[old], *self.ranks_E[expert]}
            self.held[rank][slot] = expert
            self._add(old, rank, -1)
            self._add(expert, rank, 1)
        for rank in touched:
            self.cost_G[rank] = self._cost(rank)

    @contextmanager
    def swapped(self, changes: _Swap) -> Iterator[None]:
        """As :meth:`swap`, and back."""
        costs = list(self.cost_G)
        back = tuple((rank, slot, self.held[rank][slot]) for rank, slot, _ in changes)
        self.swap(changes)
        yield
        for rank, slot, expert in back:
            self._add(self.held[rank][slot], rank, -1)
            self._add(expert, rank, 1)
            self.held[rank][slot] = expert
        self.cost_G = costs

    def _add(self, expert: int, rank: int, slots: int) -> None:
        self.count_E[expert] += slots
        ranks = self.ranks_E[expert]
        ranks[rank] = ranks.get(rank, 0) + slots
        if not ranks[rank]:
            del ranks[rank]

    def _sync(self, expert: int) -> Fraction:
        ranks = len(self.ranks_E[expert])
        return self.sync_cost * Fraction(2 * (ranks - 1), ranks)

    def _cost(self, rank: int) -> Fraction:
        slots = self.held[rank]
        cost = sum(map(self.share, slots), Fraction(0))
        return cost + sum(map(self._sync, set(slots)), Fraction(0)) if self.sync_cost else cost


def _expansions(state: _State) -> Iterator[_Swap]:
    """A slot of each of the coldest experts, on each of its ranks, for the hottest."""
    experts = range(len(state.load_E))
    hot = max(experts, key=lambda e: (state.share(e), -e))
    shrinkable = [e for e in experts if state.count_E[e] > 1 and e != hot]
    coldest = min(map(state.share, shrinkable), default=None)
    for cold in [e for e in shrinkable if state.share(e) == coldest]:
        for rank in sorted(state.ranks_E[cold]):
            yield ((rank, state.held[rank].index(cold), hot),)


def _migrations(state: _State) -> Iterator[_Swap]:
    """Each exchange of two slots that brings an expert of several ranks to fewer of them."""
    for expert, ranks in enumerate(state.ranks_E):
        for source in sorted(rank for rank, slots in ranks.items() if slots == 1 and len(ranks) > 1):
            slot = state.held[source].index(expert)
            for target in sorted(set(ranks) - {source}):
                for other_slot, other in enumerate(state.held[target]):
                    if other != expert:
                        yield (source, slot, other), (target, other_slot, expert)


def _best(
    state: _State, candidates: Iterable[_Swap], below: Fraction | None = None
) -> tuple[tuple[Fraction, Fraction], _Swap] | None:
    """The candidate of least key, the first among equals; with ``below``, of those with less cost of gradients."""
    best = None
    for changes in list(candidates):
        with state.swapped(changes):
            key = state.key()
            if below is not None and state.sync_total() >= below:
                continue
        if best is None or key < best[0]:
            best = key, changes
    return best


def _require(field: str, value: float, least: float) -> float:
    number = require_number(field, value)
    if not least <= number < math.inf:
        raise ValueError(f"{field}={value!r} must be >= {least:g} and finite")
    return number
