"""The recalibrated backward of one process: score, select, compact, grouped GEMMs on the kept rows.

T tokens, K choices, N = T*K rows sorted by expert, M kept rows, E experts, D model width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from lrmoe.config import Metric
from lrmoe.experts.compacted import Activations, Bank, Needs, Rows, kept_gradients, router_dots
from lrmoe.experts.meter import BackwardCall, BackwardStats, Meter, is_recording, record
from lrmoe.experts.recipe import Recipe
from lrmoe.experts.remainder import Completion, Means, summed_gradients
from lrmoe.experts.sequences import kept_by_sequence
from lrmoe.ops.permute import add_to_tokens
from lrmoe.recalibration import draws
from lrmoe.recalibration.design import design, rank
from lrmoe.recalibration.importance import gradient_norms, pair_scores, token_factors
from lrmoe.recalibration.router_grad import sum_rule
from lrmoe.recalibration.segments import Segments
from lrmoe.recalibration.selection import Kept, keep_all, select


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What the forward left for the backward. ``h_N2F`` is empty with save="input"; ``out_TD`` is empty unless the sum
    rule needs it; ``position`` is (seed, step, layer, microbatch)."""

    x_TD: Tensor
    out_TD: Tensor
    alpha_TK: Tensor
    bank: Bank
    token_mask_T: Tensor | None
    sequence_T: Tensor | None
    h_N2F: Tensor
    phi_root_N: Tensor
    means_EX: Tensor
    pair_N: Tensor
    offs_E: Tensor
    load_E: Tensor
    quota_E: Tensor
    position: tuple[int, int, int, int]


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def backward_pass(grad_TD: Tensor, saved: Saved, recipe: Recipe, needs: Needs, meter: Meter | None) -> Gradients:
    """Gradients of (x, alpha, gate_up_proj, down_proj, gate_up_bias, down_bias); None where not needed.

    1. Each pair gets a score from scalars: the norm of its token's gradient, its routing weight, the norm of phi.
    2. The selector keeps as many pairs of each expert as its quota, each with a weight.
    3. What was kept is reported to the meter and, where somebody records, whole.
    4. The kept rows are gathered and go through the grouped products.
    5. Gradients of rows are added up by token; the router's are completed for what was dropped.
    """
    # A gradient expanded from one number has stride 0, which grouped GEMMs refuse.
    grad_TD = grad_TD.contiguous()
    with record_function("lrmoe::select"):
        ordered = _order_rows(saved)
        score_N = _scores(recipe.metric, grad_TD, saved, ordered)
        all_kept = bool((saved.quota_E == saved.load_E).all())
        if all_kept:
            kept = keep_all(ordered.segments)
        else:
            kept = select(
                score_N,
                ordered.segments,
                saved.quota_E,
                selector=recipe.selector,
                source=ordered.source,
                error_budget=recipe.error_budget,
                pooled=recipe.quota == "pooled",
            )
    if meter is not None or is_recording():
        _report(meter, kept, score_N, grad_TD, saved, recipe, ordered)
    with record_function("lrmoe::index"):
        pair_M = ordered.pair_N.index_select(0, kept.index_M)
        rows = Rows(
            ordered.row_N.index_select(0, kept.index_M),
            pair_M // saved.alpha_TK.shape[1],
            kept.count_E.cumsum(0).to(torch.int32),
            # Every saved row, in its order: nothing to gather.
            all_kept=all_kept and saved.token_mask_T is None,
        )
    return _gradients(grad_TD, saved, recipe, needs, rows, pair_M, kept, ordered, all_kept=all_kept)


@dataclass(frozen=True, slots=True)
class _Ordered:
    """Sorted rows as selection sees them: each expert's real pairs, then, after all experts, the rows of nobody (pairs
    without an expert, masked tokens). ``row_N`` is their place among the saved rows, ``segments`` whose they are."""

    row_N: Tensor
    pair_N: Tensor
    segments: Segments
    source: draws.Source


def _order_rows(saved: Saved) -> _Ordered:
    num_experts = saved.load_E.numel()
    row_N = torch.arange(saved.pair_N.numel(), device=saved.pair_N.device)
    if saved.token_mask_T is not None:
        expert_N = torch.bucketize(row_N, saved.offs_E.to(torch.int64), right=True)
        real_N = saved.token_mask_T[saved.pair_N // saved.alpha_TK.shape[1]]
        row_N = torch.argsort(torch.where(real_N, expert_N, num_experts), stable=True)
    return _Ordered(
        row_N,
        saved.pair_N.index_select(0, row_N),
        Segments.from_loads(saved.load_E, row_N.numel()),
        draws.Source.of_all(saved.position, num_experts, row_N.device),
    )


def _scores(metric: Metric, grad_TD: Tensor, saved: Saved, ordered: _Ordered) -> Tensor:
    alpha_N = saved.alpha_TK.reshape(-1)[ordered.pair_N]
    grad_norm_N = gradient_norms(metric, grad_TD).index_select(0, ordered.pair_N // saved.alpha_TK.shape[1])
    return pair_scores(
        metric,
        token_factor_N=token_factors(metric, alpha_N=alpha_N, grad_norm_N=grad_norm_N),
        phi_root_N=saved.phi_root_N.index_select(0, ordered.row_N),
        noise_N=row_noise(ordered.source, ordered.segments) if metric == "random" else None,
    )


def row_noise(source: draws.Source, segments: Segments) -> Tensor:
    """A draw from [0, 1) for each row, (N,) fp64."""
    place_N = segments.position_N + segments.spread(source.first_S)
    return draws.uniform(segments.spread(source.keys(draws.SCORE)), place_N)


def _gradients(
    grad_TD: Tensor,
    saved: Saved,
    recipe: Recipe,
    needs: Needs,
    rows: Rows,
    pair_M: Tensor,
    kept: Kept,
    ordered: _Ordered,
    *,
    all_kept: bool,
) -> Gradients:
    num_tokens, top_k = saved.alpha_TK.shape
    alpha_N = saved.alpha_TK.reshape(-1)
    activations = Activations(saved.x_TD, saved.h_N2F)
    found = kept_gradients(
        grad_TD.index_select(0, rows.source_M),
        alpha_N[pair_M],
        kept.weight_M.to(alpha_N.dtype),
        rows,
        activations,
        saved.bank,
        recipe,
        needs,
        _remainder(grad_TD, saved, ordered) if recipe.remainder == "mean" and not all_kept else None,
    )
    dx = None if found.dx_MD is None else add_to_tokens(found.dx_MD, pair_M, num_tokens, top_k)
    dalpha = None
    if found.dalpha_M is not None:
        dalpha = _router_gradient(grad_TD, found.dalpha_M, saved, activations, recipe, rows, pair_M, ordered)
    return dx, dalpha, found.gate_up_proj, found.down_proj, found.gate_up_bias, found.down_bias


def _remainder(grad_TD: Tensor, saved: Saved, ordered: _Ordered) -> Completion:
    alpha_N = saved.alpha_TK.reshape(-1)[ordered.pair_N]
    token_N = ordered.pair_N // saved.alpha_TK.shape[1]
    # The last group is nobody's.
    grad_SD = summed_gradients(grad_TD, alpha_N, token_N, ordered.segments.count_S)
    return Completion(grad_SD[:-1], Means.unpacked(saved.means_EX, saved.bank.down_proj.shape[2]))


def _router_gradient(
    grad_TD: Tensor,
    dalpha_M: Tensor,
    saved: Saved,
    activations: Activations,
    recipe: Recipe,
    rows: Rows,
    pair_M: Tensor,
    ordered: _Ordered,
) -> Tensor:
    """d(routing weights), (T, K): exact for kept pairs, by ``recipe.router_grad`` for dropped ones."""
    alpha_TK = saved.alpha_TK
    dalpha_N = alpha_TK.new_zeros(alpha_TK.numel())
    dalpha_N[pair_M] = dalpha_M
    if recipe.router_grad == "kept" or rows.all_kept:
        return dalpha_N.view_as(alpha_TK)
    live_N = torch.zeros(alpha_TK.numel(), dtype=torch.bool, device=alpha_TK.device)
    live_N[ordered.pair_N] = ordered.segments.live_N
    kept_N = torch.zeros_like(live_N)
    kept_N[pair_M] = True
    if recipe.router_grad == "sum_rule":
        return complete_by_sum_rule(grad_TD, saved.out_TD, alpha_TK, dalpha_N, kept_N, live_N)
    chosen_N = (live_N & ~kept_N)[saved.pair_N]
    row_M = chosen_N.nonzero().squeeze(-1)
    before_N = torch.cat([chosen_N.new_zeros(1, dtype=torch.int64), chosen_N.cumsum(0)])
    dropped_M = saved.pair_N[row_M]
    offs_E = before_N[saved.offs_E.to(torch.int64)].to(torch.int32)
    dropped = Rows(row_M, dropped_M // alpha_TK.shape[1], offs_E)
    dropped_grad_MD = grad_TD.index_select(0, dropped.source_M)
    dalpha_N[dropped_M] = router_dots(dropped_grad_MD, dropped, activations, saved.bank, recipe, dtype=alpha_TK.dtype)
    return dalpha_N.view_as(alpha_TK)


def complete_by_sum_rule(
    grad_TD: Tensor, out_TD: Tensor, alpha_TK: Tensor, dalpha_N: Tensor, kept_N: Tensor, live_N: Tensor
) -> Tensor:
    """:func:`sum_rule` from the layer's own output and gradient."""
    dot_T = (grad_TD.to(alpha_TK.dtype) * out_TD.to(alpha_TK.dtype)).sum(dim=-1)
    shape = alpha_TK.shape
    return sum_rule(alpha_TK, dalpha_N.view(shape), kept_N.view(shape), live_N.view(shape), dot_T)


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
        lrm_N = score_N if recipe.metric == "lrm" else _scores("lrm", grad_TD, saved, ordered)
        meter.add(backward_stats(kept, lrm_N, segments, saved.load_E, by_lrm=recipe.metric == "lrm"))
        if saved.sequence_T is not None:
            top_k = saved.alpha_TK.shape[1]
            token_N = torch.where(segments.live_N, ordered.pair_N // top_k, -1)
            meter.add_sequences(kept_by_sequence(saved.sequence_T, token_N, token_N.index_select(0, kept.index_M)))
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


def backward_stats(kept: Kept, lrm_N: Tensor, segments: Segments, load_E: Tensor, *, by_lrm: bool) -> BackwardStats:
    """What a backward kept, told in the paper's R (``lrm_N`` its square roots); ``by_lrm``: it was selected by R."""
    variance_E = kept.variance_E if by_lrm else design(rank(lrm_N, segments), kept.count_E).variance_E
    importance_N = torch.where(segments.live_N, lrm_N.square(), 0.0)
    return BackwardStats(
        load_E=load_E,
        kept_E=kept.count_E,
        importance_total=importance_N.sum(),
        importance_kept=importance_N[kept.index_M].sum(),
        variance=variance_E.sum(),
    )
