"""EPLB (github.com/deepseek-ai/EPLB): from time to time, replicas of the hottest experts, packed over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush, heapreplace

from torch import Tensor

from lrmoe.balance.ownership import HistoryPolicy, LayerHistory, Slots
from lrmoe.balance.plan import Ownership, home_ranks
from lrmoe.config import require_count


class EPLB(HistoryPolicy):
    """Every ``interval`` steps: redundant slots for the experts with most load a copy, then all copies packed.

    Made for serving, where it is given a moving average of loads; here that of the steps since it last decided. Rows
    are shared evenly by the copies. In training the experts live at home, and the copies are made for each forward from
    there; until the first decision every expert is at home alone.

    Complexity: O(E G) a layer every ``interval`` steps, with the slots in proportion to the experts; planning O(E G).
    Memory: weights and gradients of up to ``ceil(E / G) + slots`` copies a rank, beside its own experts.

    Known limits: as late as ``interval`` steps; its authors say that they did not train with it. Two copies of an
    expert may lie on one rank, where they are worth no more than one. Nothing keeps an expert's copy at its home, so
    that weights travel even under even loads.

    Args:
        slots: redundant copies a rank may hold, on top of ``ceil(E / G)``.
        interval: steps between two decisions; not published for training.
        groups: of experts, for the hierarchical policy: groups are packed on nodes, and copies stay on their node.
        nodes: of ranks, likewise; with 1 the policy is the global one.

    Raises:
        ValueError: if an option is out of range; from :meth:`prepare` or the first loads on, if groups or nodes do not
            divide the experts or ranks.
    """

    name = "eplb"
    ownership: Ownership = "home"

    def __init__(self, *, slots: int = 1, interval: int = 10, groups: int = 1, nodes: int = 1) -> None:
        super().__init__()
        self.redundant = require_count("slots", slots)
        self.slots = self.redundant  # All a rank may hold; known from `prepare` on.
        self.interval = require_count("interval", interval, least=1)
        self.groups = require_count("groups", groups, least=1)
        self.nodes = require_count("nodes", nodes, least=1)
        if self.groups % self.nodes:
            raise ValueError(f"groups={groups} must be a multiple of nodes={nodes}: every node gets as many groups")

    def _check(self, num_experts: int, num_ranks: int) -> None:
        for name, parts, whole, what in (
            ("groups", self.groups, num_experts, "experts"),
            ("nodes", self.nodes, num_ranks, "ranks"),
        ):
            if whole % parts:
                raise ValueError(f"{name}={parts} does not divide the {whole} {what}; set {name} to a divisor of them")
        self.slots = -(-num_experts // num_ranks) + self.redundant

    def _initial(self, num_experts: int, num_ranks: int) -> Slots:
        homes = home_ranks(num_experts, num_ranks)
        line = [[e for e, home in enumerate(homes) if home == rank] for rank in range(num_ranks)]
        # Slots that are not in use hold one more copy of the rank's first expert, which asks for nothing.
        return tuple((*own, *[own[0]] * (self.slots - len(own))) for own in line)

    def _remember(self, history: LayerHistory, lam_GE: Tensor) -> None:
        load_E = lam_GE.sum(0)
        history.loads = [history.loads[0] + load_E if history.loads else load_E]

    def _decide(self, history: LayerHistory) -> Slots | None:
        if self._steps % self.interval or not history.loads:
            return None
        load_E = history.loads.pop().tolist()
        num_ranks = len(history.placement)
        return rebalance(load_E, num_ranks * self.slots, num_ranks, groups=self.groups, nodes=self.nodes)


def rebalance(load_E: Sequence[int], copies: int, num_ranks: int, *, groups: int = 1, nodes: int = 1) -> Slots:
    """``copies`` of the experts on the ranks, as many on each: groups to nodes, copies on each node, copies to ranks.

    Args:
        load_E: of each expert, of late.
        copies: in total, at least as many as experts; a multiple of ``num_ranks``.
        groups, nodes: 1 for the global policy.
    """
    size = len(load_E) // groups
    group_loads = [Fraction(sum(load_E[g * size : (g + 1) * size])) for g in range(groups)]
    placement: list[tuple[int, ...]] = []
    for packed in pack(group_loads, nodes):
        experts = [g * size + i for g in packed for i in range(size)]
        loads = [load_E[expert] for expert in experts]
        owner, shares = replicate(loads, copies // nodes)
        placement += [tuple(experts[owner[copy]] for copy in held) for held in pack(shares, num_ranks // nodes)]
    return tuple(placement)


def replicate(loads: Sequence[int], copies: int) -> tuple[list[int], list[Fraction]]:
    """The expert of each copy, and its share of that expert's load.

    One copy of each, then one more of whichever has the most load a copy, lower first among equals.
    """
    owner, counts = list(range(len(loads))), [1] * len(loads)
    queue = [(Fraction(-load), expert) for expert, load in enumerate(loads)]
    heapify(queue)
    for _ in range(copies - len(loads)):
        _, most = queue[0]
        owner.append(most)
        counts[most] += 1
        heapreplace(queue, (Fraction(-loads[most], counts[most]), most))
    return owner, [Fraction(loads[expert], counts[expert]) for expert in owner]


def pack(weights: Sequence[Fraction], num_packs: int) -> list[list[int]]:
    """The items in each pack, as many in each: heaviest first, each to the lightest pack with room."""
    room = len(weights) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    queue = [(Fraction(0), number) for number in range(num_packs)]
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        weight, lightest = heappop(queue)
        packs[lightest].append(item)
        if len(packs[lightest]) < room:
            heappush(queue, (weight + weights[item], lightest))
    return packs
