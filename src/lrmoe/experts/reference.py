"""The obviously correct form: a loop over experts, differentiated by autograd. Oracle of the tests and of `doctor`.

T tokens, K choices, E experts, D model width, F expert width. Any dtype; meant for fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.config import Remainder, RouterGrad
from lrmoe.ops import activations


def reference_experts(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    pair_weight_TK: Tensor | None = None,
    live_TK: Tensor | None = None,
    router_grad: RouterGrad = "exact",
    remainder: Remainder = "none",
) -> Tensor:
    """(T, D) output of the routed experts; its gradients are those of the recalibrated backward with a given choice.

    Args:
        topk_ids_TK: expert of each pair, -1 for none.
        gate_up_proj: (E, 2F, D), gate rows first (or interleaved, as ``activation`` says).
        down_proj: (E, D, F).
        pair_weight_TK: what the gradient of each pair's expert computation is multiplied by, 0 where dropped; all 1 if
            None. The output does not depend on it, and neither does the routing weights' gradient of kept pairs.
        live_TK: bool, pairs that take part in the router's gradient and in means; by default those with an expert.
        router_grad: the routing weights' gradient of dropped pairs, as in :class:`lrmoe.LRMoEConfig`.
        remainder: what stands for them in the gradients of the experts' weights, as there.
    """
    act = activations.get(activation)
    weight_TK = torch.ones_like(topk_weights_TK) if pair_weight_TK is None else pair_weight_TK
    live_TK = topk_ids_TK >= 0 if live_TK is None else live_TK
    y_TKD = x_TD.new_zeros(*topk_ids_TK.shape, x_TD.shape[1])
    remainder_TD = torch.zeros_like(x_TD)
    for expert in range(gate_up_proj.shape[0]):
        token, choice = (topk_ids_TK == expert).nonzero(as_tuple=True)
        h = x_TD[token] @ gate_up_proj[expert].T
        h = h if gate_up_bias is None else h + gate_up_bias[expert]
        phi = act.forward(*act.split(h))
        y = phi @ down_proj[expert].T
        y = y if down_bias is None else y + down_bias[expert]
        # The value of y with w times its gradient: what a dropped (w = 0) or reweighted pair sends upstream.
        w = weight_TK[token, choice, None].to(y.dtype)
        y_TKD = y_TKD.index_put((token, choice), w * y + (1 - w) * y.detach())
        real = live_TK[token, choice]
        if remainder == "mean" and real.any():
            # What the pairs miss of their alpha g, sent through one row with their mean operands.
            h_mean = x_TD[token[real]].mean(0).detach() @ gate_up_proj[expert].T
            h_mean = h_mean if gate_up_bias is None else h_mean + gate_up_bias[expert]
            phi_mean = phi[real].mean(0).detach()
            for slope, half in zip(_mean_slopes(act, h[real]), act.split(h_mean), strict=True):
                phi_mean = phi_mean + slope * (half - half.detach())
            y_mean = phi_mean @ down_proj[expert].T
            y_mean = y_mean if down_bias is None else y_mean + down_bias[expert]
            missing = (topk_weights_TK[token, choice, None].detach().to(y.dtype) * (1 - w))[real]
            remainder_TD = remainder_TD.index_add(0, token[real], missing * (y_mean - y_mean.detach()))
    alpha_TK = torch.where(topk_ids_TK >= 0, topk_weights_TK.to(x_TD.dtype), 0)
    kept_TK = weight_TK != 0
    if router_grad == "exact":
        return (torch.where(live_TK, alpha_TK, alpha_TK.detach()).unsqueeze(-1) * y_TKD).sum(dim=1) + remainder_TD
    kept = (torch.where(kept_TK & live_TK, alpha_TK, alpha_TK.detach()).unsqueeze(-1) * y_TKD).sum(dim=1) + remainder_TD
    if router_grad == "kept":
        return kept
    # Dropped pairs share what they contributed together in proportion to alpha: as if each had their mean output.
    dropped_TK = torch.where(live_TK & ~kept_TK, alpha_TK, 0)
    together_T1 = dropped_TK.sum(dim=1, keepdim=True)
    mean_TD = ((dropped_TK.unsqueeze(-1) * y_TKD).sum(dim=1) / torch.where(together_T1 == 0, 1, together_T1)).detach()
    return kept + (together_T1 - together_T1.detach()) * mean_TD


def _mean_slopes(act: activations.Activation, h_R2F: Tensor) -> tuple[Tensor, Tensor]:
    """(F,) each: the means over rows of the activation's derivatives, by gate and by up, from autograd."""
    with torch.enable_grad():
        halves = [half.detach().requires_grad_() for half in act.split(h_R2F)]
        gate, up = torch.autograd.grad(act.forward(*halves).sum(), halves)
    return gate.mean(0), up.mean(0)
