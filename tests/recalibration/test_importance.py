"""The scores: formulas, precision, range."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lrmoe.config import Metric
from lrmoe.recalibration.importance import gradient_norms, pair_scores, token_factors


def scores(metric: Metric, *, alpha_N: Tensor, grad_norm_N: Tensor, phi_norm_N: Tensor, noise_N: Tensor) -> Tensor:
    factor_N = token_factors(metric, alpha_N=alpha_N, grad_norm_N=grad_norm_N)
    assert factor_N.dtype == alpha_N.dtype
    return pair_scores(metric, token_factor_N=factor_N, phi_root_N=phi_norm_N.sqrt(), noise_N=noise_N)


def test_fp16_gradients_do_not_overflow() -> None:
    # The sum of squares is 65536, the square of the norm is 4^2 * 4096: both beyond fp16.
    grad_TD = torch.full((3, 4096), 4.0, dtype=torch.float16)
    assert torch.equal(gradient_norms("lrm", grad_TD), torch.full((3,), 256.0, dtype=torch.float64))
    assert torch.equal(gradient_norms("abs_grad", grad_TD), torch.full((3,), 16384.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_come_in_fp64(dtype: torch.dtype) -> None:
    grad_TD = torch.randn(5, 3000).to(dtype)
    for metric, order in (("lrm", 2), ("abs_grad", 1), ("grad_norm", 2)):
        found = gradient_norms(metric, grad_TD)  # type: ignore[arg-type]
        assert found.dtype == torch.float64
        assert torch.allclose(found, grad_TD.double().norm(p=order, dim=-1), rtol=1e-6)


def test_small_losses_do_not_vanish() -> None:
    # A mean over many tokens of a tiny loss, or a scaled one.
    for scale in (1e-15, 1e15):
        grad_TD = torch.randn(4, 64) * scale
        found = gradient_norms("lrm", grad_TD)
        assert torch.allclose(found.double(), grad_TD.double().norm(dim=-1), rtol=1e-5, atol=0)


def test_products_of_the_largest_fp32_norms_stay_finite() -> None:
    huge = torch.tensor([3e38], dtype=torch.float32)
    score = scores("lrm", alpha_N=huge, grad_norm_N=huge, phi_norm_N=huge, noise_N=huge)
    assert score.dtype == torch.float64
    assert score.square().isfinite().all()
    tiny = torch.tensor([1e-38], dtype=torch.float32)
    assert (scores("lrm", alpha_N=tiny, grad_norm_N=tiny, phi_norm_N=tiny, noise_N=tiny).square() > 0).all()


def test_formulas() -> None:
    alpha, g, phi, noise = torch.tensor([-0.5]), torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([0.25])
    wanted = {"lrm": 3.0, "grad_norm": 2.0, "abs_grad": 2.0, "alpha_grad": 1.0, "forward": 1.5, "random": 0.25}
    for metric, value in wanted.items():
        found = scores(metric, alpha_N=alpha, grad_norm_N=g, phi_norm_N=phi, noise_N=noise)  # type: ignore[arg-type]
        assert found.tolist() == pytest.approx([value], rel=2e-7)


@pytest.mark.parametrize("metric", ["lrm", "grad_norm", "abs_grad", "alpha_grad", "forward", "random"])
def test_an_overflow_shows_whatever_the_metric_looks_at(metric: Metric) -> None:
    fine = torch.ones(3)
    for name in ("alpha_N", "grad_norm_N", "phi_norm_N"):
        for value in (math.nan, math.inf):
            factors = dict.fromkeys(("alpha_N", "grad_norm_N", "phi_norm_N", "noise_N"), fine)
            factors[name] = torch.tensor([1.0, value, 1.0])
            assert scores(metric, **factors).isfinite().tolist() == [True, False, True]
