"""Copies of experts on other ranks: weights out before they are computed with, gradients home after.

Every rank has the same number of slots, and all layers share them: a layer's replicas live from its forward to the next
layer's, and come again for its backward. They are no parameters: no optimizer, checkpoint, parameter count or gradient
norm knows of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.experts.compacted import Bank
from lrmoe.parallel.layout import Layout
from lrmoe.parallel.transport import Line


class ReplicaSlots:
    """This rank's slots.

    Attributes:
        bank: the weights that were last written into them, ascending by expert; None before.
    """

    def __init__(self) -> None:
        self.bank: Bank | None = None
        self._filled_for: Layout | None = None

    def fill(self, line: Line, layout: Layout, home: Bank) -> Bank:
        """The weights of ``layout``'s replicas, copied bit for bit from their homes. Every rank has to call it.

        Args:
            home: this rank's experts, of which others may hold replicas.
        """
        # Freed before, not after: two layers' replicas would need the memory twice.
        self.bank = self._filled_for = None
        self.bank = Bank(
            _copies(line, layout, home.gate_up_proj, "weights to replicas"),
            _copies(line, layout, home.down_proj, "weights to replicas"),
            None if home.gate_up_bias is None else _copies(line, layout, home.gate_up_bias, "weights to replicas"),
            None if home.down_bias is None else _copies(line, layout, home.down_bias, "weights to replicas"),
        )
        self._filled_for = layout
        return self.bank

    def refill(self, line: Line, layout: Layout, home: Bank) -> Bank:
        """The same for a backward: nothing is sent where the slots still hold what this layout's forward put there.

        All ranks fill their slots in the same order, so all of them send or none does. What they hold is up to date:
        autograd refuses a backward whose weights were changed after the forward.
        """
        if self.bank is not None and self._filled_for is layout:
            return self.bank
        return self.fill(line, layout, home)


def _copies(line: Line, layout: Layout, weight: Tensor, what: str) -> Tensor:
    """(slots in use, ...): one weight of this rank's replicas."""
    chosen = torch.tensor([e for experts in layout.weights_out for e in experts], dtype=torch.int64)
    rows = weight.detach().index_select(0, chosen.to(weight.device))
    return line.exchange(rows, [len(experts) for experts in layout.weights_out], layout.weights_in, what)


def reduce_home(line: Line, layout: Layout, home: Tensor, replicas: Tensor) -> Tensor:
    """Adds the replicas' gradients of one weight to those of their homes. Every rank has to call it.

    In fp32 or better and in ascending order of the replicas' ranks, so that the result is the same every time.

    Args:
        home: (home experts, ...), gradient of this rank's experts; changed in place.
        replicas: (slots in use, ...), gradient of this rank's replicas, exact zeros where a replica kept nothing.
    """
    counts = [len(experts) for experts in layout.weights_out]
    arrived = line.exchange(replicas, layout.weights_in, counts, "gradients of replicas home")
    experts = sorted({e for out in layout.weights_out for e in out})
    if not experts:
        return home
    chosen = torch.tensor(experts, device=home.device)
    total = home.index_select(0, chosen).to(torch.promote_types(home.dtype, torch.float32))
    for out, part in zip(layout.weights_out, torch.split(arrived, counts), strict=True):
        if out:
            place = torch.tensor([experts.index(e) for e in out], device=home.device)
            total.index_add_(0, place, part.to(total.dtype))
    return home.index_copy_(0, chosen, total.to(home.dtype))
