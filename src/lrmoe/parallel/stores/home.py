"""Experts at home, and copies of them on other ranks: weights out before they are computed with, gradients home after.

Every rank has the same number of slots, and all layers share them: a layer's replicas live from its forward to the next
layer's, and come again for its backward. They are no parameters: no optimizer, checkpoint, parameter count or gradient
norm knows of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.balance.plan import Plan, home_ranks
from lrmoe.experts.compacted import Bank
from lrmoe.parallel.dispatcher import Exchange
from lrmoe.parallel.layout import Layout, Shipping


@dataclass(frozen=True, slots=True)
class Replicas(Shipping):
    """``weights_out``: for each rank, which of this rank's experts (local index) it holds a replica of; ``weights_in``:
    for each rank, how many of this rank's replicas are at home there."""

    weights_out: list[list[int]]
    weights_in: list[int]


class HomeStore:
    """This rank's experts, ids ``first`` to ``first + count - 1``, and its replica slots.

    Attributes:
        bank: the weights last written into the slots, ascending by expert; None before.
    """

    def __init__(self, num_experts: int, num_ranks: int, rank: int) -> None:
        self._homes = home_ranks(num_experts, num_ranks)
        self._rank = rank
        self.experts = range(self._homes.index(rank), self._homes.index(rank) + self._homes.count(rank))
        self.bank: Bank | None = None
        self._filled_for: Layout | None = None

    def local(self, weight: Tensor) -> Tensor:
        """The rows of this rank's experts; a view."""
        return weight[self.experts.start : self.experts.stop]

    def num_owned(self, num_experts: int) -> int:
        """See :class:`~lrmoe.parallel.stores.weight_store.WeightStore`."""
        return len(self.experts)

    def as_experts(self, owned: Bank, width: int) -> Bank:
        """``owned``."""
        return owned

    def is_stale(self, layer: int, owned: Bank) -> bool:
        """Never: nothing is kept."""
        return False

    def arrange(self, plan: Plan, layer: int, stale: bool) -> tuple[Sequence[Sequence[int]], Shipping | None]:
        """The experts at home, then the replicas, ascending. See
        :class:`~lrmoe.parallel.stores.weight_store.WeightStore`."""
        num_ranks = plan.lam_GE.shape[0]
        replicas: list[list[int]] = [[] for _ in range(num_ranks)]
        for expert, ranks in enumerate(plan.hosts):
            for rank in ranks:
                # A rank that a policy gives no rows of its own expert computes none of them, and still owns it.
                if rank != self._homes[expert]:
                    replicas[rank].append(expert)
        own = replicas[self._rank]
        shipping = Replicas(
            [[e - self.experts.start for e in held if self._homes[e] == self._rank] for held in replicas],
            [sum(self._homes[e] == rank for e in own) for rank in range(num_ranks)],
        )
        banks = [list(self.experts), own] if own else [list(self.experts)]
        return banks, shipping if any(replicas) else None

    def gather(self, exchange: Exchange, layout: Layout, owned: Bank) -> Sequence[Bank]:
        """This rank's experts, and copies of others, bit for bit."""
        shipping = layout.shipping
        if shipping is None:
            return [owned]
        assert isinstance(shipping, Replicas)
        # Freed before, not after: two layers' replicas would need the memory twice.
        self.bank = self._filled_for = None
        self.bank = Bank(
            _copies(exchange, shipping, owned.gate_up_proj),
            _copies(exchange, shipping, owned.down_proj),
            None if owned.gate_up_bias is None else _copies(exchange, shipping, owned.gate_up_bias),
            None if owned.down_bias is None else _copies(exchange, shipping, owned.down_bias),
        )
        self._filled_for = layout
        # A rank without replicas sends all the same.
        return [owned, self.bank][: len(layout.banks)]

    def gather_again(self, exchange: Exchange, layout: Layout, owned: Bank) -> Sequence[Bank]:
        """The same for a backward: nothing is sent where the slots still hold what this layout's forward put there.

        All ranks fill their slots in the same order, so all of them send or none does. What they hold is up to date:
        autograd refuses a backward whose weights were changed after the forward.
        """
        if layout.shipping is not None and self.bank is not None and self._filled_for is layout:
            return [owned, self.bank][: len(layout.banks)]
        return self.gather(exchange, layout, owned)

    def reduce(self, exchange: Exchange, layout: Layout, owned: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """The home gradient with those of the replicas added, in ascending order of their ranks."""
        gradient, shipping = parts[0], layout.shipping
        if shipping is None:
            return gradient
        assert isinstance(shipping, Replicas)
        replicas = parts[1] if len(parts) > 1 else gradient.new_empty(0, *owned.shape[1:])
        counts = [len(experts) for experts in shipping.weights_out]
        arrived = exchange.all_to_all(replicas, shipping.weights_in, counts, "gradients of replicas home")
        experts = sorted({e for out in shipping.weights_out for e in out})
        if not experts:
            return gradient
        chosen = torch.tensor(experts, device=gradient.device)
        total = gradient.index_select(0, chosen).to(torch.promote_types(gradient.dtype, torch.float32))
        for out, part in zip(shipping.weights_out, torch.split(arrived, counts), strict=True):
            if out:
                place = torch.tensor([experts.index(e) for e in out], device=gradient.device)
                total.index_add_(0, place, part.to(total.dtype))
        return gradient.index_copy_(0, chosen, total.to(gradient.dtype))


def _copies(exchange: Exchange, shipping: Replicas, weight: Tensor) -> Tensor:
    """(slots in use, ...): one weight of this rank's replicas."""
    chosen = torch.tensor([e for experts in shipping.weights_out for e in experts], dtype=torch.int64, device="cpu")
    rows = weight.detach().index_select(0, chosen.to(weight.device))
    return exchange.all_to_all(
        rows, [len(experts) for experts in shipping.weights_out], shipping.weights_in, "weights to replicas"
    )
