"""Where the weights that a rank computes with come from, and where their gradients go.

Three ways, after a policy's ``ownership``:

- ``home``: a rank owns a contiguous range of experts; others get copies for the length of a layer
  (:mod:`lrmoe.parallel.stores.home`).
- ``placed``: a rank owns what its slots hold; at the end of a step experts move, with their optimizer state
  (:mod:`lrmoe.parallel.stores.placed`).
- ``sharded``: a rank owns 1/G of every expert, and gathers those that it computes with
  (:mod:`lrmoe.parallel.stores.sharded`).

What a rank *owns* are its parameters: tensors of one form in all three, (rows, ...), that an optimizer may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lrmoe.balance.plan import Plan
from lrmoe.experts.compacted import Bank
from lrmoe.parallel.dispatcher import Exchange
from lrmoe.parallel.layout import Layout, Shipping


class WeightStore(Protocol):
    """One a rank, for all layers. What communicates has to be called by every rank."""

    def local(self, weight: Tensor) -> Tensor:
        """What this rank owns of a weight of all experts, (E, ...)."""

    def num_owned(self, num_experts: int) -> int:
        """The first dimension of what this rank owns of a weight of ``num_experts`` experts."""

    def as_experts(self, owned: Bank, width: int) -> Bank:
        """Stand-ins with the shapes, dtypes and devices of whole experts, one for each row of ``owned``, whose argument
        checks are then those of one device.

        Args:
            width: D, of the tokens.
        """

    def is_stale(self, layer: int, owned: Bank) -> bool:
        """Whether this rank keeps whole weights of a layer from one call to the next, and has none that are those of
        ``owned``."""

    def arrange(self, plan: Plan, layer: int, stale: bool) -> tuple[Sequence[Sequence[int]], Shipping | None]:
        """(the experts of each of this rank's banks in the order of the weights, what is exchanged for it).

        Args:
            stale: what is kept has to be renewed, on some rank.
        """

    def gather(self, exchange: Exchange, layout: Layout, owned: Bank) -> Sequence[Bank]:
        """The banks of ``layout``'s forward. Communicates."""

    def gather_again(self, exchange: Exchange, layout: Layout, owned: Bank) -> Sequence[Bank]:
        """The same for its backward. Communicates, unless on all ranks the forward's are still there."""

    def reduce(self, exchange: Exchange, layout: Layout, owned: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """The gradient of one owned weight, from that of each bank; in fp32 or better and in a fixed order.
        Communicates.

        Args:
            owned: the weight.
            parts: gradients by bank, exact zeros for an instance that kept nothing; may be changed in place.
        """
