"""Rows on their way between the ranks that hold the tokens and the ranks that hold the experts."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.parallel.collectives import Traffic, all_to_all_rows
from lrmoe.parallel.layout import Layout

if TYPE_CHECKING:
    from lrmoe.parallel.phase_timer import PhaseTimer


@dataclass(frozen=True, slots=True)
class Exchange:
    """The process group that a layer's rows travel in, and who watches them.

    ``timeout_s``: seconds after which a collective gives up, None for the group's own; ``traffic``: bytes by purpose;
    ``clock``: times phases where somebody asked for it.
    """

    group: dist.ProcessGroup
    timeout_s: float | None
    traffic: Traffic
    clock: PhaseTimer | None

    def all_to_all(self, rows: Tensor, send: list[int], receive: list[int], what: str) -> Tensor:
        """Rows (n, ...) to the ranks that ``send`` counts them for, and what arrives, by source rank."""
        arrived = all_to_all_rows(
            rows, send, receive, self.group, what=what, timeout_s=self.timeout_s, traffic=self.traffic
        )
        if self.clock is not None:
            rank = self.group.rank()
            row_bytes = rows.element_size() * math.prod(rows.shape[1:])
            sent, received = (sum(sizes) - sizes[rank] for sizes in (send, receive))
            self.clock.transfer(what, sent * row_bytes, received * row_bytes)
        return arrived

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a block of this rank's own work."""
        return nullcontext() if self.clock is None else self.clock.phase(name)


class Dispatcher:
    """Carries rows of one layout. Tokens' rows lie in send order, experts' rows in host order."""

    def __init__(self, exchange: Exchange, layout: Layout) -> None:
        self._exchange = exchange
        self._layout = layout

    def dispatch(self, rows: Tensor, what: str) -> Tensor:
        """(L, ...) in send order -> (R, ...) in *receive* order: what is kept for the backward is kept as it came."""
        return self._exchange.all_to_all(rows, self._layout.send, self._layout.receive, what)

    def combine(self, rows: Tensor, what: str) -> Tensor:
        """(R, ...) in host order -> (L, ...) in send order."""
        return self._exchange.all_to_all(self.in_receive_order(rows), self._layout.receive, self._layout.send, what)

    def in_host_order(self, rows: Tensor, part: slice = slice(None)) -> Tensor:
        """Rows in receive order, put in host order; ``part`` of them alone are gathered."""
        order_R = self._layout.order_R
        return rows[part] if order_R is None else rows.index_select(0, order_R[part])

    def in_receive_order(self, rows: Tensor) -> Tensor:
        """Rows in host order, put in receive order."""
        order_R = self._layout.order_R
        return rows if order_R is None else torch.empty_like(rows).index_copy_(0, order_R, rows)

    def received_place(self, row_M: Tensor) -> Tensor:
        """Where rows, given by their place in host order, lie in receive order."""
        order_R = self._layout.order_R
        return row_M if order_R is None else order_R.index_select(0, row_M)

    def agree(self, row_M: Tensor | None) -> KeptDispatcher:
        """Tells the tokens' ranks, in one byte a pair, which rows their experts keep.

        Args:
            row_M: int64, kept rows, ascending places in host order; None for all of all ranks, which everybody knows.
        """
        layout, exchange = self._layout, self._exchange
        if row_M is None:
            return KeptDispatcher(exchange, layout.send, layout.receive, None, layout.order_R)
        num_rows = sum(layout.receive)
        place_M = self.received_place(row_M)
        kept_R = torch.zeros(num_rows, dtype=torch.uint8, device=row_M.device)
        kept_R[place_M] = 1
        kept_L = exchange.all_to_all(kept_R, layout.receive, layout.send, "kept flags to tokens")
        # The only numbers that all-to-all needs on the host; nobody has to send them.
        send, receive = _sums(kept_L, layout.send), _sums(kept_R, layout.receive)
        rank_R = kept_R.cumsum(0, dtype=torch.int64) - 1
        return KeptDispatcher(exchange, send, receive, kept_L.nonzero().squeeze(-1), rank_R.index_select(0, place_M))


class KeptDispatcher:
    """Carries the kept rows alone.

    Attributes:
        sent_M: int64, which of the rows in send order are kept; None for all.
    """

    def __init__(
        self, exchange: Exchange, send: list[int], receive: list[int], sent_M: Tensor | None, order_M: Tensor | None
    ) -> None:
        self._exchange = exchange
        self._send = send
        self._receive = receive
        self.sent_M = sent_M
        self._order_M = order_M

    def dispatch(self, rows: Tensor, what: str) -> Tensor:
        """Kept rows in send order -> in host order."""
        arrived = self._exchange.all_to_all(rows, self._send, self._receive, what)
        return arrived if self._order_M is None else arrived.index_select(0, self._order_M)

    def combine(self, rows: Tensor, what: str) -> Tensor:
        """Kept rows in host order -> in send order."""
        if self._order_M is not None:
            rows = torch.empty_like(rows).index_copy_(0, self._order_M, rows)
        return self._exchange.all_to_all(rows, self._receive, self._send, what)


def _sums(flags: Tensor, sizes: list[int]) -> list[int]:
    """How many flags are set in each of the consecutive blocks of these sizes."""
    total = torch.cat([flags.new_zeros(1, dtype=torch.int64), flags.cumsum(0, dtype=torch.int64)])
    ends = torch.tensor([0, *sizes], device="cpu").cumsum(0).to(flags.device)
    return total.index_select(0, ends).diff().tolist()
