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


def token_factors(metric: Metric, *, alpha_N: Tensor, grad_norm_N: Tensor) -> Tensor:
    """What the side that holds the tokens contributes to r, (N,) in the dtype of alpha (fp32 or fp64).

    It is the square root of the factor, so that the product of two fp32 numbers keeps its range in four bytes: that is
    how it travels to the rank that holds the expert. NaN where the pair's gradient overflowed, whatever the metric
    looks at.

    Args:
        metric: ``lrm`` and ``alpha_grad`` |alpha| ||g||, ``grad_norm`` ||g||, ``abs_grad`` sum |g|, ``forward``
            |alpha|, ``random`` 1.
        alpha_N: routing weights.
        grad_norm_N: :func:`gradient_norms` of the pair's token.
    """
    product_N = (alpha_N.to(torch.float64) * grad_norm_N).abs()
    factor_N = {
        "lrm": product_N,
        "alpha_grad": product_N,
        "grad_norm": grad_norm_N,
        "abs_grad": grad_norm_N,
        "forward": alpha_N.abs(),
        "random": torch.ones_like(alpha_N),
    }[metric]
    finite_N = torch.isfinite(product_N)
    return torch.where(finite_N, factor_N.to(torch.float64), torch.nan).sqrt().to(alpha_N.dtype)


def pair_scores(metric: Metric, *, token_factor_N: Tensor, phi_norm_N: Tensor, noise_N: Tensor | None) -> Tensor:
    """r = sqrt(R) of each pair, (N,) fp64 and >= 0; the products of the norms cannot overflow there.

    NaN, which selection always keeps, where the pair's contribution overflowed.

    Args:
        metric: ``lrm`` |alpha| ||g|| ||phi||, ``grad_norm`` ||g||, ``abs_grad`` sum |g|, ``alpha_grad`` |alpha| ||g||,
            ``forward`` |alpha| ||phi||, ``random`` the noise.
        token_factor_N: of :func:`token_factors`.
        phi_norm_N: 2-norm of the down projection's input.
        noise_N: draws from [0, 1), used by ``random`` alone.
    """
    score_N = token_factor_N.to(torch.float64).square()
    if metric in ("lrm", "forward"):
        return score_N * torch.where(torch.isfinite(phi_norm_N), phi_norm_N, torch.nan)
    if metric == "random":
        assert noise_N is not None
        score_N = score_N * noise_N
    return torch.where(torch.isfinite(phi_norm_N), score_N, torch.nan)
