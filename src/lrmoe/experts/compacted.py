"""What the process that holds some experts computes for rows that are sorted by expert: the full forward, and the
gradients of the kept rows alone.

R saved rows, M kept rows, E experts held, D model width, F expert width. With t = W_down^T g and s = alpha * weight of
a kept row:

    dalpha = <t, phi> + <g, b_down>        dphi = s t      dW_down = sum s g phi^T
    (dgate, dup) = activation backward     dW_gate_up = sum dh x^T      dx = W_gate_up^T dh
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lrmoe.experts.recipe import Recipe
from lrmoe.experts.remainder import Completion, Means, complete, distance_roots, mean_slopes, row_means
from lrmoe.ops import activations
from lrmoe.ops.glu import glu_backward, glu_forward
from lrmoe.ops.grouped_mm import add_group_rows, grouped_mm, grouped_sum, grouped_wgrad


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Which gradients are wanted."""

    x: bool
    alpha: bool
    gate_up_proj: bool
    down_proj: bool
    gate_up_bias: bool
    down_bias: bool


@dataclass(frozen=True, slots=True)
class Bank:
    """Stacked weights of some experts: ``gate_up_proj (E, 2F, D)``, ``down_proj (E, D, F)`` and their biases."""

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def to(self, dtype: torch.dtype) -> Bank:
        """The same weights in ``dtype``."""
        return Bank(
            self.gate_up_proj.to(dtype),
            self.down_proj.to(dtype),
            None if self.gate_up_bias is None else self.gate_up_bias.to(dtype),
            None if self.down_bias is None else self.down_bias.to(dtype),
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """A choice of the saved rows, expert by expert.

    ``row_M``: their place among the R saved rows; ``source_M``: the place of their input in the buffer it is kept in;
    ``offs_E``: int32 ends of the experts' groups; ``all_kept``: all saved rows, in their order.
    """

    row_M: Tensor
    source_M: Tensor
    offs_E: Tensor
    all_kept: bool = False


@dataclass(frozen=True, slots=True)
class Activations:
    """What the forward kept: ``x_XD``, the buffer the rows' inputs lie in, and ``h_R2F``, the up projection, which is
    empty with save="input"."""

    x_XD: Tensor
    h_R2F: Tensor


@dataclass(frozen=True, slots=True)
class Forward:
    """``y_RD`` the experts' output; ``h_R2F`` the up projection, empty without ``keep_h``; ``phi_root_R`` the square
    roots of the norms of the down projection's input (or of its distance from the ``means``, if there are any), fp32 or
    better, empty without ``norms``."""

    y_RD: Tensor
    h_R2F: Tensor
    phi_root_R: Tensor
    means: Means | None


@dataclass(frozen=True, slots=True)
class RowGradients:
    """Gradients of kept rows, ``dx_MD`` and ``dalpha_M``, and of the weights; None where not needed. Weights whose
    group is empty have exact zeros."""

    dx_MD: Tensor | None
    dalpha_M: Tensor | None
    gate_up_proj: Tensor | None
    down_proj: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def forward_rows(
    x_RD: Tensor,
    bank: Bank,
    offs_E: Tensor,
    activation: str,
    *,
    live: int,
    norms: bool,
    keep_h: bool,
    counted_R: Tensor | None = None,
) -> Forward:
    """Every row through its expert. Rows from ``live`` on belong to nobody; their results are uninitialised.

    ``counted_R``: int64, where means of the rows are wanted, their experts; -1 for a row that does not count.
    """
    h_R2F = grouped_mm(x_RD, bank.gate_up_proj.transpose(1, 2), offs_E)
    mean_x_ED = None if counted_R is None else row_means(x_RD, counted_R, offs_E.numel())
    del x_RD
    if bank.gate_up_bias is not None:
        add_group_rows(h_R2F, bank.gate_up_bias, offs_E)
    act = activations.get(activation)
    phi_RF, phi_root_R = glu_forward(h_R2F, act, live=live, norms=norms and counted_R is None)
    means = None
    if counted_R is not None and mean_x_ED is not None:
        num_experts = offs_E.numel()
        slope_E2F = mean_slopes(h_R2F, counted_R, num_experts, act)
        means = Means(mean_x_ED, row_means(phi_RF, counted_R, num_experts), slope_E2F)
        phi_root_R = distance_roots(phi_RF, means, counted_R)
    h_R2F = h_R2F if keep_h else h_R2F.new_empty(0, h_R2F.shape[1])
    y_RD = grouped_mm(phi_RF, bank.down_proj.transpose(1, 2), offs_E)
    del phi_RF
    if bank.down_bias is not None:
        add_group_rows(y_RD, bank.down_bias, offs_E)
    return Forward(y_RD, h_R2F, phi_root_R, means)


def kept_gradients(
    grad_MD: Tensor,
    alpha_M: Tensor,
    weight_M: Tensor,
    rows: Rows,
    saved: Activations,
    bank: Bank,
    recipe: Recipe,
    needs: Needs,
    completion: Completion | None = None,
) -> RowGradients:
    """Gradients of the kept rows.

    Args:
        grad_MD: gradients arriving at the rows' tokens, before the routing weight. Overwritten.
        alpha_M: routing weights, fp32 or fp64.
        weight_M: selection weights, in the dtype of alpha; they multiply everything but dalpha.
        rows, saved, bank: where the rows lie, what the forward kept of them, and their experts' weights.
        completion: completes the weights' gradients.
    """
    scale_M = alpha_M * weight_M
    # In the down projection's wgrad the scale goes with phi, at no cost. But a pair kept against the odds, say because
    # its gradient is small, has a weight that can carry phi past fp16's range, where it makes that gradient whole.
    weigh_gradient = grad_MD.dtype == torch.float16
    down_side = needs.down_proj or needs.down_bias
    up_side = needs.x or needs.gate_up_proj or needs.gate_up_bias
    dx_MD = dalpha_M = dgate_up = ddown = dgate_up_bias = ddown_bias = None

    dh_M2F, scaled_phi_MF, dot_M = _through_activation(
        grad_MD,
        rows,
        scale_M,
        alpha_M if weigh_gradient else scale_M,
        saved,
        bank,
        recipe,
        gradients=down_side or up_side,
    )
    missing = None
    if completion is not None and (down_side or needs.gate_up_proj or needs.gate_up_bias):
        missing = completion.missing(grad_MD, scale_M, rows.offs_E)
    if needs.alpha:
        dalpha_M = dot_M + _bias_part(grad_MD, bank.down_bias, rows.offs_E)
    if needs.down_bias:
        ddown_bias = grouped_sum(grad_MD * scale_M.unsqueeze(-1), rows.offs_E).to(grad_MD.dtype)
    if needs.down_proj:
        # Multiplied in fp32, rounded once.
        grad_MD = grad_MD.mul_(weight_M.unsqueeze(-1)) if weigh_gradient else grad_MD
        ddown = grouped_wgrad(grad_MD, scaled_phi_MF, rows.offs_E)
    del grad_MD, scaled_phi_MF
    if needs.gate_up_bias:
        dgate_up_bias = grouped_sum(dh_M2F, rows.offs_E).to(dh_M2F.dtype)
    # Last what outlives this function: the gathered input is gone by then.
    if needs.gate_up_proj:
        dgate_up = grouped_wgrad(dh_M2F, saved.x_XD.index_select(0, rows.source_M), rows.offs_E)
    if needs.x:
        dx_MD = grouped_mm(dh_M2F, bank.gate_up_proj, rows.offs_E)
    if missing is not None:
        complete(
            missing, bank.down_proj, activations.get(recipe.activation), dgate_up, ddown, dgate_up_bias, ddown_bias
        )
    return RowGradients(dx_MD, dalpha_M, dgate_up, ddown, dgate_up_bias, ddown_bias)


def router_dots(
    grad_MD: Tensor, rows: Rows, saved: Activations, bank: Bank, recipe: Recipe, *, dtype: torch.dtype
) -> Tensor:
    """dalpha of some rows, (M,), and nothing else: <g, W_down phi + b_down>."""
    one_M = torch.ones_like(rows.row_M, dtype=dtype)
    *_, dot_M = _through_activation(grad_MD, rows, one_M, one_M, saved, bank, recipe, gradients=False)
    return dot_M + _bias_part(grad_MD, bank.down_bias, rows.offs_E)


def _through_activation(
    grad_MD: Tensor,
    rows: Rows,
    scale_M: Tensor,
    phi_scale_M: Tensor,
    saved: Activations,
    bank: Bank,
    recipe: Recipe,
    *,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh_M2F, scaled_phi_MF, <t, phi>_M) of some rows, from their arriving gradients."""
    t_MF = grouped_mm(grad_MD, bank.down_proj, rows.offs_E)
    h_2F, row_M = saved.h_R2F, None if rows.all_kept else rows.row_M
    if recipe.save == "input":
        x_MD = saved.x_XD.index_select(0, rows.source_M)
        h_2F, row_M = grouped_mm(x_MD, bank.gate_up_proj.transpose(1, 2), rows.offs_E), None
        if bank.gate_up_bias is not None:
            add_group_rows(h_2F, bank.gate_up_bias, rows.offs_E)
    act = activations.get(recipe.activation)
    return glu_backward(h_2F, row_M, t_MF, scale_M, phi_scale_M, act, gradients=gradients)


def _bias_part(grad_MD: Tensor, down_bias: Tensor | None, offs_E: Tensor) -> Tensor | float:
    """<g, b_down> of each row."""
    if down_bias is None:
        return 0.0
    dtype = torch.promote_types(grad_MD.dtype, torch.float32)
    bias_MD = add_group_rows(torch.zeros_like(grad_MD, dtype=dtype), down_bias.to(dtype), offs_E)
    return bias_MD.mul_(grad_MD).sum(dim=-1)
