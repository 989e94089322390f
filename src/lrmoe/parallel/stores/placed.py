"""Experts where a policy has put them: every rank owns what its slots hold, weights and optimizer state.

An expert may sit in slots of several ranks, or twice on one. All its slots get the same gradient, summed over them, so
that the same optimizer keeps them equal; at the end of a step the policy may fill slots anew (:func:`move`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.balance.ownership import Move, Slots
from lrmoe.balance.plan import Plan
from lrmoe.experts.compacted import Bank
from lrmoe.parallel.dispatcher import Exchange
from lrmoe.parallel.layout import Layout, Shipping


@dataclass(frozen=True, slots=True)
class Shared(Shipping):
    """The experts in several slots. ``to_first``: for each rank, this rank's slots whose expert has its first slot
    there (one slot a rank and expert); ``from_ranks``: for each rank, this rank's slots that it sends a share for;
    ``twins``: (slot, first slot) of this rank's further slots with an expert it has already."""

    to_first: list[list[int]]
    from_ranks: list[list[int]]
    twins: list[tuple[int, int]]


class PlacedStore:
    """This rank's slots.

    Args:
        placement: of a layer, in force; the expert in each slot of each rank.
        rank: of this process.
    """

    def __init__(self, placement: Callable[[int], Slots], rank: int) -> None:
        self._placement = placement
        self._rank = rank

    def local(self, weight: Tensor) -> Tensor:
        """The rows of the experts that this rank's slots hold at first; a copy."""
        return weight[torch.tensor(self._placement(0)[self._rank], device=weight.device)]

    def num_owned(self, num_experts: int) -> int:
        """See :class:`~lrmoe.parallel.stores.weight_store.WeightStore`."""
        return len(self._placement(0)[self._rank])

    def as_experts(self, owned: Bank, width: int) -> Bank:
        """``owned``: a slot holds a whole expert."""
        return owned

    def is_stale(self, layer: int, owned: Bank) -> bool:
        """Never: nothing is kept."""
        return False

    def arrange(self, plan: Plan, layer: int, stale: bool) -> tuple[Sequence[Sequence[int]], Shipping | None]:
        """One bank, in slot order."""
        placement = self._placement(layer)
        return [placement[self._rank]], _shared(placement, self._rank)

    def gather(self, exchange: Exchange, layout: Layout, owned: Bank) -> Sequence[Bank]:
        """What is owned; nothing is sent."""
        return [owned]

    def gather_again(self, exchange: Exchange, layout: Layout, owned: Bank) -> Sequence[Bank]:
        """What is owned; nothing is sent."""
        return [owned]

    def reduce(self, exchange: Exchange, layout: Layout, owned: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Each slot's gradient: the sum over all slots of its expert, added in ascending order of rank."""
        gradient, shipping = parts[0], layout.shipping
        if shipping is None:
            return gradient
        assert isinstance(shipping, Shared)
        out, back = shipping.to_first, shipping.from_ranks
        out_sizes, back_sizes = [len(slots) for slots in out], [len(slots) for slots in back]
        device = gradient.device
        going = torch.tensor([slot for slots in out for slot in slots], dtype=torch.int64, device=device)
        coming = torch.tensor([slot for slots in back for slot in slots], dtype=torch.int64, device=device)
        what = "gradients between slots"
        arrived = exchange.all_to_all(gradient.index_select(0, going), out_sizes, back_sizes, what)
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        at = 0
        # A rank's share of an expert arrives once, so that no place comes twice in one addition.
        for slots in back:
            place = coming[at : at + len(slots)]
            total.index_add_(0, place, arrived[at : at + len(slots)].to(total.dtype))
            at += len(slots)
        summed = total.to(gradient.dtype)
        returned = exchange.all_to_all(summed.index_select(0, coming), back_sizes, out_sizes, what)
        summed.index_copy_(0, going, returned)
        for slot, first in shipping.twins:
            summed[slot] = summed[first]
        return summed


def move(exchange: Exchange, rank: int, moves: Sequence[Move], tensors: Sequence[Tensor]) -> None:
    """Fills slots anew, in place: all of a layer's ``moves``, for each of its tensors (weights and optimizer state).

    Every rank has to call it with the same moves and its tensors in the same order.

    Args:
        moves: of one layer; all read what was there before any of them.
        tensors: (slots, ...) each.
    """
    size = exchange.group.size()
    # In the order of the moves on both sides, so that nothing has to say which row is which.
    out = [[m.source_slot for m in moves if m.source_rank == rank and m.target_rank == other] for other in range(size)]
    into = [[m.target_slot for m in moves if m.target_rank == rank and m.source_rank == other] for other in range(size)]
    for tensor in tensors:
        going = torch.tensor([slot for slots in out for slot in slots], dtype=torch.int64, device=tensor.device)
        coming = torch.tensor([slot for slots in into for slot in slots], dtype=torch.int64, device=tensor.device)
        rows = tensor.detach().index_select(0, going)
        sizes = [len(slots) for slots in out], [len(slots) for slots in into]
        arrived = exchange.all_to_all(rows, *sizes, "experts to new slots")
        tensor.detach().index_copy_(0, coming, arrived)


def counted_slots(placement: Slots, rank: int) -> list[bool]:
    """Which of this rank's slots are the first of their expert on any rank: those a norm has to count."""
    seen = {expert for slots in placement[:rank] for expert in slots}
    counted = []
    for expert in placement[rank]:
        counted.append(expert not in seen)
        seen.add(expert)
    return counted


def _shared(placement: Slots, rank: int) -> Shared | None:
    if sum(map(len, placement)) == len({expert for slots in placement for expert in slots}):
        return None
    size = len(placement)
    first_rank: dict[int, int] = {}
    for other, slots in enumerate(placement):
        for expert in slots:
            first_rank.setdefault(expert, other)
    own = placement[rank]
    slot_of = {expert: own.index(expert) for expert in own}
    twins = [(slot, own.index(expert)) for slot, expert in enumerate(own) if own.index(expert) != slot]
    return Shared(
        [[slot_of[e] for e in sorted(slot_of) if first_rank[e] == other != rank] for other in range(size)],
        [
            [slot_of[e] for e in sorted(set(placement[other])) if first_rank[e] == rank] if other != rank else []
            for other in range(size)
        ],
        twins,
    )
