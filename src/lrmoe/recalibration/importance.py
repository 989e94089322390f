"""How much a token-expert pair matters, from scalars alone.

For pair u = (t, e) the contribution to the gradient of the down projection is the outer product
(alpha_u g_t) phi_u^T, whose squared Frobenius norm is R_u = alpha_u^2 ||g_t||^2 ||phi_u||^2 (the LRMoE paper's metric).
Everything here works with r = sqrt(R): sampling in proportion to r has the least variance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.config import Metric
from lrmoe.recalibration.norms import row_norms


def gradient_norms(metric: Metric, grad_TD: Tensor) -> Tensor:
    """What ``metric`` needs of the arriving gradient: its 2-norm per token, or the sum of magnitudes for
    ``abs_grad``. (T,) fp64, see :func:`row_norms`."""
    if metric == "abs_grad":
        norm_T: Tensor = torch.linalg.vector_norm(grad_TD, ord=1, dim=-1, dtype=torch.float64)
        return norm_T
    return row_norms(grad_TD)


def token_factors(metric: Metric, *, alpha_N: Tensor, grad_norm_N: Tensor) -> Tensor:
    """What the side that holds the tokens contributes to r, (N,) in the dtype of alpha (fp32 or fp64).

    It is the square root of the factor, so that the product of two fp32 numbers keeps its range in four bytes: that is
    how it travels to the rank that holds the expert. NaN where a number of the pair's gradient is not finite, whatever
    the metric looks at.

    Args:
        metric: ``lrm`` and ``alpha_grad`` |alpha| ||g||, ``grad_norm`` ||g||, ``abs_grad`` sum |g|, ``forward``
            |alpha|, ``random`` 1.
        alpha_N: routing weights.
        grad_norm_N: :func:`gradient_norms` of the pair's token.
    """
    alpha_root_N, grad_root_N = alpha_N.to(torch.float64).abs().sqrt(), grad_norm_N.to(torch.float64).sqrt()
    # Of the roots, as the product of two fp64 numbers need not be one.
    product_N = alpha_root_N * grad_root_N
    factor_N = {
        "lrm": product_N,
        "alpha_grad": product_N,
        "grad_norm": grad_root_N,
        "abs_grad": grad_root_N,
        "forward": alpha_root_N,
        "random": torch.ones_like(product_N),
    }[metric]
    return torch.where(torch.isfinite(product_N), factor_N, torch.nan).to(alpha_N.dtype)


def pair_scores(metric: Metric, *, token_factor_N: Tensor, phi_root_N: Tensor, noise_N: Tensor | None) -> Tensor:
    """r = sqrt(R) of each pair, (N,) fp64 and >= 0; products of norms of fp32 numbers stay in range there, and so do
    their squares.

    Not finite, and so kept by every selection, where a number that the pair contributes with is not, or, with fp64
    numbers, where r is none of fp64.

    Args:
        metric: ``lrm`` |alpha| ||g|| ||phi||, ``grad_norm`` ||g||, ``abs_grad`` sum |g|, ``alpha_grad`` |alpha| ||g||,
            ``forward`` |alpha| ||phi||, ``random`` the noise.
        token_factor_N: of :func:`token_factors`.
        phi_root_N: square root of the 2-norm of the down projection's input.
        noise_N: draws from [0, 1), used by ``random`` alone.
    """
    token_factor_N = token_factor_N.to(torch.float64)
    if metric in ("lrm", "forward"):
        return (token_factor_N * phi_root_N).square()
    score_N = token_factor_N.square()
    if metric == "random":
        assert noise_N is not None
        score_N = score_N * noise_N
    return torch.where(torch.isfinite(phi_root_N), score_N, torch.nan)
