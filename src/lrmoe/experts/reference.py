"""The obviously correct form: a loop over experts, differentiated by autograd. Oracle of the tests and of `doctor`.

T tokens, K choices, E experts, D model width, F expert width. Any dtype; meant for fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.config import RouterGrad
from lrmoe.experts import activations


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
) -> Tensor:
    """(T, D) output of the routed experts; its gradients are those of the recalibrated backward with a given choice.

    Args:
        topk_ids_TK: expert of each pair, -1 for none.
        gate_up_proj: (E, 2F, D), gate rows first (or interleaved, as ``activation`` says).
        down_proj: (E, D, F).
        pair_weight_TK: what the gradient of each pair's expert computation is multiplied by, 0 where dropped; all 1 if
            None. The output does not depend on it, and neither does the routing weights' gradient of kept pairs.
        live_TK: bool, pairs that take part in the router's gradient; by default those with an expert.
        router_grad: the routing weights' gradient of dropped pairs, as in :class:`lrmoe.LRMoEConfig`.
    """
    act = activations.get(activation)
    weight_TK = torch.ones_like(topk_weights_TK) if pair_weight_TK is None else pair_weight_TK
    live_TK = topk_ids_TK >= 0 if live_TK is None else live_TK
    y_TKD = x_TD.new_zeros(*topk_ids_TK.shape, x_TD.shape[1])
    for expert in range(gate_up_proj.shape[0]):
        token, choice = (topk_ids_TK == expert).nonzero(as_tuple=True)
        h = x_TD[token] @ gate_up_proj[expert].T
        h = h if gate_up_bias is None else h + gate_up_bias[expert]
        y = act.forward(*act.split(h)) @ down_proj[expert].T
        y = y if down_bias is None else y + down_bias[expert]
        # The value of y with w times its gradient: what a dropped (w = 0) or reweighted pair sends upstream.
        w = weight_TK[token, choice, None].to(y.dtype)
        y_TKD = y_TKD.index_put((token, choice), w * y + (1 - w) * y.detach())
    alpha_TK = torch.where(topk_ids_TK >= 0, topk_weights_TK.to(x_TD.dtype), 0)
    kept_TK = weight_TK != 0
    if router_grad == "exact":
        return (torch.where(live_TK, alpha_TK, alpha_TK.detach()).unsqueeze(-1) * y_TKD).sum(dim=1)
    kept = (torch.where(kept_TK & live_TK, alpha_TK, alpha_TK.detach()).unsqueeze(-1) * y_TKD).sum(dim=1)
    if router_grad == "kept":
        return kept
    # Dropped pairs share what they contributed together in proportion to alpha: as if each had their mean output.
    dropped_TK = torch.where(live_TK & ~kept_TK, alpha_TK, 0)
    together_T1 = dropped_TK.sum(dim=1, keepdim=True)
    mean_TD = ((dropped_TK.unsqueeze(-1) * y_TKD).sum(dim=1) / torch.where(together_T1 == 0, 1, together_T1)).detach()
    return kept + (together_T1 - together_T1.detach()) * mean_TD
