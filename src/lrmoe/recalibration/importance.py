"""How much a token-expert pair matters, from scalars alone.

For pair u = (t, e) the contribution to the gradient of the down projection is the outer product
(alpha_u g_t) phi_u^T, whose squared Frobenius norm is R_u = alpha_u^2 ||g_t||^2 ||phi_u||^2 (the LRMoE paper's metric).
Everything here works with r = sqrt(R): sampling in proportion to r has the least variance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.config import Metric


def gradient_norms(metric: Metric, grad_TD: Tensor) -> Tensor:
    """What ``metric`` needs of the arriving gradient: its 2-norm per token, or the sum of magnitudes for
    ``abs_grad``. (T,), accumulated in fp32 or better: fp16 squares overflow at |g| = 4, D = 4096."""
    dtype = torch.float64 if grad_TD.dtype == torch.float64 else torch.float32
    order = 1 if metric == "abs_grad" else 2
    norm_T: Tensor = torch.linalg.vector_norm(grad_TD, ord=order, dim=-1, dtype=dtype)
    return norm_T


def pair_scores(metric: Metric, *, alpha_N: Tensor, grad_norm_N: Tensor, phi_norm_N: Tensor, noise_N: Tensor) -> Tensor:
    """r = sqrt(R) of each pair, (N,) fp64 and >= 0; the products of the norms cannot overflow there.

    Args:
        metric: ``lrm`` |alpha| ||g|| ||phi||, ``grad_norm`` ||g||, ``abs_grad`` sum |g|, ``alpha_grad`` |alpha| ||g||,
            ``forward`` |alpha| ||phi||, ``random`` the noise.
        alpha_N: routing weights.
        grad_norm_N: :func:`gradient_norms` of the pair's token.
        phi_norm_N: 2-norm of the down projection's input.
        noise_N: draws from [0, 1), used by ``random`` alone.
    """
    lrm_N = (alpha_N.to(torch.float64) * grad_norm_N * phi_norm_N).abs()
    if metric == "lrm":
        return lrm_N
    factors = {
        "grad_norm": (grad_norm_N,),
        "abs_grad": (grad_norm_N,),
        "alpha_grad": (alpha_N, grad_norm_N),
        "forward": (alpha_N, phi_norm_N),
        "random": (noise_N,),
    }[metric]
    score_N = factors[0].to(torch.float64)
    for factor_N in factors[1:]:
        score_N = score_N * factor_N
    # A pair whose contribution overflowed is told apart whatever the metric looks at: selection always keeps it.
    return torch.where(torch.isfinite(lrm_N), score_N.abs(), torch.nan)
