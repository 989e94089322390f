"""What ``remainder="mean"`` sends between ranks: for each instance of an expert, the sum of alpha g over all its rows.

The gradients of dropped pairs never travel, so the tokens' rank adds them up: one row of D numbers for each instance
that it sends pairs to, however many. The instance adds up the rows of all ranks, in ascending order, and completes its
weights' gradients as one device does (:mod:`lrmoe.experts.remainder`), with the means of the rows it computes itself.
Each instance's completion is zero on average where the sampling is unbiased, and so is the sum of all of them.

T tokens, K choices, L pairs of this rank that have an expert, S instances on this rank, E experts, G ranks, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.balance.plan import Plan
from lrmoe.experts.remainder import summed_gradients
from lrmoe.parallel.dispatcher import Exchange
from lrmoe.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class GradientSums:
    """How the sums of one call travel, known to all ranks from the plan.

    Attributes:
        count_B: int64, how many of this rank's real pairs, in send order, each instance gets that gets any.
        send: how many of these instances are on each rank.
        instances: for each rank, which of this rank's instances it sends real pairs to.
    """

    count_B: Tensor
    send: list[int]
    instances: list[Tensor]

    @classmethod
    def of(cls, plan: Plan, rank: int, banks: Sequence[Sequence[int]], device: torch.device) -> GradientSums | None:
        """Those of ``plan``; None if nothing is dropped, on any rank.

        Args:
            rank: of this process.
            banks: as for :func:`~lrmoe.parallel.layout.lay_out`.
        """
        if torch.equal(plan.quota_EG, plan.rows_EG):
            return None
        alloc_GEG = plan.alloc
        sent_GE = alloc_GEG[rank].t()
        experts = [expert for bank in banks for expert in bank]
        # An expert that this rank has twice computes where it comes first.
        place_E = torch.tensor(
            [experts.index(e) if e in experts else -1 for e in range(alloc_GEG.shape[1])], device="cpu"
        )
        return cls(
            sent_GE[sent_GE > 0].to(device),
            (sent_GE > 0).sum(1).tolist(),
            [place_E[rows_E > 0].to(device) for rows_E in alloc_GEG[:, :, rank]],
        )

    def all_to_all(
        self,
        grad_TD: Tensor,
        alpha_TK: Tensor,
        token_mask_T: Tensor | None,
        pair_L: Tensor,
        exchange: Exchange,
        layout: Layout,
    ) -> Tensor:
        """(S, D): the sum of alpha g over each instance's real rows, in the dtype of ``alpha_TK``. Communicates."""
        with exchange.phase("sum gradients"):
            token_L = pair_L // alpha_TK.shape[1]
            if token_mask_T is not None:
                pair_L = pair_L[token_mask_T[token_L]]
                token_L = pair_L // alpha_TK.shape[1]
            sums_BD = summed_gradients(grad_TD, alpha_TK.reshape(-1)[pair_L], token_L, self.count_B)
        receive = [instance.numel() for instance in self.instances]
        arrived = exchange.all_to_all(sums_BD, self.send, receive, "gradient sums to experts")
        grad_SD = sums_BD.new_zeros(layout.load_S.numel(), sums_BD.shape[1])
        # A rank sends an instance one row at most, so that no place comes twice in one addition.
        for instance, part in zip(self.instances, torch.split(arrived, receive), strict=True):
            grad_SD.index_add_(0, instance, part)
        return grad_SD


def counted_instances(layout: Layout, real_R: Tensor | None) -> Tensor:
    """The instances of the rows in host order, (R,), -1 for masked tokens: who counts in which mean.

    Args:
        real_R: bool, whose token is real; None if all are.
    """
    row_R = torch.arange(sum(layout.receive), device=layout.load_S.device)
    ends_S = torch.cat([bank.offs_S.to(torch.int64) + bank.rows.start for bank in layout.banks])
    instance_R = torch.bucketize(row_R, ends_S, right=True)
    return instance_R if real_R is None else torch.where(real_R, instance_R, -1)
