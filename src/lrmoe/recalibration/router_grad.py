"""The routing-weight gradient of pairs the backward left out, from what is known without computing them."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_rule(alpha_TK: Tensor, dalpha_TK: Tensor, kept_TK: Tensor, live_TK: Tensor, grad_dot_out_T: Tensor) -> Tensor:
    """Completes ``dalpha_TK`` for the dropped pairs of each token.

    The layer's output is o_t = sum_k alpha_k y_k, so sum_k alpha_k dalpha_k = <g_t, o_t> holds exactly. What the kept
    pairs leave of it is exact for a single dropped pair; several share it in proportion to alpha, which gives each
    the same dalpha.

    Args:
        alpha_TK: routing weights, fp32 or fp64.
        dalpha_TK: exact where kept, anything elsewhere.
        kept_TK: bool.
        live_TK: bool, pairs that have an expert and a real token; the others get 0.
        grad_dot_out_T: <g_t, o_t>.
    """
    known_TK = torch.where(kept_TK, dalpha_TK, 0)
    dropped_TK = live_TK & ~kept_TK
    alpha_TK = torch.where(live_TK, alpha_TK, 0)
    left_T = grad_dot_out_T - (alpha_TK * known_TK).sum(dim=-1)
    weight_T = torch.where(dropped_TK, alpha_TK, 0).sum(dim=-1)
    # Pairs whose weights vanish beside the others' left nothing in the output but its rounding, and a quotient of that
    # can be as large as any number: the rule says nothing of them.
    resolution_T = torch.finfo(alpha_TK.dtype).eps * alpha_TK.abs().sum(dim=-1)
    shared_T = torch.where(weight_T.abs() <= resolution_T, 0, left_T / weight_T)
    return torch.where(dropped_TK, shared_T.unsqueeze(-1), known_TK)
