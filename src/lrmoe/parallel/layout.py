"""Where every row of one call travels: from counts and a plan to split sizes and index tensors.

Shapes: T tokens, K choices, L pairs of this rank that have an expert, R rows this rank computes, E experts, G ranks,
S instances on this rank, in the order of their weights (see :mod:`lrmoe.parallel.stores.weight_store`).

Two orders of rows matter. In *send order* a rank's pairs lie by destination rank, then expert, then pair; an all-to-all
turns it into the *receive order* of the hosts: by source rank, then expert, then pair. In *host order* rows lie by
instance, then source rank, then pair: as one process would sort the pairs of all ranks, one after the other.

Worked example, two ranks, experts 0 and 1 at home on rank 0 and 1, no replica: rank 0 routes pairs [1, 0, 1] and rank 1
pairs [0, 1]. Send orders are [p1 | p0 p2] and [p0 | p1]; rank 1 receives p0 p2 of rank 0, then p1 of rank 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.balance.plan import Plan
from lrmoe.ops.permute import count_per_expert, sort_by_expert


class Shipping:
    """How the ranks exchange weights and gradients in one layout; each weight store has its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One rank's part of a plan.

    Attributes:
        pair_L: int64, this rank's pairs in send order.
        send, receive: rows to and from each rank.
        order_R: int64, for each row in host order its place in receive order; None where the orders agree.
        expert_S: int64, the expert of each instance, bank after bank.
        banks: of each bank of weights its instances and rows in host order.
        load_S, quota_S: int64, real rows of each instance and how many of them its backward keeps.
        first_S: int64, the place of the instance's first real row among all real pairs of its expert.
        all_kept: no rank drops anything, and no rank has masked tokens.
        shipping: how the ranks exchange weights and gradients; None where they need not.
    """

    pair_L: Tensor
    send: list[int]
    receive: list[int]
    order_R: Tensor | None
    expert_S: Tensor
    banks: tuple[BankRows, ...]
    load_S: Tensor
    quota_S: Tensor
    first_S: Tensor
    all_kept: bool
    shipping: Shipping | None


@dataclass(frozen=True, slots=True)
class BankRows:
    """The part of one bank of weights: ``instances`` of all instances, ``rows`` in host order, and the int32 ends
    ``offs_S`` of its instances' rows, from the bank's own start."""

    instances: slice
    rows: slice
    offs_S: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnPairs:
    """What a rank's tokens ask for, before anybody knows where it is computed.

    Attributes:
        ids_TK: int64, the expert of each pair, or -1.
        pair_L: int64, the pairs that have an expert, by expert, then pair.
        masked_N: bool, which of all N = T * K pairs belong to masked tokens; None for none.
        real_E, masked_E: int64, how many pairs each expert has, of real and of masked tokens.
    """

    ids_TK: Tensor
    pair_L: Tensor
    masked_N: Tensor | None
    real_E: Tensor
    masked_E: Tensor

    @property
    def real_ids_TK(self) -> Tensor | None:
        """The ids with -1 for masked tokens; None where none is masked."""
        if self.masked_N is None:
            return None
        return torch.where(self.masked_N.view_as(self.ids_TK), -1, self.ids_TK)


def sort_pairs(topk_ids_TK: Tensor, token_mask_T: Tensor | None, num_experts: int) -> OwnPairs:
    """Sorts and counts the pairs of this rank's tokens, of which ``token_mask_T`` (bool) says which are real."""
    ids_TK = topk_ids_TK.to(torch.int64)
    pair_N, count_E = sort_by_expert(ids_TK.reshape(-1), num_experts)
    masked_N, real_E = None, count_E
    if token_mask_T is not None:
        masked_N = ~token_mask_T.repeat_interleave(ids_TK.shape[1])
        real_E = count_per_expert(torch.where(masked_N, -1, ids_TK.reshape(-1)), num_experts)
    return OwnPairs(
        ids_TK=ids_TK,
        pair_L=pair_N[: int(count_E.sum())],
        masked_N=masked_N,
        real_E=real_E,
        masked_E=count_E - real_E,
    )


def lay_out(
    plan: Plan,
    sorted_pairs: Tensor,
    masked_N: Tensor | None,
    masked_GE: Tensor,
    rank: int,
    banks: Sequence[Sequence[int]],
    shipping: Shipping | None,
) -> Layout:
    """This rank's part of ``plan``.

    Args:
        plan: for the real pairs of all ranks.
        sorted_pairs: int64, this rank's pairs that have an expert, by expert, then pair.
        masked_N: bool, which of all this rank's pairs belong to masked tokens; None for none. They are computed by
            their expert's first host, outside of the plan.
        masked_GE: int64 CPU, masked pairs of each rank for each expert.
        rank: of this process.
        banks: the experts whose weights this rank has at hand, in the order of the weights; between them all experts
            that the plan has this rank host. One that comes twice computes where it comes first.
        shipping: handed on.
    """
    device = sorted_pairs.device
    first_host_E = torch.tensor([ranks[0] for ranks in plan.hosts], device="cpu")
    alloc_GEG = plan.alloc
    rows_GE = alloc_GEG[:, :, rank] + torch.where(first_host_E == rank, masked_GE, 0)
    real_EG = alloc_GEG[rank].clone()
    sent_EG = real_EG.scatter_add(1, first_host_E.unsqueeze(1), masked_GE[rank].unsqueeze(1))
    del alloc_GEG

    experts = [expert for bank in banks for expert in bank]
    expert_S = torch.tensor(experts, dtype=torch.int64, device="cpu")
    again_S = torch.tensor(
        [expert in experts[:place] for place, expert in enumerate(experts)], dtype=torch.bool, device="cpu"
    )
    rows_GS = rows_GE[:, expert_S].masked_fill(again_S, 0)
    order_R = _host_order(rows_GS, expert_S)
    in_order = bool((order_R[1:] > order_R[:-1]).all())
    return Layout(
        pair_L=_send_order(plan, sorted_pairs, masked_N, masked_GE[rank], first_host_E, real_EG),
        send=sent_EG.sum(0).tolist(),
        receive=rows_GS.sum(1).tolist(),
        order_R=None if in_order else order_R.to(device),
        expert_S=expert_S.to(device),
        banks=tuple(_bank_rows(rows_GS.sum(0), [len(bank) for bank in banks], device)),
        load_S=plan.rows_EG[expert_S, rank].masked_fill(again_S, 0).to(device),
        quota_S=plan.quota_EG[expert_S, rank].masked_fill(again_S, 0).to(device),
        first_S=plan.rows_EG[expert_S, :rank].sum(1).to(device),
        all_kept=torch.equal(plan.quota_EG, plan.rows_EG) and not bool(masked_GE.any()),
        shipping=shipping,
    )


def _bank_rows(rows_S: Tensor, sizes: list[int], device: torch.device) -> Iterator[BankRows]:
    instance = row = 0
    for size in sizes:
        offs_S = rows_S[instance : instance + size].cumsum(0)
        end = row + (int(offs_S[-1]) if size else 0)
        yield BankRows(slice(instance, instance + size), slice(row, end), offs_S.to(torch.int32).to(device))
        instance, row = instance + size, end


def _host_order(rows_GS: Tensor, expert_S: Tensor) -> Tensor:
    """For each row in host order, its place in receive order."""
    by_expert_S = expert_S.argsort(stable=True)
    arrived_GS = rows_GS[:, by_expert_S]
    start_GS = (arrived_GS.reshape(-1).cumsum(0) - arrived_GS.reshape(-1)).view_as(arrived_GS)
    column_S = by_expert_S.argsort()
    count_SG = rows_GS.t().reshape(-1)
    # Row i of a block that starts at place b in host order and at place s in receive order comes from s + (i - b).
    shift_SG = start_GS[:, column_S].t().reshape(-1) - (count_SG.cumsum(0) - count_SG)
    return torch.repeat_interleave(shift_SG, count_SG) + torch.arange(int(count_SG.sum()), device="cpu")


def _send_order(
    plan: Plan,
    sorted_pairs: Tensor,
    masked_N: Tensor | None,
    masked_E: Tensor,
    first_host_E: Tensor,
    real_EG: Tensor,
) -> Tensor:
    """This rank's pairs by destination, then expert, then pair; ``real_EG`` of its real ones go to each rank."""
    # Where each expert has one host and the hosts ascend with the experts, pairs by expert are pairs by destination.
    if plan.num_replicas == 0 and bool((first_host_E[1:] >= first_host_E[:-1]).all()):
        return sorted_pairs
    device = sorted_pairs.device
    num_ranks, num_experts = plan.lam_GE.shape
    # A rank's real pairs of an expert go to the expert's hosts in ascending rank order, as many to each as it takes.
    real_destination = (
        torch.arange(num_ranks, device="cpu").repeat(num_experts).repeat_interleave(real_EG.reshape(-1)).to(device)
    )
    if masked_N is None:
        destination = real_destination
    else:
        masked_L = masked_N[sorted_pairs]
        destination = first_host_E.repeat_interleave(real_EG.sum(1) + masked_E).to(device)
        destination[~masked_L] = real_destination
    return sorted_pairs[torch.argsort(destination, stable=True)]
