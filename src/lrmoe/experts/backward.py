"""The recalibrated backward: score, select, compact, grouped GEMMs on the kept rows.

T tokens, K choices, N = T*K rows sorted by expert, M kept rows, E experts, D model width, F expert width. With
t = W_down^T g and s = alpha * weight of a kept pair:

    dalpha = <t, phi> (+ <g, b_down>)      dphi = s t      dW_down = sum s g phi^T
    (dgate, dup) = activation backward     dW_gate_up = sum dh x^T      dx = W_gate_up^T dh
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from lrmoe.config import Metric, RouterGrad, Save, Selector
from lrmoe.experts import activations
from lrmoe.experts.meter import BackwardCall, BackwardStats, Meter, is_recording, record
from lrmoe.ops.glu import glu_backward
from lrmoe.ops.grouped_mm import add_group_rows, grouped_mm, grouped_sum, grouped_wgrad
from lrmoe.ops.permute import add_to_tokens
from lrmoe.recalibration import draws
from lrmoe.recalibration.importance import gradient_norms, pair_scores
from lrmoe.recalibration.router_grad import sum_rule
from lrmoe.recalibration.segments import Segments
from lrmoe.recalibration.selection import Kept, design, keep_all, rank, select


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What the forward left for the backward. ``h_N2F`` is empty with save="input"; ``out_TD`` is empty unless the sum
    rule needs it; ``position`` is (seed, step, layer, microbatch)."""

    x_TD: Tensor
    out_TD: Tensor
    alpha_TK: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    token_mask_T: Tensor | None
    h_N2F: Tensor
    phi_sq_N: Tensor
    pair_N: Tensor
    offs_E: Tensor
    load_E: Tensor
    quota_E: Tensor
    position: tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The parts of the configuration that the backward reads."""

    activation: str
    selector: Selector
    metric: Metric
    router_grad: RouterGrad
    save: Save
    error_budget: float | None


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
class Rows:
    """A choice of sorted rows, expert by expert: their place ``row_M`` among the N saved rows, their ``pair_M``, and
    the int32 ends ``offs_E`` of the experts' groups."""

    row_M: Tensor
    pair_M: Tensor
    offs_E: Tensor
    everything: bool = False


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def backward_pass(grad_TD: Tensor, saved: Saved, recipe: Recipe, needs: Needs, meter: Meter | None) -> Gradients:
    """Gradients of (x, alpha, gate_up_proj, down_proj, gate_up_bias, down_bias); None where not needed."""
    # A gradient expanded from one number has stride 0, which grouped GEMMs refuse.
    grad_TD = grad_TD.contiguous()
    with record_function("lrmoe::select"):
        ordered = _order_rows(saved)
        score_N = _scores(recipe.metric, grad_TD, saved, ordered)
        everything = bool((saved.quota_E == saved.load_E).all())
        if everything:
            kept = keep_all(ordered.segments)
        else:
            kept = select(
                score_N,
                ordered.segments,
                saved.quota_E,
                selector=recipe.selector,
                position=saved.position,
                error_budget=recipe.error_budget,
            )
    if meter is not None or is_recording():
        _report(meter, kept, score_N, grad_TD, saved, recipe, ordered)
    with record_function("lrmoe::index"):
        rows = Rows(
            ordered.row_N.index_select(0, kept.index_M),
            ordered.pair_N.index_select(0, kept.index_M),
            kept.count_E.cumsum(0).to(torch.int32),
            # Every saved row, in its order: nothing to gather.
            everything=everything and saved.token_mask_T is None,
        )
    return _gradients(grad_TD, saved, recipe, needs, rows, kept, ordered)


@dataclass(frozen=True, slots=True)
class _Ordered:
    """Sorted rows as selection sees them: each expert's real pairs, then, after all experts, the rows of nobody (pairs
    without an expert, masked tokens). ``row_N`` is their place among the saved rows, ``segments`` whose they are."""

    row_N: Tensor
    pair_N: Tensor
    segments: Segments


def _order_rows(saved: Saved) -> _Ordered:
    row_N = torch.arange(saved.pair_N.numel(), device=saved.pair_N.device)
    if saved.token_mask_T is not None:
        num_experts, top_k = saved.load_E.numel(), saved.alpha_TK.shape[1]
        expert_N = torch.bucketize(row_N, saved.offs_E.to(torch.int64), right=True)
        real_N = saved.token_mask_T[saved.pair_N // top_k]
        row_N = torch.argsort(torch.where(real_N, expert_N, num_experts), stable=True)
    segments = Segments.from_loads(saved.load_E, row_N.numel())
    return _Ordered(row_N, saved.pair_N.index_select(0, row_N), segments)


def _scores(metric: Metric, grad_TD: Tensor, saved: Saved, ordered: _Ordered) -> Tensor:
    top_k = saved.alpha_TK.shape[1]
    noise_N = saved.phi_sq_N
    if metric == "random":
        key_E = draws.expert_keys(saved.position, saved.load_E.numel(), draws.SCORE, noise_N.device)
        noise_N = draws.uniform(ordered.segments.spread(key_E), ordered.segments.position_N)
    return pair_scores(
        metric,
        alpha_N=saved.alpha_TK.reshape(-1)[ordered.pair_N],
        grad_norm_N=gradient_norms(metric, grad_TD).index_select(0, ordered.pair_N // top_k),
        phi_norm_N=saved.phi_sq_N.sqrt().index_select(0, ordered.row_N),
        noise_N=noise_N,
    )


def _gradients(
    grad_TD: Tensor, saved: Saved, recipe: Recipe, needs: Needs, rows: Rows, kept: Kept, ordered: _Ordered
) -> Gradients:
    num_tokens, top_k = saved.alpha_TK.shape
    token_M = rows.pair_M // top_k
    alpha_N = saved.alpha_TK.reshape(-1)
    alpha_M, weight_M = alpha_N[rows.pair_M], kept.weight_M.to(alpha_N.dtype)
    scale_M = alpha_M * weight_M
    # In the down projection's wgrad the scale goes with phi, at no cost. But a pair kept against the odds, say because
    # its gradient is small, has a weight that can carry phi past fp16's range, where it makes that gradient whole.
    weigh_gradient = grad_TD.dtype == torch.float16
    down_side = needs.down_proj or needs.down_bias
    up_side = needs.x or needs.gate_up_proj or needs.gate_up_bias
    dx = dalpha = dgate_up = ddown = dgate_up_bias = ddown_bias = None

    grad_MD = grad_TD.index_select(0, token_M)
    dh_M2F, scaled_phi_MF, dalpha_M = _through_activation(
        grad_MD, rows, scale_M, alpha_M if weigh_gradient else scale_M, saved, recipe, gradients=down_side or up_side
    )
    if needs.alpha:
        dalpha = _router_gradient(grad_TD, grad_MD, dalpha_M, saved, recipe, rows, ordered)
    if needs.down_bias:
        ddown_bias = grouped_sum(grad_MD * scale_M.unsqueeze(-1), rows.offs_E).to(grad_TD.dtype)
    if needs.down_proj:
        # Multiplied in fp32, rounded once.
        grad_MD = grad_MD.mul_(weight_M.unsqueeze(-1)) if weigh_gradient else grad_MD
        ddown = grouped_wgrad(grad_MD, scaled_phi_MF, rows.offs_E)
    del grad_MD, scaled_phi_MF
    if needs.gate_up_bias:
        dgate_up_bias = grouped_sum(dh_M2F, rows.offs_E).to(grad_TD.dtype)
    if needs.x:
        dx = add_to_tokens(grouped_mm(dh_M2F, saved.gate_up_proj, rows.offs_E), rows.pair_M, num_tokens, top_k)
    if needs.gate_up_proj:
        dgate_up = grouped_wgrad(dh_M2F, saved.x_TD.index_select(0, token_M), rows.offs_E)
    return dx, dalpha, dgate_up, ddown, dgate_up_bias, ddown_bias


def _through_activation(
    grad_MD: Tensor,
    rows: Rows,
    scale_M: Tensor,
    phi_scale_M: Tensor,
    saved: Saved,
    recipe: Recipe,
    *,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh_M2F, scaled_phi_MF, <t, phi>_M) of some rows, from their arriving gradients."""
    t_MF = grouped_mm(grad_MD, saved.down_proj, rows.offs_E)
    h_2F, row_M = saved.h_N2F, None if rows.everything else rows.row_M
    if recipe.save == "input":
        x_MD = saved.x_TD.index_select(0, rows.pair_M // saved.alpha_TK.shape[1])
        h_2F, row_M = grouped_mm(x_MD, saved.gate_up_proj.transpose(1, 2), rows.offs_E), None
        if saved.gate_up_bias is not None:
            add_group_rows(h_2F, saved.gate_up_bias, rows.offs_E)
    act = activations.get(recipe.activation)
    return glu_backward(h_2F, row_M, t_MF, scale_M, phi_scale_M, act, gradients=gradients)


def _router_gradient(
    grad_TD: Tensor, grad_MD: Tensor, dalpha_M: Tensor, saved: Saved, recipe: Recipe, rows: Rows, ordered: _Ordered
) -> Tensor:
    """d(routing weights), (T, K): exact for kept pairs, by ``recipe.router_grad`` for dropped ones."""
    alpha_TK, top_k = saved.alpha_TK, saved.alpha_TK.shape[1]
    dalpha_N = alpha_TK.new_zeros(alpha_TK.numel())
    dalpha_N[rows.pair_M] = dalpha_M + _bias_part(grad_MD, saved.down_bias, rows.offs_E)
    if recipe.router_grad == "kept" or rows.everything:
        return dalpha_N.view_as(alpha_TK)
    live_N = torch.zeros(alpha_TK.numel(), dtype=torch.bool, device=alpha_TK.device)
    live_N[ordered.pair_N] = ordered.segments.live_N
    kept_N = torch.zeros_like(live_N)
    kept_N[rows.pair_M] = True
    if recipe.router_grad == "sum_rule":
        dot_T = (grad_TD.to(alpha_TK.dtype) * saved.out_TD.to(alpha_TK.dtype)).sum(dim=-1)
        return sum_rule(alpha_TK, dalpha_N.view_as(alpha_TK), kept_N.view_as(alpha_TK), live_N.view_as(alpha_TK), dot_T)
    chosen_N = (live_N & ~kept_N)[saved.pair_N]
    row_M = chosen_N.nonzero().squeeze(-1)
    before_N = torch.cat([chosen_N.new_zeros(1, dtype=torch.int64), chosen_N.cumsum(0)])
    dropped = Rows(row_M, saved.pair_N[row_M], before_N[saved.offs_E.to(torch.int64)].to(torch.int32))
    dropped_grad_MD = grad_TD.index_select(0, dropped.pair_M // top_k)
    one_M = torch.ones_like(dropped.pair_M, dtype=alpha_TK.dtype)
    *_, dalpha_M = _through_activation(dropped_grad_MD, dropped, one_M, one_M, saved, recipe, gradients=False)
    dalpha_N[dropped.pair_M] = dalpha_M + _bias_part(dropped_grad_MD, saved.down_bias, dropped.offs_E)
    return dalpha_N.view_as(alpha_TK)


def _bias_part(grad_MD: Tensor, down_bias: Tensor | None, offs_E: Tensor) -> Tensor | float:
    """<g, b_down> of each row."""
    if down_bias is None:
        return 0.0
    dtype = torch.promote_types(grad_MD.dtype, torch.float32)
    bias_MD = add_group_rows(torch.zeros_like(grad_MD, dtype=dtype), down_bias.to(dtype), offs_E)
    return bias_MD.mul_(grad_MD).sum(dim=-1)


def _report(
    meter: Meter | None,
    kept: Kept,
    score_N: Tensor,
    grad_TD: Tensor,
    saved: Saved,
    recipe: Recipe,
    ordered: _Ordered,
) -> None:
    segments = ordered.segments
    if meter is not None:
        # Captured importance is told in the paper's R whatever the selection went by.
        lrm_N, variance_E = score_N, kept.variance_E
        if recipe.metric != "lrm":
            lrm_N = _scores("lrm", grad_TD, saved, ordered)
            variance_E = design(rank(lrm_N, segments), kept.count_E).variance_E
        importance_N = torch.where(segments.live_N, lrm_N.square(), 0.0)
        meter.add(
            BackwardStats(
                load_E=saved.load_E,
                kept_E=kept.count_E,
                importance_total=importance_N.sum(),
                importance_kept=importance_N[kept.index_M].sum(),
                variance=variance_E.sum(),
            )
        )
    if is_recording():
        _, step, layer, microbatch = saved.position
        shape = saved.alpha_TK.shape
        blank_N = torch.zeros(shape.numel(), dtype=torch.float64, device=score_N.device)
        live_score_N = torch.where(segments.live_N, score_N, 0.0)
        pair_M = ordered.pair_N[kept.index_M]
        record(
            BackwardCall(
                step=step,
                layer=layer,
                microbatch=microbatch,
                kept_TK=blank_N.bool().index_fill(0, pair_M, True).view(shape),
                weight_TK=blank_N.index_copy(0, pair_M, kept.weight_M).float().view(shape),
                importance_TK=blank_N.index_copy(0, ordered.pair_N, live_score_N.square()).view(shape),
                quota_E=saved.quota_E.clone(),
                load_E=saved.load_E.clone(),
            )
        )
