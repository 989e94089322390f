"""Where every row of one call travels: from counts and a plan to split sizes and index tensors.

Shapes: T tokens, K choices, L pairs of this rank that have an expert, R rows this rank computes, E experts, G ranks,
S instances on this rank (its home experts, then its replicas, each ascending by expert).

Two orders of rows matter. In *send order* a rank's pairs lie by destination rank, then expert, then pair; an all-to-all
turns it into the *receive order* of the hosts: by source rank, then expert, then pair. In *host order* rows lie by
instance, then source rank, then pair: as one process would sort the pairs of all ranks, one after the other.

Worked example, two ranks, experts 0 and 1 at home on rank 0 and 1, no replica: rank 0 routes pairs [1, 0, 1] and rank 1
pairs [0, 1]. Send orders are [p1 | p0 p2] and [p0 | p1]; rank 1 receives p0 p2 of rank 0, then p1 of rank 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.balance.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One rank's part of a plan.

    Attributes:
        pair_L: int64, this rank's pairs in send order.
        send, receive: rows to and from each rank.
        order_R: int64, for each row in host order its place in receive order; None where the orders agree.
        expert_S: int64, the expert of each instance; the first ``num_home`` are at home.
        offs_home_E, offs_slots_S: int32 ends of the instances' rows, of each bank from its own start.
        rows_home: rows of the home instances; those of the replicas follow.
        load_S, quota_S: int64, real rows of each instance and how many of them its backward keeps.
        first_S: int64, the place of the instance's first real row among all real pairs of its expert.
        everything: no rank drops anything, and no rank has masked tokens.
        weights_out: for each rank, which of this rank's home experts (local index) it holds a replica of.
        weights_in: for each rank, how many of this rank's replicas are at home there.
        replicated: some rank holds a replica.
    """

    pair_L: Tensor
    send: list[int]
    receive: list[int]
    order_R: Tensor | None
    expert_S: Tensor
    num_home: int
    offs_home_E: Tensor
    offs_slots_S: Tensor
    rows_home: int
    load_S: Tensor
    quota_S: Tensor
    first_S: Tensor
    everything: bool
    weights_out: list[list[int]]
    weights_in: list[int]
    replicated: bool


def lay_out(plan: Plan, sorted_pairs: Tensor, masked_TK: Tensor | None, masked_GE: Tensor, rank: int) -> Layout:
    """This rank's part of ``plan``.

    Args:
        plan: for the real pairs of all ranks.
        sorted_pairs: int64, this rank's pairs that have an expert, by expert, then pair.
        masked_TK: bool, which of this rank's pairs belong to masked tokens, flattened as the pairs are numbered; None
            for none. They are computed at their expert's home, outside of the plan.
        masked_GE: int64 CPU, masked pairs of each rank for each expert.
        rank: of this process.
    """
    device = sorted_pairs.device
    num_ranks = plan.lam_GE.shape[0]
    home_E = torch.tensor([ranks[0] for ranks in plan.hosts])
    alloc_GEG = plan.alloc
    rows_GE = alloc_GEG[:, :, rank] + torch.where(home_E == rank, masked_GE, 0)
    real_EG = alloc_GEG[rank].clone()
    sent_EG = real_EG.scatter_add(1, home_E.unsqueeze(1), masked_GE[rank].unsqueeze(1))
    del alloc_GEG

    home = (home_E == rank).nonzero().squeeze(-1).tolist()
    replicas = list(plan.slots[rank])
    expert_S = torch.tensor([*home, *replicas], dtype=torch.int64)
    order_R = _host_order(rows_GE, expert_S)
    rows_S = rows_GE.sum(0)[expert_S]
    in_order = bool((order_R[1:] > order_R[:-1]).all())
    weights_out = [[e - home[0] for e in plan.slots[other] if home_E[e] == rank] for other in range(num_ranks)]
    homes_of_replicas = home_E[replicas].tolist() if replicas else []
    return Layout(
        pair_L=_send_order(plan, sorted_pairs, masked_TK, masked_GE[rank], home_E, real_EG),
        send=sent_EG.sum(0).tolist(),
        receive=rows_GE[:, expert_S].sum(1).tolist(),
        order_R=None if in_order else order_R.to(device),
        expert_S=expert_S.to(device),
        num_home=len(home),
        offs_home_E=rows_S[: len(home)].cumsum(0).to(torch.int32).to(device),
        offs_slots_S=rows_S[len(home) :].cumsum(0).to(torch.int32).to(device),
        rows_home=int(rows_S[: len(home)].sum()),
        load_S=plan.rows_EG[expert_S, rank].to(device),
        quota_S=plan.quota_EG[expert_S, rank].to(device),
        first_S=plan.rows_EG[expert_S, :rank].sum(1).to(device),
        everything=torch.equal(plan.quota_EG, plan.rows_EG) and not bool(masked_GE.any()),
        weights_out=weights_out,
        weights_in=[homes_of_replicas.count(other) for other in range(num_ranks)],
        replicated=plan.num_replicas > 0,
    )


def _host_order(rows_GE: Tensor, expert_S: Tensor) -> Tensor:
    """For each row in host order, its place in receive order."""
    arrived_GS = rows_GE[:, expert_S.sort().values]
    start_GS = (arrived_GS.reshape(-1).cumsum(0) - arrived_GS.reshape(-1)).view_as(arrived_GS)
    column_S = expert_S.argsort().argsort()
    count_SG = arrived_GS[:, column_S].t().reshape(-1)
    # Row i of a block that starts at place b in host order and at place s in receive order comes from s + (i - b).
    shift_SG = start_GS[:, column_S].t().reshape(-1) - (count_SG.cumsum(0) - count_SG)
    return torch.repeat_interleave(shift_SG, count_SG) + torch.arange(int(count_SG.sum()))


def _send_order(
    plan: Plan,
    sorted_pairs: Tensor,
    masked_TK: Tensor | None,
    masked_E: Tensor,
    home_E: Tensor,
    real_EG: Tensor,
) -> Tensor:
    """This rank's pairs by destination, then expert, then pair; ``real_EG`` of its real ones go to each rank."""
    # Homes ascend with the experts: without replicas, pairs by expert are pairs by destination.
    if plan.num_replicas == 0:
        return sorted_pairs
    device = sorted_pairs.device
    num_ranks, num_experts = plan.lam_GE.shape
    # A rank's real pairs of an expert go to the expert's hosts in ascending rank order, as many to each as it takes.
    real_destination = torch.arange(num_ranks).repeat(num_experts).repeat_interleave(real_EG.reshape(-1)).to(device)
    if masked_TK is None:
        destination = real_destination
    else:
        masked_L = masked_TK[sorted_pairs]
        destination = home_E.repeat_interleave(real_EG.sum(1) + masked_E).to(device)
        destination[~masked_L] = real_destination
    return sorted_pairs[torch.argsort(destination, stable=True)]
