"""SmartMoE (USENIX ATC'23), its online part: every so many steps, the experts are dealt out anew over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lrmoe.balance.ownership import HistoryPolicy, LayerHistory, Slots
from lrmoe.balance.plan import Ownership, home_ranks
from lrmoe.config import require_count


class SmartMoE(HistoryPolicy):
    """A permutation of the experts over the ranks, no replicas; weights and optimizer state move for good.

    Every ``interval`` steps: experts by their load of late, largest first, each to the rank with the least load so far
    and a free slot. Adopted only if the largest load of a rank falls. The loads are those of the first microbatch of
    the last ``history`` steps.

    Complexity: O(E log E + E G) a layer every ``interval`` steps; planning O(E G).
    Memory: none beyond a buffer for each expert that moves.

    Known limits: of no help where one expert alone has more than the mean load, or a rank has one expert; a placement
    that was right for the last steps may be wrong for this microbatch. The paper's offline choice among pools of
    parallel strategies, and its optimal placement by dynamic programming in exponential time, are not here.

    Args:
        interval: steps between two decisions (10 in the published experiments).
        history: steps whose loads are added up (2 there).

    Raises:
        ValueError: if an option is out of range.
    """

    name = "smartmoe"
    ownership: Ownership = "placed"

    def __init__(self, *, interval: int = 10, history: int = 2) -> None:
        super().__init__()
        self.slots = 0  # The experts a rank owns; known from `prepare` on.
        self.interval = require_count("interval", interval, least=1)
        self.history = require_count("history", history, least=1)

    def _check(self, num_experts: int, num_ranks: int) -> None:
        self.slots = -(-num_experts // num_ranks)

    def _initial(self, num_experts: int, num_ranks: int) -> Slots:
        homes = home_ranks(num_experts, num_ranks)
        return tuple(tuple(e for e, home in enumerate(homes) if home == rank) for rank in range(num_ranks))

    def _remember(self, history: LayerHistory, lam_GE: Tensor) -> None:
        if history.observed == 0:
            history.loads = [*history.loads, lam_GE.sum(0)][-self.history :]

    def _decide(self, history: LayerHistory) -> Slots | None:
        if self._steps % self.interval or not history.loads:
            return None
        load_E = torch.stack(history.loads).sum(0).tolist()
        new = deal(load_E, history.placement)
        return new if _most(load_E, new) < _most(load_E, history.placement) else None


def deal(load_E: Sequence[int], current: Slots) -> Slots:
    """The greedy placement: as many experts on every rank as now, and whoever stays keeps its slot.

    Among the least loaded ranks an expert stays where it is, else goes to the lowest.
    """
    rank_E = {expert: rank for rank, slots in enumerate(current) for expert in slots}
    load_G, free_G = [0] * len(current), [len(slots) for slots in current]
    chosen: list[set[int]] = [set() for _ in current]
    for expert in sorted(rank_E, key=lambda e: (-load_E[e], e)):
        open_ranks = [rank for rank, free in enumerate(free_G) if free]
        rank = min(open_ranks, key=lambda r: (load_G[r], r != rank_E[expert], r))
        chosen[rank].add(expert)
        load_G[rank] += load_E[expert]
        free_G[rank] -= 1
    placement = []
    for slots, experts in zip(current, chosen, strict=True):
        newcomers = iter(sorted(experts - set(slots)))
        placement.append(tuple(expert if expert in experts else next(newcomers) for expert in slots))
    return tuple(placement)


def _most(load_E: Sequence[int], placement: Slots) -> int:
    return max(sum(load_E[expert] for expert in slots) for slots in placement)
