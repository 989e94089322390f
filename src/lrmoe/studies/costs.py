"""What a plan costs on the wire and in time: arithmetic with stated rates, nothing is measured.

Each rank sends and receives at the same time, with as many bytes a second each way; a transfer takes as long as its
busiest rank. Latencies, and what a network's topology adds, are left out.

Shapes: E experts, G ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from lrmoe.balance import Plan
from lrmoe.balance.ownership import Move
from lrmoe.studies.expert import Expert

Kind = Literal["weights", "gradients", "optimizer", "tokens"]
KINDS: tuple[Kind, ...] = ("weights", "gradients", "optimizer", "tokens")
Hosts = Sequence[Sequence[int]]

SCORE_BYTES = 5
"""A pair's score, 4 bytes to the rank that selects, and 1 byte back that says whether it is kept."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that each rank sends and receives, of one kind and in one go. fp64 (G,)."""

    kind: Kind
    sent_G: Tensor
    received_G: Tensor

    @property
    def total(self) -> float:
        """Bytes on the wire."""
        return float(self.sent_G.sum())

    def seconds(self, bandwidth: float) -> float:
        """Of the busiest rank."""
        return float(torch.maximum(self.sent_G, self.received_G).max()) / bandwidth


def from_home(hosts: Hosts, num_ranks: int, size: float, kind: Kind) -> Transfer:
    """The first host of each expert sends ``size`` bytes to every other, directly."""
    sent_G, received_G = _zeros(num_ranks), _zeros(num_ranks)
    for ranks in hosts:
        sent_G[ranks[0]] += size * (len(ranks) - 1)
        for rank in ranks[1:]:
            received_G[rank] += size
    return Transfer(kind, sent_G, received_G)


def relayed(hosts: Hosts, num_ranks: int, size: float, kind: Kind) -> Transfer:
    """As :func:`from_home`, but with UltraEP's relays: of four and more copies, where the busiest sender then has at
    most half as much to send, the square root of their number (8 at most) come from home and pass on to the others."""
    sent_G, received_G = _zeros(num_ranks), _zeros(num_ranks)
    for ranks in hosts:
        copies = len(ranks) - 1
        relays = min(math.isqrt(copies), 8) if copies >= 4 else copies
        passed_on = [len(range(i, copies - relays, relays)) for i in range(relays)] if relays else []
        if relays and copies < 2 * max(relays, *passed_on):
            relays, passed_on = copies, []
        sent_G[ranks[0]] += size * relays
        for rank, count in zip(ranks[1:], passed_on, strict=False):
            sent_G[rank] += size * count
        for rank in ranks[1:]:
            received_G[rank] += size
    return Transfer(kind, sent_G, received_G)


def to_home(hosts: Hosts, num_ranks: int, size: float, kind: Kind) -> Transfer:
    """The other way round."""
    out = from_home(hosts, num_ranks, size, kind)
    return Transfer(kind, out.received_G, out.sent_G)


def broadcast(hosts: Hosts, num_ranks: int, size: float, kind: Kind) -> Transfer:
    """From the first host along a chain of all hosts, in pieces: each but the last passes on what it receives."""
    sent_G, received_G = _zeros(num_ranks), _zeros(num_ranks)
    for ranks in hosts:
        for rank, following in pairwise(ranks):
            sent_G[rank] += size
            received_G[following] += size
    return Transfer(kind, sent_G, received_G)


def reduce(hosts: Hosts, num_ranks: int, size: float, kind: Kind) -> Transfer:
    """A :func:`broadcast` backwards: sums arrive at the first host."""
    out = broadcast(hosts, num_ranks, size, kind)
    return Transfer(kind, out.received_G, out.sent_G)


def all_reduce(hosts: Hosts, num_ranks: int, size: float, kind: Kind) -> Transfer:
    """Over the k hosts of each expert, in a ring: 2 (k - 1) / k of ``size`` out of and into each."""
    sent_G = _zeros(num_ranks)
    for ranks in hosts:
        for rank in ranks:
            sent_G[rank] += 2 * (len(ranks) - 1) / len(ranks) * size
    return Transfer(kind, sent_G, sent_G.clone())


def regular(num_ranks: int, size: float, kind: Kind) -> Transfer:
    """``size`` bytes out of and into every rank."""
    each_G = torch.full((num_ranks,), float(size), dtype=torch.float64, device="cpu")
    return Transfer(kind, each_G, each_G.clone())


def moves(moved: Iterable[Move], num_ranks: int, size: float, kind: Kind) -> Transfer:
    """``size`` bytes for each move to another rank."""
    sent_G, received_G = _zeros(num_ranks), _zeros(num_ranks)
    for move in moved:
        if move.source_rank != move.target_rank:
            sent_G[move.source_rank] += size
            received_G[move.target_rank] += size
    return Transfer(kind, sent_G, received_G)


def token_transfers(plan: Plan, expert: Expert) -> tuple[list[Transfer], list[Transfer]]:
    """What the rows of a microbatch send, in the forward and in the backward.

    Rows of D two-byte numbers go out to the rank that computes them and come back; in the backward the kept ones do
    both once more, as gradients. Which of a rank's rows are kept is not known from a plan: the same share of every
    source's is taken. Where anything is dropped, scores and decisions travel, too.
    """
    row = 2 * expert.dim
    alloc_GEG = plan.alloc
    rows_GG = alloc_GEG.sum(1).to(torch.float64)
    forward = _exchange(rows_GG, row)
    if torch.equal(plan.quota_EG, plan.rows_EG):
        return [forward, _reversed(forward)], [forward, _reversed(forward)]
    share_EG = plan.quota_EG / plan.rows_EG.clamp(min=1)
    kept_GG = torch.einsum("sed,ed->sd", alloc_GEG.to(torch.float64), share_EG.to(torch.float64))
    backward = _exchange(kept_GG, row)
    return [forward, _reversed(forward)], [_exchange(rows_GG, SCORE_BYTES), backward, _reversed(backward)]


def _exchange(rows_GG: Tensor, row_bytes: float) -> Transfer:
    away_GG = rows_GG - torch.diag(rows_GG.diagonal())
    return Transfer("tokens", row_bytes * away_GG.sum(1), row_bytes * away_GG.sum(0))


def _reversed(transfer: Transfer) -> Transfer:
    return Transfer(transfer.kind, transfer.received_G, transfer.sent_G)


def _zeros(num_ranks: int) -> Tensor:
    return torch.zeros(num_ranks, dtype=torch.float64, device="cpu")
