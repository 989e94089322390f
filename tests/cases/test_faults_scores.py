"""Scores at the ends of the range, quotas that leave nothing, and what moves without a gradient.

T tokens, K choices, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.parallel import clip_grad_norm_, total_norm


@pytest.fixture(params=[False, True], ids=["subnormal numbers", "flush to zero"])
def flush(request: pytest.FixtureRequest) -> Iterator[bool]:
    if not torch.set_flush_denormal(request.param):
        pytest.skip("this processor does not flush to zero")
    yield request.param
    torch.set_flush_denormal(False)


class OneExpert:
    """One expert, and tokens of two numbers: the first opens the gate, the second is what phi is proportional to."""

    def __init__(self, phi_T: list[float], grad_T: list[float], dtype: torch.dtype, *, width: int = 2) -> None:
        self.x_TD = torch.tensor([[1.0, phi] for phi in phi_T], dtype=dtype)
        self.grad_TD = torch.tensor([[grad, grad] for grad in grad_T], dtype=dtype)
        self.gate_up_proj = nn.Parameter(torch.tensor([[[4.0, 0.0]] * width + [[0.0, 1.0]] * width], dtype=dtype))
        # Small, so that no output and no gradient overflows where phi or the gradient is large.
        self.down_proj = nn.Parameter(torch.full((1, 2, width), 2.0**-8, dtype=dtype))

    def train(self, step: int = 0, **config: Any) -> lrmoe.BackwardCall:
        num_tokens = len(self.x_TD)
        # As large as x, since it is to be the norms that decide: with fp64 or fp32 routing weights.
        alpha_TK = torch.ones(num_tokens, 1, dtype=torch.promote_types(self.x_TD.dtype, torch.float32))
        ids_TK = torch.zeros(num_tokens, 1, dtype=torch.int64)
        config = {"drop": 0.5, "router_grad": "kept", **config}
        with lrmoe.recording() as calls:
            out_TD = lrmoe.routed_experts(
                self.x_TD,
                ids_TK,
                alpha_TK,
                self.gate_up_proj,
                self.down_proj,
                config=LRMoEConfig(**config),
                step=step,
            )
            out_TD.backward(self.grad_TD)
        return calls[0]

    def kept(self, step: int = 0, **config: Any) -> list[bool]:
        kept: list[bool] = self.train(step, **config).kept_TK[:, 0].tolist()
        return kept


def ends() -> list[float]:
    """Where sums of squares in fp32 have left their range, up to the ends of that of the numbers."""
    return [2.0**-126, 2.0**-90, 2.0**-82, 2.0**66, 2.0**90, 2.0**125]


CASES = [(dtype, c) for dtype in (torch.bfloat16, torch.float32) for c in ends()]


@pytest.mark.parametrize(("dtype", "c"), CASES)
def test_s4_topq_keeps_the_larger_gradient(dtype: torch.dtype, c: float, flush: bool) -> None:
    """Two equal tokens with the gradients c and 1.5 c: the larger is kept, from the smallest normal numbers to the
    largest, and its importance is 1.5^2 times the other's."""
    call = OneExpert([1.0, 1.0], [c, 1.5 * c], dtype).train(selector="topq")
    assert call.kept_TK[:, 0].tolist() == [False, True]
    small, large = call.importance_TK[:, 0].tolist()
    assert large / small == pytest.approx(2.25, rel=1e-4)


@pytest.mark.parametrize(
    ("metric", "c"),
    [(metric, c) for metric in ("lrm", "grad_norm", "alpha_grad") for c in (2.0**-126, 2.0**-90, 2.0**66, 2.0**126)]
    + [("abs_grad", 2.0**127)],
)
def test_s4_every_metric_of_the_gradient(metric: Any, c: float) -> None:
    assert OneExpert([1.0, 1.0], [c, 1.5 * c], torch.float32).kept(selector="topq", metric=metric) == [False, True]


@pytest.mark.parametrize(("dtype", "c"), CASES)
@pytest.mark.parametrize("metric", ["lrm", "forward"])
def test_s4_topq_keeps_the_larger_phi(metric: Any, dtype: torch.dtype, c: float, flush: bool) -> None:
    """The same of the other factor, taken in the forward."""
    layer = OneExpert([c / 4, 1.5 * c / 4] if c > 1 else [c, 1.5 * c], [1.0, 1.0], dtype)
    assert layer.kept(selector="topq", metric=metric) == [False, True]


def test_s4_norms_beyond_fp32_of_finite_numbers() -> None:
    """64 numbers of 1e38 have the norm 8e38, which fp32 does not hold; half of the pairs are dropped all the same."""
    wide = OneExpert([1.0], [1.0], torch.float32, width=64)
    wide.x_TD = torch.tensor([[1.0, 0.25e38], [1.0, 0.5e38]])
    wide.grad_TD = torch.ones(2, 2)
    wide.down_proj = nn.Parameter(torch.full((1, 2, 64), 1e-4))
    call = wide.train(selector="topq")
    assert call.kept_TK[:, 0].tolist() == [False, True]
    assert call.importance_TK.isfinite().all()


@pytest.mark.parametrize("exponent", [-120, -100, -82, 70, 100, 120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_s4_pps_draws_what_it_draws_of_ordinary_gradients(dtype: torch.dtype, exponent: int, flush: bool) -> None:
    """Gradients times a power of two: the same draws, of which the row with a quarter of the importance's root gets a
    quarter."""
    ordinary = OneExpert([1.0, 1.0], [1.0, 3.0], dtype)
    scaled = OneExpert([1.0, 1.0], [2.0**exponent, 3.0 * 2.0**exponent], dtype)
    drawn = 0
    for step in range(60):
        kept = scaled.kept(step)
        assert kept == ordinary.kept(step)
        drawn += kept[0]
    # 15 expected; standard deviation 3.4.
    assert 5 <= drawn <= 27


@pytest.mark.parametrize("exponent", [-115, -80, 66, 100])
def test_s4_distances_from_the_mean(exponent: int, flush: bool) -> None:
    """remainder="mean" scores by the distance of phi from its mean: phi of 1, 1, 1 and 9 has the mean 3."""
    scale = 2.0**exponent
    layer = OneExpert([scale, scale, scale, 9 * scale], [1.0] * 4, torch.float32)
    call = layer.train(selector="topq", remainder="mean", drop=0.75)
    assert call.kept_TK[:, 0].tolist() == [False, False, False, True]
    assert (call.importance_TK[3, 0] / call.importance_TK[:3, 0]).tolist() == pytest.approx([9.0] * 3, rel=1e-4)


def test_s4_the_metrics_are_numbers() -> None:
    """Gradients of 1e20 gave an infinite sum R and kept every pair."""
    moe = lrmoe.MoE(dim=8, expert_dim=4, num_experts=4, top_k=2)
    model = nn.Sequential(moe)
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.5, guard_variance=None))
    x = torch.randn(32, 8)
    for scale in (1e20, 1e-30):
        moe.zero_grad()
        (model(x) * scale).sum().backward()
        found = recal.metrics()
        assert 0.45 < found["kept_share"] < 0.55
        assert 0.0 < found["kept_importance_share"] < 1.0
        recal.step()


def with_gradient(gradient: Any, dtype: torch.dtype) -> nn.Parameter:
    gradient = torch.as_tensor(gradient, dtype=dtype)
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    return parameter


@pytest.mark.parametrize(
    ("c", "dtype"),
    [(c, torch.float32) for c in (1e-30, 1e-36, 1e20, 1e37)]
    + [(c, torch.bfloat16) for c in (1e-30, 1e25)]
    + [(c, torch.float64) for c in (1e-200, 1e200, 1e300)],
)
def test_s4_clipping_at_the_ends_of_the_range(c: float, dtype: torch.dtype, flush: bool) -> None:
    """Gradients of the norms 3 c, 4 c and 12 c: together 13 c, and clipped they are those of c = 1."""
    items = [with_gradient([part * c / 8] * 64, dtype) for part in (3, 4, 12)]
    assert total_norm(items).item() == pytest.approx(13 * c, rel=1e-2 if dtype == torch.bfloat16 else 1e-5, abs=0.0)
    if c > 1:
        clip_grad_norm_(items, 1.0)
        found = [item.grad.double().norm().item() for item in items]  # type: ignore[union-attr]
        assert found == pytest.approx([3 / 13, 4 / 13, 12 / 13], rel=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_s4_clipping_to_a_norm_that_fp32_cannot_hold() -> None:
    """100 gradients of 2e38 have the norm 2e39, infinite in fp32: they are scaled and not set to zero."""
    item = with_gradient([2e38] * 100, torch.float32)
    assert clip_grad_norm_(item, 10.0).item() == math.inf
    assert item.grad is not None
    assert item.grad.tolist() == pytest.approx([1.0] * 100, rel=1e-3)
