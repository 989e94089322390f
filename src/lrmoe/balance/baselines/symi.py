"""SYMI (arXiv 2504.19925): as many slots for each expert as its popularity of the step before deserves."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from torch import Tensor

from lrmoe.balance.ownership import HistoryPolicy, LayerHistory, Slots, add_step_loads, require_slots
from lrmoe.balance.plan import Ownership
from lrmoe.config import require_count


class SYMI(HistoryPolicy):
    """Every slot of every rank is given anew at every step, in proportion to the loads of the step before.

    Optimizer state is decoupled from the slots: each rank owns 1/G of every expert, and sends its part of the weights
    to all slots after each step, whoever is in them, so that a new placement costs nothing extra.

    Complexity: O(slots G) a layer and step; planning O(E G).
    Memory: weights and gradients of ``slots`` experts a rank *in every layer*, 1/G of all optimizer state.

    Known limits: it is one step late, so that a hot spot that moves every step gets its slots when it is gone; every
    expert needs a slot, which with about as many experts as slots leaves nothing to give away; equal shares a slot,
    in whole ranks, do not level the ranks (a load of 1.2 times the mean is common). The paper drops forward pairs above
    a slot's capacity; here every row is computed.

    Args:
        slots: experts a rank holds, in total (not on top of its own). The paper's setting has 4 (16 experts, 16 GPUs).

    Raises:
        ValueError: if an option is out of range; from :meth:`prepare` or the first loads on, if there are fewer slots
            than experts.
    """

    name = "symi"
    ownership: Ownership = "sharded"
    # The slots' weights stay from one optimizer step to the next, in every layer.
    holds_weights = True

    def __init__(self, *, slots: int = 4) -> None:
        super().__init__()
        self.slots = require_count("slots", slots, least=1)

    def _check(self, num_experts: int, num_ranks: int) -> None:
        require_slots(self.name, self.slots, num_experts, num_ranks)

    def _initial(self, num_experts: int, num_ranks: int) -> Slots:
        return place(slot_shares([1] * num_experts, self.slots * num_ranks), self.slots)

    def _remember(self, history: LayerHistory, lam_GE: Tensor) -> None:
        add_step_loads(history, lam_GE)

    def _decide(self, history: LayerHistory) -> Slots | None:
        if not history.observed:
            return None
        total = self.slots * len(history.placement)
        return place(slot_shares(history.loads[0].tolist(), total), self.slots)


def slot_shares(popularity_E: Sequence[int], total: int) -> list[int]:
    """How many of ``total`` slots each expert gets: at least one, else its share of the popularity.

    Shares are rounded down, then slots taken from whoever with more than one is furthest above its share, or given to
    who is furthest below (lower expert first among equals). In whole numbers: what is compared are slots times the
    popularity of all. Without any popularity all are alike.
    """
    whole = sum(popularity_E)
    if whole == 0:
        popularity_E, whole = [1] * len(popularity_E), len(popularity_E)
    goal_E = [popularity * total for popularity in popularity_E]
    count_E = [max(goal // whole, 1) for goal in goal_E]
    spare = sum(count_E) - total
    # Of those with one slot the paper's loop takes none either: it passes them over.
    sign = -1 if spare > 0 else 1
    queue = [
        (sign * (count * whole - goal), expert)
        for expert, (count, goal) in enumerate(zip(count_E, goal_E, strict=True))
        if spare < 0 or count > 1
    ]
    heapify(queue)
    for _ in range(abs(spare)):
        distance, expert = heappop(queue)
        count_E[expert] += sign
        if spare < 0 or count_E[expert] > 1:
            heappush(queue, (distance + whole, expert))
    return count_E


def place(count_E: Sequence[int], slots: int) -> Slots:
    """The experts' slots one after another, cut into ranks of ``slots``."""
    line = [expert for expert, count in enumerate(count_E) for _ in range(count)]
    return tuple(tuple(line[at : at + slots]) for at in range(0, len(line), slots))
