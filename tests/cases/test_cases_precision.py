"""Mixed dtypes, half precision, overflow, and gates that underflow."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.fixtures import DIM, layer, standard
from experts.problem import error, expected, run
from torch import Tensor, nn

import lrmoe
from lrmoe import LRMoEConfig, TopKRouter
from lrmoe.ops import grouped_mm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_case_08_every_mix_of_dtypes(autocast: torch.dtype | None) -> None:
    """x, weights and routing weights each in fp32, bf16 or fp16, autocast off or on: one compute dtype (autocast's,
    else the weights'), gradients in the dtype of what they belong to, importance in fp64, and every number within
    that dtype's rounding of the fp64 reference."""
    base = standard()
    for x_dtype, w_dtype, alpha_dtype in itertools.product(DTYPES, repeat=3):
        problem = replace(
            base,
            x_TD=base.x_TD.to(x_dtype),
            alpha_TK=base.alpha_TK.to(alpha_dtype),
            gate_up_proj=base.gate_up_proj.to(w_dtype),
            down_proj=base.down_proj.to(w_dtype),
            grad_TD=base.grad_TD.to(x_dtype),
        )
        compute = autocast or w_dtype
        leaves = problem.leaves()
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            with lrmoe.recording() as calls:
                out_TD = lrmoe.routed_experts(
                    topk_ids_TK=problem.ids_TK, config=LRMoEConfig(drop=0.5, router_grad="exact"), **leaves
                )
            assert out_TD.dtype == x_dtype
            # A loss in fp32, as training has it; the backward runs outside autocast, as recommended.
            loss = (out_TD.float() * problem.grad_TD.float()).sum()
        with lrmoe.recording() as calls:
            loss.backward()
        assert calls[0].importance_TK.dtype == torch.float64
        wanted = expected(problem, calls[0].weight_TK)
        limit = 8 * max(torch.finfo(t).eps for t in (compute, x_dtype, alpha_dtype)) + 1e-5
        assert error(out_TD.detach(), wanted.out_TD) < limit
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            assert leaf.grad.dtype == leaf.dtype
            assert error(leaf.grad, wanted.grads[name]) < limit, (name, x_dtype, w_dtype, alpha_dtype)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_case_08_autocast_is_a_cast_of_the_operands_and_nothing_else(
    autocast: torch.dtype, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what casting the operands by hand gives: autocast does not reach into the operator, where it would
    round what is meant to be fp32, and turn products back into the half precision they avoid. Also where the backward
    runs inside autocast."""
    seen = []

    def product(a: Tensor, b: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return (a.float() @ b.float()).to(a.dtype)

    monkeypatch.setattr(grouped_mm, "_fast_half_on_cpu", lambda: False)
    monkeypatch.setattr(grouped_mm, "_product", product)
    problem = standard()
    config = LRMoEConfig(drop=0.5)
    leaves = problem.leaves()
    with torch.autocast("cpu", dtype=autocast):
        out_TD = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=config, **leaves)
        if inside:
            out_TD.backward(problem.grad_TD)
    if not inside:
        out_TD.backward(problem.grad_TD)
    assert len(seen) > 6 * 2
    assert not any(seen)
    by_hand = problem.leaves()
    cast = {name: leaf if name == "topk_weights_TK" else leaf.to(autocast) for name, leaf in by_hand.items()}
    wanted_TD = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=config, **cast).float()
    wanted_TD.backward(problem.grad_TD)
    assert torch.equal(out_TD, wanted_TD)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, by_hand[name].grad), name


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("logit", "dtype"), [(-120.0, torch.bfloat16), (-20.0, torch.float16), (-1000.0, torch.float32)]
)
def test_case_20_gates_that_underflow(logit: float, dtype: torch.dtype, normalize: bool) -> None:
    """One token whose sigmoid gates all underflow among 63 ordinary ones, with a selection bias far above the gates:
    its weights are finite, and the others' outputs are as if it were another token, bit for bit: every token goes to
    the two experts of the largest bias, so all products have the same shapes with either."""
    moe = layer(gate="sigmoid", normalize=normalize, selection_bias=True).to(dtype)
    assert moe.router.selection_bias is not None
    moe.router.selection_bias += torch.linspace(0, 10, 8)
    x = torch.randn(64, DIM).to(dtype)
    with torch.no_grad():
        moe.router.weight[:, 0] = logit
        x[:, 0] = 0.0
        x[5] = 0.0
        x[5, 0] = 1.0
    x.requires_grad_()
    with lrmoe.recording() as calls:
        out = moe(x)
        out.float().square().sum().backward()
    routing = moe.router(x)
    weights = routing.topk_weights_TK[5]
    assert weights.isfinite().all()
    if normalize:
        assert torch.allclose(weights, torch.full((2,), 0.5))
    else:
        assert (weights < 1e-8).all()
    assert out.isfinite().all()
    for grad in [x.grad, *(p.grad for p in moe.parameters())]:
        assert grad is not None
        assert grad.isfinite().all()
    assert calls[0].importance_TK.isfinite().all()
    if not normalize and dtype != torch.float16:
        assert (calls[0].importance_TK[5] == 0).all()
    others = torch.arange(64) != 5
    ordinary = x.detach().clone()
    ordinary[5] = ordinary[6]
    again = moe(ordinary).detach()
    assert (routing.loads_E == moe.router(ordinary).loads_E).all()
    assert torch.equal(out[others].detach(), again[others])


@pytest.mark.parametrize("selector", ["topq", "pps", "random", "auto"])
def test_case_22_gradients_that_are_not_finite_stay_visible(selector: Any) -> None:
    """One row with NaN and one with inf among ten, quota two: both are kept, so the gradient scaler sees them, skips
    the step and lowers its scale. With finite gradients it steps."""
    problem = standard(ids_TK=torch.zeros(10, 1, dtype=torch.int64), experts=1)
    gate_up, down = nn.Parameter(problem.gate_up_proj.clone()), nn.Parameter(problem.down_proj.clone())
    optimizer = torch.optim.SGD([gate_up, down], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for poison, steps in (((), True), ((float("nan"), float("inf")), False), ((float("nan"),), False)):
        before = down.detach().clone(), scaler.get_scale()
        grad_TD = problem.grad_TD.clone()
        for place, value in enumerate(poison, start=3):
            grad_TD[place, 0] = value
        out = lrmoe.routed_experts(
            problem.x_TD,
            problem.ids_TK,
            problem.alpha_TK,
            gate_up,
            down,
            config=LRMoEConfig(drop=0.8, selector=selector),
        )
        optimizer.zero_grad()
        with lrmoe.recording() as calls:
            scaler.scale(out).backward(grad_TD)  # type: ignore[no-untyped-call]
        assert calls[0].quota_E.tolist() == [2]
        assert calls[0].kept_TK[3 : 3 + len(poison)].all()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(down, before[0]) == (not steps)
        assert (scaler.get_scale() < before[1]) == (not steps)


def test_case_22_more_of_them_than_quota_are_all_kept() -> None:
    """The quota bounds what is computed, not what is shown: five flawed rows and quota two keep five."""
    problem = standard(ids_TK=torch.zeros(10, 1, dtype=torch.int64), experts=1)
    problem.grad_TD[:5, 0] = float("nan")
    call = run(problem, LRMoEConfig(drop=0.8)).call
    assert call is not None
    assert call.kept_TK.view(-1).tolist() == [True] * 5 + [False] * 5


def test_case_25_gate_scores_are_not_rounded_before_the_choice() -> None:
    """A bf16 layer chooses by fp32 logits of its bf16 weights. Rounding the scores first, as a bf16 router would, moves
    a large part of the tokens to other experts."""
    torch.manual_seed(0)
    router = TopKRouter(dim=128, num_experts=128, top_k=8, selection_bias=True).bfloat16()
    with torch.no_grad():
        router.weight.normal_(0, 0.05 / 128**0.5)
    x = torch.randn(512, 128).bfloat16()
    found = router(x)
    logits = x.double() @ router.weight.double().T
    exact = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True).indices[:, :8]
    assert found.logits_TE.dtype == found.topk_weights_TK.dtype == torch.float32
    changed = (found.topk_ids_TK.sort().values != exact.sort().values).any(-1).float().mean()
    assert changed < 0.01
    rounded = logits.float().softmax(-1).bfloat16().sort(dim=-1, descending=True, stable=True).indices[:, :8]
    assert (rounded.sort().values != exact.sort().values).any(-1).float().mean() > 0.3
    # The correction bias has a large common offset and small differences, which bf16 cannot tell apart.
    assert router.selection_bias is not None
    router.selection_bias += 5.0 + torch.linspace(0, 1e-3, 128)
    before = router.selection_bias.clone()
    for cast in (router.bfloat16, router.half, lambda: router.to(torch.bfloat16)):
        cast()
        assert router.selection_bias.dtype == torch.float32
        assert torch.equal(router.selection_bias, before)
    assert torch.equal(router(x).topk_ids_TK, router(x.float()).topk_ids_TK)


@pytest.mark.parametrize("router_dtype", [torch.float16, torch.float32])
def test_case_66_a_half_model_without_autocast(router_dtype: torch.dtype) -> None:
    """model.half() trains with the router in fp16 or left in fp32: routing weights and importance in fp32 or better,
    output and gradients in the dtype of what they belong to."""
    moe = layer(LRMoEConfig(drop=0.5)).half()
    moe.router.to(router_dtype)
    x = torch.randn(64, DIM).half().requires_grad_()
    routing = moe.router(x)
    assert routing.topk_weights_TK.dtype == torch.float32
    with lrmoe.recording() as calls:
        out = moe(x)
        out.float().square().mean().backward()
    assert out.dtype == torch.float16
    assert calls[0].importance_TK.dtype == torch.float64
    assert calls[0].weight_TK.dtype == torch.float32
    parameters: list[Tensor] = [x, *moe.parameters()]
    for parameter in parameters:
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0
