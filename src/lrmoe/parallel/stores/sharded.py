"""Every rank owns 1/G of every expert, and gathers those that it computes with.

Of a weight (E, n, ...) rank r owns the part [start_r, start_r + n_r) of the second dimension, the first n % G ranks one
more. Placing experts anew then costs nothing: who computes with an expert gets its weights from all ranks, wherever it
was computed before, and gradients go back the same way. Optimizer state never moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.balance.plan import Plan
from lrmoe.experts.compacted import Bank
from lrmoe.parallel.dispatcher import Exchange
from lrmoe.parallel.layout import Layout, Shipping


@dataclass(frozen=True, slots=True)
class Gathered(Shipping):
    """``experts_G``: what each rank computes with, ascending; ``layer`` and ``generation``: which gathering of which
    layer's weights this is, by the same count on all ranks."""

    experts_G: list[list[int]]
    layer: int
    generation: int


@dataclass(frozen=True, slots=True)
class _Held:
    """Whole weights of a layer, of one gathering, and what they were gathered from."""

    shipping: Gathered
    bank: Bank
    origin: tuple[int, ...]


def part_sizes(length: int, num_ranks: int) -> list[int]:
    """How much of a dimension of this length each rank owns."""
    size, longer = divmod(length, num_ranks)
    return [size + (rank < longer) for rank in range(num_ranks)]


class ShardedStore:
    """This rank's part of every expert.

    Args:
        num_experts, num_ranks, rank: E, G and this process's rank.
        holds_weights: whole weights stay, of every layer, until the parameters change or the policy places experts
            anew (SYMI); else they are gathered for each forward, and again for its backward if another layer came in
            between (LAER-MoE).
    """

    def __init__(self, num_experts: int, num_ranks: int, rank: int, *, holds_weights: bool) -> None:
        self._num_experts, self._num_ranks, self._rank = num_experts, num_ranks, rank
        self._holds_weights = holds_weights
        self._held: dict[int, _Held] = {}
        self._gatherings = 0

    def local(self, weight: Tensor) -> Tensor:
        """This rank's part of each expert; a view."""
        sizes = part_sizes(weight.shape[1], self._num_ranks)
        start = sum(sizes[: self._rank])
        return weight[:, start : start + sizes[self._rank]]

    def num_owned(self, num_experts: int) -> int:
        """See :class:`~lrmoe.parallel.stores.weight_store.WeightStore`."""
        return num_experts

    def as_experts(self, owned: Bank, width: int) -> Bank:
        """Stand-ins for the whole experts. See :class:`~lrmoe.parallel.stores.weight_store.WeightStore`.

        Raises:
            ValueError: if the parts are not this rank's.
        """
        expert_width = owned.down_proj.shape[-1]
        shapes = {
            "gate_up_proj": (2 * expert_width, width),
            "down_proj": (width, expert_width),
            "gate_up_bias": (2 * expert_width,),
            "down_bias": (width,),
        }
        whole: list[Tensor | None] = []
        for name, (length, *rest) in shapes.items():
            part = getattr(owned, name)
            if part is None:
                whole.append(None)
                continue
            expected = (self._num_experts, part_sizes(length, self._num_ranks)[self._rank], *rest)
            if tuple(part.shape) != expected:
                raise ValueError(
                    f"{name} has shape {tuple(part.shape)}; rank {self._rank} owns the part {expected} of all experts: "
                    "give what ExpertParallel.local returns for the whole weight"
                )
            whole.append(part.new_empty(()).expand(self._num_experts, length, *rest))
        gate_up, down, *biases = whole
        assert gate_up is not None
        assert down is not None
        return Bank(gate_up, down, *biases)

    def is_stale(self, layer: int, owned: Bank) -> bool:
        """See :class:`~lrmoe.parallel.stores.weight_store.WeightStore`."""
        held = self._held.get(layer)
        return self._holds_weights and (held is None or held.origin != _origin(owned))

    def arrange(self, plan: Plan, layer: int, stale: bool) -> tuple[Sequence[Sequence[int]], Shipping | None]:
        """One bank: what the plan has this rank compute with, ascending."""
        experts_G: list[list[int]] = [[] for _ in range(self._num_ranks)]
        for expert, ranks in enumerate(plan.hosts):
            for rank in ranks:
                experts_G[rank].append(expert)
        held = self._held.get(layer)
        if self._holds_weights and not stale and held is not None and held.shipping.experts_G == experts_G:
            return [experts_G[self._rank]], held.shipping
        self._gatherings += 1
        return [experts_G[self._rank]], Gathered(experts_G, layer, self._gatherings)

    def gather(self, exchange: Exchange, layout: Layout, owned: Bank) -> Sequence[Bank]:
        """Whole weights of this rank's experts, from all ranks; nothing is sent where all have them."""
        shipping = layout.shipping
        assert isinstance(shipping, Gathered)
        held = self._held.get(shipping.layer)
        if held is not None and held.shipping.generation == shipping.generation:
            return [held.bank]
        # Freed before, not after: the memory would be needed twice.
        if self._holds_weights:
            self._held.pop(shipping.layer, None)
        else:
            self._held.clear()
        del held
        width, expert_width = owned.gate_up_proj.shape[2], owned.down_proj.shape[2]
        bank = Bank(
            self._whole(exchange, shipping, owned.gate_up_proj, 2 * expert_width),
            self._whole(exchange, shipping, owned.down_proj, width),
            None
            if owned.gate_up_bias is None
            else self._whole(exchange, shipping, owned.gate_up_bias, 2 * expert_width),
            None if owned.down_bias is None else self._whole(exchange, shipping, owned.down_bias, width),
        )
        self._held[shipping.layer] = _Held(shipping, bank, _origin(owned) if self._holds_weights else ())
        return [bank]

    def gather_again(self, exchange: Exchange, layout: Layout, owned: Bank) -> Sequence[Bank]:
        """The same for a backward."""
        return self.gather(exchange, layout, owned)

    def reduce(self, exchange: Exchange, layout: Layout, owned: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """This rank's part of each expert's gradient, from all that computed with it, in ascending order of rank."""
        shipping = layout.shipping
        assert isinstance(shipping, Gathered)
        experts, rest = shipping.experts_G, owned.shape[2:]
        sizes = part_sizes(parts[0].shape[1], self._num_ranks)
        own = owned.shape[1]
        out = [part.reshape(-1, *rest) for part in torch.split(parts[0], sizes, dim=1)]
        arrived = exchange.all_to_all(
            torch.cat(out),
            [len(part) for part in out],
            [len(held) * own for held in experts],
            "gradients to owners",
        )
        total = torch.zeros_like(owned, dtype=torch.promote_types(owned.dtype, torch.float32))
        at = 0
        for held in experts:
            rows = arrived[at : at + len(held) * own].view(len(held), own, *rest)
            total.index_add_(0, torch.tensor(held, dtype=torch.int64, device=total.device), rows.to(total.dtype))
            at += len(held) * own
        return total.to(owned.dtype)

    def _whole(self, exchange: Exchange, shipping: Gathered, part: Tensor, length: int) -> Tensor:
        """(experts of this rank, ``length``, ...), from the part (E, n_r, ...) that each rank owns."""
        experts, rest = shipping.experts_G, part.shape[2:]
        sizes = part_sizes(length, self._num_ranks)
        wanted = torch.tensor([e for held in experts for e in held], dtype=torch.int64, device=part.device)
        rows = part.detach().index_select(0, wanted).reshape(-1, *rest)
        count = len(experts[self._rank])
        arrived = exchange.all_to_all(
            rows,
            [len(held) * part.shape[1] for held in experts],
            [count * size for size in sizes],
            "weights from owners",
        )
        pieces = torch.split(arrived, [count * size for size in sizes])
        return torch.cat([piece.view(count, size, *rest) for piece, size in zip(pieces, sizes, strict=True)], dim=1)


def _origin(owned: Bank) -> tuple[int, ...]:
    """What tells these weights from the same tensors after any change: the sums of their bits. Reading this rank's part
    is cheap beside gathering the whole; autograd's version counters do not see a change through ``.data``."""
    tensors = (owned.gate_up_proj, owned.down_proj, owned.gate_up_bias, owned.down_bias)
    return tuple(int(_bits(tensor).sum(dtype=torch.int64)) for tensor in tensors if tensor is not None)


def _bits(tensor: Tensor) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    # Times the place, so that exchanged rows do not cancel.
    bits = tensor.detach().reshape(-1).view(integers[tensor.element_size()]).to(torch.int64)
    return bits * torch.arange(1, bits.numel() + 1, device=bits.device)
