"""One row an expert that stands for what the kept rows miss of the gradient of its weights.

A row's contribution is an outer product: alpha g with phi, and dphi times the activation's slope with x. With every
operand but alpha g replaced by its mean over the expert's rows, the contributions of all rows together need the sum of
alpha g alone, which is cheap. So the gradient of the kept rows K, with weights w, is completed by

    g = sum over all rows of alpha g - sum over K of w alpha g

as one more row with the mean operands. Where the weights make sampling unbiased, g is zero on average and the gradient
stays unbiased: the mean operands are a control variate. What is left to chance is each row's distance from the mean, so
rows are scored by ||phi - mean phi|| in place of ||phi||. With weights of 1 (topq) the row stands for the dropped ones.
The input's gradient is not completed: it is made of single rows.

R rows sorted by expert, T tokens, E experts, D model width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lrmoe.ops.activations import Activation
from lrmoe.ops.glu import blocks
from lrmoe.ops.permute import count_per_expert
from lrmoe.recalibration.norms import row_norms


@dataclass(frozen=True, slots=True)
class Means:
    """Each expert's mean operands, fp32 or better: ``x_ED`` inputs, ``phi_EF``, ``slope_E2F`` the activation's
    derivatives in the layout of the up projection's output."""

    x_ED: Tensor
    phi_EF: Tensor
    slope_E2F: Tensor

    def packed(self) -> Tensor:
        """(E, D + 3F)."""
        return torch.cat([self.x_ED, self.phi_EF, self.slope_E2F], 1)

    @classmethod
    def unpacked(cls, means_EX: Tensor, width: int) -> Means:
        """From :meth:`packed`; ``width`` is F."""
        dim = means_EX.shape[1] - 3 * width
        return cls(means_EX[:, :dim], means_EX[:, dim : dim + width], means_EX[:, dim + width :])


@dataclass(frozen=True, slots=True)
class Completion:
    """``grad_ED``: sum of alpha g over all of an expert's rows, fp32 or better; ``means`` of them."""

    grad_ED: Tensor
    means: Means

    def missing(self, grad_MD: Tensor, scale_M: Tensor, offs_E: Tensor) -> Completion:
        """What the kept rows, each times ``scale_M``, miss of the sum."""
        row_M = torch.arange(scale_M.numel(), device=scale_M.device)
        kept_ED = summed_gradients(grad_MD, scale_M, row_M, torch.diff(offs_E, prepend=offs_E.new_zeros(1)))
        return Completion(self.grad_ED - kept_ED, self.means)


def row_means(rows_RX: Tensor, expert_R: Tensor, num_experts: int) -> Tensor:
    """(E, X): the mean over each expert's rows, fp32 or better; 0 for an expert without.

    Args:
        expert_R: int64, the rows' experts; -1 for a row that does not count.
    """
    dtype = torch.promote_types(rows_RX.dtype, torch.float32)
    # One more place for what does not count.
    total_SX = torch.zeros(num_experts + 1, rows_RX.shape[1], dtype=dtype, device=rows_RX.device)
    place_R = torch.where(expert_R < 0, num_experts, expert_R)
    # In blocks for half precision, of which a copy is made.
    whole = [slice(None)]
    for rows in whole if rows_RX.dtype == dtype else blocks(place_R.numel(), rows_RX.shape[1], rows_RX.device):
        total_SX.index_add_(0, place_R[rows], rows_RX[rows].to(dtype))
    return total_SX[:-1] / count_per_expert(expert_R, num_experts).clamp_(min=1).unsqueeze(1)


def mean_slopes(h_R2F: Tensor, expert_R: Tensor, num_experts: int, activation: Activation) -> Tensor:
    """(E, 2F): as :func:`row_means`, of the activation's derivatives at these up projections."""
    dtype = torch.promote_types(h_R2F.dtype, torch.float32)
    width = h_R2F.shape[1] // 2
    place_R = torch.where(expert_R < 0, num_experts, expert_R)
    gate_SF, up_SF = (torch.zeros(num_experts + 1, width, dtype=dtype, device=h_R2F.device) for _ in range(2))
    for rows in blocks(place_R.numel(), width, h_R2F.device):
        gate, up = activation.slopes(*activation.split(h_R2F[rows].to(dtype)))
        gate_SF.index_add_(0, place_R[rows], gate)
        up_SF.index_add_(0, place_R[rows], up)
    slope_E2F = gate_SF.new_empty(num_experts, 2 * width)
    count_E1 = count_per_expert(expert_R, num_experts).clamp_(min=1).unsqueeze(1)
    for half, total_SF in zip(activation.split(slope_E2F), (gate_SF, up_SF), strict=True):
        torch.div(total_SF[:-1], count_E1, out=half)
    return slope_E2F


def distance_roots(phi_RF: Tensor, means: Means, expert_R: Tensor) -> Tensor:
    """The square root of ||phi - mean phi|| of each row, (R,), fp32 or better; of no meaning for rows that do not
    count."""
    dtype = means.phi_EF.dtype
    root_R = torch.empty(phi_RF.shape[0], dtype=dtype, device=phi_RF.device)
    expert_R = expert_R.clamp(min=0)
    for rows in blocks(phi_RF.shape[0], phi_RF.shape[1], phi_RF.device):
        from_mean = means.phi_EF.index_select(0, expert_R[rows]).sub_(phi_RF[rows])
        root_R[rows] = row_norms(from_mean).sqrt_()
    return root_R


def summed_gradients(grad_TD: Tensor, alpha_N: Tensor, token_N: Tensor, count_S: Tensor) -> Tensor:
    """(S, D): sums of alpha g over pairs that lie group by group, fp32 or better, without a row for each pair.

    Args:
        grad_TD: arriving gradients of the tokens.
        alpha_N: routing weights of the pairs, fp32 or better.
        token_N: int64, their tokens.
        count_S: int64, how many pairs each group has; their sum is N.
    """
    if not token_N.numel():
        return alpha_N.new_zeros(count_S.numel(), grad_TD.shape[1])
    start_S = count_S.cumsum(0) - count_S
    return F.embedding_bag(token_N, grad_TD.to(alpha_N.dtype), start_S, mode="sum", per_sample_weights=alpha_N)


def complete(
    missing: Completion,
    down_proj: Tensor,
    activation: Activation,
    dgate_up: Tensor | None,
    ddown: Tensor | None,
    dgate_up_bias: Tensor | None,
    ddown_bias: Tensor | None,
) -> None:
    """Adds the row of what is ``missing`` to those gradients that are there, in place."""
    g_ED, means = missing.grad_ED, missing.means
    if ddown_bias is not None:
        ddown_bias += g_ED.to(ddown_bias.dtype)
    if ddown is not None:
        _add_outer(ddown, g_ED, means.phi_EF)
    if dgate_up is not None or dgate_up_bias is not None:
        dphi_EF = torch.bmm(g_ED.unsqueeze(1), down_proj.to(g_ED.dtype)).squeeze(1)
        dh_E2F = means.slope_E2F.clone()
        for half in activation.split(dh_E2F):
            half.mul_(dphi_EF)
        if dgate_up_bias is not None:
            dgate_up_bias += dh_E2F.to(dgate_up_bias.dtype)
        if dgate_up is not None:
            _add_outer(dgate_up, dh_E2F, means.x_ED)


def _add_outer(total_EXY: Tensor, a_EX: Tensor, b_EY: Tensor) -> None:
    if total_EXY.dtype != a_EX.dtype and total_EXY.device.type == "cpu":
        # As below, but an expert at a time, which stays in a cache.
        for total_XY, a_X, b_Y in zip(total_EXY, a_EX, b_EY, strict=True):
            total_XY.copy_(torch.addr(total_XY.to(a_X.dtype), a_X, b_Y))
    else:
        # Half precision is added to in fp32 and rounded once.
        total_EXY.addcmul_(a_EX.unsqueeze(2), b_EY.unsqueeze(1))
