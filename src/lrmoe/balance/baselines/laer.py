"""LAER-MoE (arXiv 2602.11686): all experts sharded over all ranks, and a new layout of the slots at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from lrmoe.balance.ownership import HistoryPolicy, LayerHistory, Slots, require_slots, slot_counts
from lrmoe.balance.plan import Ownership
from lrmoe.config import require_count, require_number


class LAER(HistoryPolicy):
    """Slots laid out by the loads of the last ``history`` microbatches, the layout of least modelled cost.

    Each rank owns 1/G of every expert, weights, gradients and optimizer state. Around each layer the slots' weights are
    gathered, and their gradients sent back, ``slots`` experts a rank whatever the layout, so that a new one costs
    nothing extra. Rows go to the slots on their source's node, evenly, or to all where there is none.

    Complexity: O(S log E + S G) for S = slots G slots and each of two candidates, a layer and step; planning O(E G^2).
    Memory: weights of ``slots`` experts a rank, and their gradients, for one layer at a time; 1/G of everything else.
    The state holds ``history`` matrices (G, E) a layer.

    Known limits: made for few, large experts (at most 32); the gathered weights have to hide behind the computation.
    About one step late. Where an expert has fewer copies than nodes, rows leave their node.

    Args:
        slots: C, experts a rank gathers, in total (not on top of its own); not published as a default.
        node_size: ranks a node; the published code has 8. With fewer ranks there is one node.
        history: microbatches whose loads are added up (5 there).
        token_bytes: of a row on the wire, 2 D in bf16.
        token_ms: time to compute a row.
        intra, inter: bytes/s within a node and between nodes. These three are the published profile's.
        recompute: the forward runs twice (activation checkpointing).

    Raises:
        ValueError: if an option is out of range; from :meth:`prepare` or the first loads on, if there are fewer slots
            than experts, or the nodes are not full.
    """

    name = "laer"
    ownership: Ownership = "sharded"

    def __init__(
        self,
        *,
        slots: int = 2,
        node_size: int = 8,
        history: int = 5,
        token_bytes: float = 8192,
        token_ms: float = 1.48e-3,
        intra: float = 216e9,
        inter: float = 89e9,
        recompute: bool = True,
    ) -> None:
        super().__init__()
        self.slots = require_count("slots", slots, least=1)
        self.node_size = require_count("node_size", node_size, least=1)
        self.history = require_count("history", history, least=1)
        if not isinstance(recompute, bool):
            raise ValueError(f"recompute={recompute!r} must be True or False")
        self.token_bytes, self.token_ms, self.intra, self.inter = (
            _require_positive(field, value)
            for field, value in (
                ("token_bytes", token_bytes),
                ("token_ms", token_ms),
                ("intra", intra),
                ("inter", inter),
            )
        )
        self.recompute = recompute

    def _check(self, num_experts: int, num_ranks: int) -> None:
        require_slots(self.name, self.slots, num_experts, num_ranks)
        if num_ranks > self.node_size and num_ranks % self.node_size:
            raise ValueError(
                f"{num_ranks} ranks do not fill nodes of node_size={self.node_size}; set node_size to a divisor of them"
            )

    def _initial(self, num_experts: int, num_ranks: int) -> Slots:
        even = torch.ones(num_ranks, num_experts, dtype=torch.int64, device="cpu")
        return self.layout(even)

    def _remember(self, history: LayerHistory, lam_GE: Tensor) -> None:
        history.loads = [*history.loads, lam_GE][-self.history :]

    def _decide(self, history: LayerHistory) -> Slots | None:
        return self.layout(torch.stack(history.loads).sum(0)) if history.observed else None

    def _route(self, lam_GE: Tensor, slots_EG: Tensor) -> tuple[Tensor, Callable[[], Tensor] | None]:
        route = partial(lite_route, lam_GE, slots_EG, self.node_size)
        return route().sum(0), route

    def layout(self, lam_GE: Tensor) -> Slots:
        """The candidate of least cost for these loads: replicas by load, or, where it goes up, as many of each."""
        num_ranks, num_experts = lam_GE.shape
        nodes = -(-num_ranks // self.node_size)
        load_E = lam_GE.sum(0).tolist()
        total = num_ranks * self.slots
        candidates = [replicas_by_load(load_E, total, nodes)]
        if total % num_experts == 0:
            candidates.append([total // num_experts] * num_experts)
        layouts = [place(load_E, counts, num_ranks, self.slots, self.node_size) for counts in candidates]
        return min(layouts, key=lambda layout: self.cost(lam_GE, layout))

    def cost(self, lam_GE: Tensor, layout: Slots) -> float:
        """Seconds of a layer, forward and backward: four transfers of all remote rows, and the fullest rank's work."""
        slots_EG = slot_counts(layout, lam_GE.shape[1])
        routed_GEG = lite_route(lam_GE, slots_EG, self.node_size)
        sent_GG = routed_GEG.sum(1)
        node_G = torch.arange(len(layout), device="cpu") // self.node_size
        near_GG = node_G.unsqueeze(1) == node_G
        near = int(sent_GG[near_GG].sum()) - int(sent_GG.diagonal().sum())
        far = int(sent_GG[~near_GG].sum())
        transfer = self.token_bytes * (near / self.intra + far / self.inter)
        return 4 * transfer + (3 + self.recompute) * 1e-3 * self.token_ms * int(sent_GG.sum(0).max())


def replicas_by_load(load_E: Sequence[int], total: int, nodes: int) -> list[int]:
    """How many of ``total`` slots each expert gets, by a queue of the load a copy.

    One copy a node of each expert where that many slots exist, else one copy. Then the expert with the most load a copy
    gets ``nodes`` more if it has as many, else one (lower expert first among equals), until all slots are given. An
    expert whose ``nodes`` more do not fit is passed over.
    """
    count_E = [nodes if nodes * len(load_E) <= total else 1] * len(load_E)
    left = total - sum(count_E)
    queue = [(-load / count, expert) for expert, (load, count) in enumerate(zip(load_E, count_E, strict=True))]
    heapify(queue)
    while left and queue:
        _, expert = heappop(queue)
        more = nodes if count_E[expert] >= nodes else 1
        if more <= left:
            count_E[expert] += more
            left -= more
            heappush(queue, (-load_E[expert] / count_E[expert], expert))
    return count_E


def place(load_E: Sequence[int], count_E: Sequence[int], num_ranks: int, slots: int, node_size: int) -> Slots:
    """Copies by their share of the load, largest first, each to a rank with a free slot.

    On the nodes with the fewest copies of the expert, the least loaded rank, the lowest among equals.
    """
    nodes = -(-num_ranks // node_size)
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    load_G = [0.0] * num_ranks
    open_nodes = [list(range(n * node_size, min((n + 1) * node_size, num_ranks))) for n in range(nodes)]
    for expert in sorted(range(len(load_E)), key=lambda e: (-load_E[e] / count_E[e], e)):
        share = load_E[expert] / count_E[expert]
        copies_N = [0] * nodes
        for _ in range(count_E[expert]):
            fewest = min(copies_N[n] for n in range(nodes) if open_nodes[n])
            ranks = [r for n in range(nodes) if open_nodes[n] and copies_N[n] == fewest for r in open_nodes[n]]
            rank = min(ranks, key=load_G.__getitem__)
            node = rank // node_size
            held[rank].append(expert)
            load_G[rank] += share
            copies_N[node] += 1
            if len(held[rank]) == slots:
                open_nodes[node].remove(rank)
    return tuple(map(tuple, held))


def lite_route(lam_GE: Tensor, slots_EG: Tensor, node_size: int) -> Tensor:
    """int64 (G, E, G): where each source's rows go: evenly to the expert's slots on its node, else to all.

    Every slot gets the floor of the share, and the first slots in rank order one row more until none is left. All nodes
    are full, or there is only one.
    """
    num_ranks, num_experts = lam_GE.shape
    nodes = -(-num_ranks // node_size)
    node_G = torch.arange(num_ranks, device="cpu") // node_size
    near_N1G = (torch.arange(nodes, device="cpu").unsqueeze(1) == node_G).unsqueeze(1)
    open_NEG = slots_EG * near_N1G
    open_NEG = torch.where(open_NEG.any(2, keepdim=True), open_NEG, slots_EG)
    upto_NEG = open_NEG.cumsum(2)
    # Of a node all sources (S) see the same slots. Few passes, as the last table is large.
    lam_NSE = lam_GE.reshape(nodes, num_ranks // nodes, num_experts)
    total_N1E = upto_NEG[:, :, -1].unsqueeze(1)
    open_N1EG = open_NEG.unsqueeze(1)
    routed_NSEG = (lam_NSE % total_N1E).unsqueeze(3) - (upto_NEG - open_NEG).unsqueeze(1)
    torch.minimum(routed_NSEG.clamp_(min=0), open_N1EG, out=routed_NSEG)
    routed_NSEG.addcmul_(open_N1EG, (lam_NSE // total_N1E).unsqueeze(3))
    return routed_NSEG.view(num_ranks, num_experts, num_ranks)


def _require_positive(field: str, value: float) -> float:
    number = require_number(field, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{field}={value!r} must be positive and finite")
    return number
