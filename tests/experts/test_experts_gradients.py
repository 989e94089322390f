"""The backward: plain autograd where nothing is dropped, the weighted reference where something is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts.problem import Problem, Result, assert_equal, error, expected, live_pairs, make, routes, run
from recalibration.oracles import pps_probabilities
from rounding import allowance
from torch import Tensor

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.ops import grouped_mm

SELECTORS = ("topq", "pps", "random", "auto")
ROUTER_GRADS = ("exact", "sum_rule", "kept")
SAVES = ("preactivation", "input")
QUOTAS = ("expert", "level", "pooled")
ACTIVATIONS = ("silu", "gelu|interleaved", "gelu_tanh", "relu", "clamped_swiglu(alpha=1.702,limit=0.8)|interleaved")


def independent_loop(problem: Problem) -> Result:
    """One token after the other with torch's own functions; shares no code with the library."""
    assert problem.activation == "silu"
    leaves = problem.leaves(torch.float64)
    rows = []
    for t in range(problem.ids_TK.shape[0]):
        row = torch.zeros(problem.x_TD.shape[1], dtype=torch.float64)
        for k, e in enumerate(problem.ids_TK[t].tolist()):
            gate, up = F.linear(leaves["x_TD"][t], leaves["gate_up_proj"][e], leaves["gate_up_bias"][e]).chunk(2)
            y = F.linear(F.silu(gate) * up, leaves["down_proj"][e], leaves["down_bias"][e])
            row = row + leaves["topk_weights_TK"][t, k] * y
        rows.append(row)
    out_TD = torch.stack(rows)
    grads = torch.autograd.grad(out_TD, list(leaves.values()), problem.grad_TD.double())
    return Result(out_TD=out_TD.detach(), grads=dict(zip(leaves, grads, strict=True)))


def exact_weights(problem: Problem, result: Result, selector: str, quota: str = "expert") -> Tensor:
    """What fp64 weights the kept pairs must have, from the recorded scores; the record itself has them in fp32."""
    call = result.call
    assert call is not None
    weight_TK = call.kept_TK.double()
    if selector == "topq":
        return weight_TK
    for e in range(problem.num_experts):
        place = ((problem.ids_TK == e) & live_pairs(problem)).nonzero()
        r = [float(call.importance_TK[t, k]) ** 0.5 for t, k in place.tolist()]
        # Pooled quotas are known by what was kept; see test_pooling for what they should be.
        q = int(call.quota_E[e] if quota != "pooled" else call.kept_TK[problem.ids_TK == e].sum())
        p = pps_probabilities(r if selector == "pps" else [1.0] * len(r), q)
        for (t, k), pi in zip(place.tolist(), p, strict=True):
            if weight_TK[t, k]:
                weight_TK[t, k] = 1 / pi
    return weight_TK


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_drop_the_gradients_are_autograds(dtype: torch.dtype, save: Any) -> None:
    problem = make(dtype=dtype, bias=True, top_k=3)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    found = run(problem, LRMoEConfig(drop=0.0, save=save))
    assert_equal(found, independent_loop(problem), tolerance)
    assert found.call is not None
    assert found.call.kept_TK.all()


@pytest.mark.parametrize("drop", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("router_grad", ROUTER_GRADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_those_of_the_kept_and_weighted_pairs(dtype: torch.dtype, router_grad: Any, drop: float) -> None:
    problem = make(dtype=dtype, bias=True, top_k=3, seed=int(10 * drop))
    for selector, quota, save in itertools.product(SELECTORS, QUOTAS, SAVES):
        config = LRMoEConfig(drop=drop, selector=selector, quota=quota, save=save, router_grad=router_grad)
        found = run(problem, config, step=3, layer=1)
        assert found.call is not None
        assert int(found.call.kept_TK.sum()) == round((1 - drop) * problem.ids_TK.numel())
        if dtype == torch.float64 and selector != "auto":
            weight_TK = exact_weights(problem, found, selector, quota)
            assert torch.allclose(weight_TK.float(), found.call.weight_TK, rtol=1e-6)
            assert_equal(found, expected(problem, weight_TK, router_grad), 1e-10)
        else:
            assert_equal(found, expected(problem, found.call.weight_TK, router_grad), 1e-5)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, bias: bool, save: Any) -> None:
    problem = make(activation=activation, bias=bias, tokens=40)
    for drop, selector in ((0.0, "pps"), (0.5, "pps"), (0.5, "topq")):
        found = run(problem, LRMoEConfig(drop=drop, selector=selector, save=save, router_grad="exact"))
        weight_TK = exact_weights(problem, found, selector)
        assert_equal(found, expected(problem, weight_TK), 1e-10)


@pytest.mark.parametrize("metric", ["lrm", "grad_norm", "abs_grad", "alpha_grad", "forward", "random"])
def test_every_metric_scores_pairs_by_its_formula(metric: Any) -> None:
    problem = make(tokens=30)
    found = run(problem, LRMoEConfig(drop=0.5, selector="topq", metric=metric, router_grad="exact"))
    assert found.call is not None
    assert_equal(found, expected(problem, found.call.weight_TK), 1e-10)
    g = problem.grad_TD.norm(dim=-1, keepdim=True).expand_as(problem.alpha_TK)
    phi_TK = torch.zeros_like(problem.alpha_TK)
    for t, k in itertools.product(*map(range, problem.ids_TK.shape)):
        gate, up = (problem.gate_up_proj[problem.ids_TK[t, k]] @ problem.x_TD[t]).chunk(2)
        phi_TK[t, k] = (F.silu(gate) * up).norm()
    wanted = {
        "lrm": problem.alpha_TK * g * phi_TK,
        "grad_norm": g,
        "abs_grad": problem.grad_TD.abs().sum(-1, keepdim=True).expand_as(g),
        "alpha_grad": problem.alpha_TK * g,
        "forward": problem.alpha_TK * phi_TK,
    }
    if metric == "random":
        assert found.call.importance_TK.unique().numel() == problem.ids_TK.numel()
        assert found.call.importance_TK.max() < 1
    else:
        assert torch.allclose(found.call.importance_TK, wanted[metric].square(), rtol=1e-10)
    for e in range(problem.num_experts):
        mine = problem.ids_TK == e
        kept = found.call.importance_TK[mine & found.call.kept_TK]
        dropped = found.call.importance_TK[mine & ~found.call.kept_TK]
        assert kept.min() >= dropped.max()


def plain_loop(problem: Problem, weight_TK: Tensor) -> Result:
    """The reference in the problem's own dtype: what rounding an ordinary implementation has."""
    from lrmoe.experts.reference import reference_experts

    leaves = problem.leaves()
    leaves["topk_weights_TK"] = problem.alpha_TK.clone().requires_grad_()
    out_TD = reference_experts(
        topk_ids_TK=problem.ids_TK, pair_weight_TK=weight_TK, activation=problem.activation, **leaves
    )
    grads = torch.autograd.grad(out_TD, list(leaves.values()), problem.grad_TD)
    return Result(out_TD=out_TD.detach(), grads=dict(zip(leaves, grads, strict=True)))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_no_more_than_a_plain_loop(
    dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against fp64 on the same rounded inputs and weights: within a few units of the dtype's resolution, and never
    worse than 1.5 times the same computation done by autograd in that dtype."""
    monkeypatch.setattr(grouped_mm, "_fast_half_on_cpu", lambda: native)
    for drop, selector, save, bias in itertools.product((0.0, 0.5), ("pps", "topq"), SAVES, (False, True)):
        problem = make(dtype=dtype, tokens=48, dim=16, width=24, bias=bias)
        # A dropped pair's exact gradient needs no subtraction of rounded numbers, unlike the sum rule's.
        found = run(problem, LRMoEConfig(drop=drop, selector=selector, save=save, router_grad="exact"))
        assert found.call is not None
        wanted = expected(problem, found.call.weight_TK)
        plain = plain_loop(problem, found.call.weight_TK)
        assert found.grads["topk_weights_TK"].dtype == torch.float32
        for name, grad in found.grads.items():
            assert grad.dtype == (torch.float32 if name == "topk_weights_TK" else dtype)
            mine = error(grad, wanted.grads[name])
            assert mine < 6 * torch.finfo(dtype).eps, (name, drop, selector, save, bias, mine)
            assert mine < 1.5 * error(plain.grads[name], wanted.grads[name]) + torch.finfo(dtype).eps, name


@pytest.mark.parametrize(("dim", "width"), [(15, 7), (16, 7), (15, 8), (1, 1), (6, 10)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_widths_that_are_no_multiple_of_16_bytes(dtype: torch.dtype, dim: int, width: int) -> None:
    problem = make(dtype=dtype, dim=dim, width=width, bias=True)
    for save in SAVES:
        found = run(problem, LRMoEConfig(drop=0.5, save=save, router_grad="exact"))
        assert found.call is not None
        tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
        assert_equal(found, expected(problem, found.call.weight_TK), tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_stored_input_first_are_used_through_a_view(dtype: torch.dtype) -> None:
    config = LRMoEConfig(drop=0.5)
    straight = run(make(dtype=dtype, dim=16, width=8, bias=True), config)
    problem = make(dtype=dtype, dim=16, width=8, bias=True, transposed=True)
    assert not problem.gate_up_proj.is_contiguous()
    found = run(problem, config)
    # A BLAS takes other code for another layout: sums of dim, of width and of up to 17 rows.
    assert_equal(found, straight, allowance(dtype, 16, 8, 17))
    assert straight.call is not None
    assert found.call is not None
    assert torch.equal(found.call.kept_TK, straight.call.kept_TK)


def test_one_matrix_expanded_over_all_experts() -> None:
    problem = make(dtype=torch.float32, dim=16, width=8)
    shared = {
        name: getattr(problem, name)[:1].expand_as(getattr(problem, name)) for name in ("gate_up_proj", "down_proj")
    }
    found = run(replace(problem, **shared), LRMoEConfig(drop=0.5, router_grad="exact"))
    assert found.call is not None
    assert_equal(found, expected(replace(problem, **shared), found.call.weight_TK), 1e-5)


SHAPES: dict[str, dict[str, Any]] = {
    "no token": {"tokens": 0},
    "one token": {"tokens": 1},
    "one choice": {"top_k": 1},
    "all experts": {"top_k": 5},
    "one expert": {"experts": 1, "top_k": 1},
    "every pair to one expert": {"ids_TK": torch.full((11, 1), 3)},
    "one token twice to the same expert": {"ids_TK": torch.tensor([[0, 0], [1, 2], [4, 4]])},
    "no pair has an expert": {"ids_TK": torch.full((4, 2), -1)},
    "some pairs have none": {"ids_TK": torch.tensor([[0, -1], [-1, -1], [3, 1], [-1, 2], [0, 1]])},
    "no token is real": {"mask_T": torch.zeros(17, dtype=torch.bool)},
    "some tokens are not real": {"mask_T": torch.arange(17) % 3 != 0},
    "all tokens are real": {"mask_T": torch.ones(17, dtype=torch.bool)},
}


@pytest.mark.parametrize("shape", SHAPES, ids=[name.replace(" ", "_") for name in SHAPES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_shape(dtype: torch.dtype, shape: str) -> None:
    problem = make(dtype=dtype, bias=True, **SHAPES[shape])
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for drop, quota, router_grad in itertools.product((0.0, 0.5, 0.95), QUOTAS, ROUTER_GRADS):
        if dtype == torch.bfloat16 and router_grad == "sum_rule":
            continue  # Subtracts rounded numbers; see test_experts_router_gradient.
        found = run(problem, LRMoEConfig(drop=drop, quota=quota, router_grad=router_grad))
        assert found.call is not None
        assert_equal(found, expected(problem, found.call.weight_TK, router_grad), tolerance)


def test_pooled_quotas_follow_the_gradients_of_the_experts() -> None:
    """Experts whose gradient sits in few pairs give quota to the others; the sum stays."""
    ids_TK = torch.arange(96).remainder(3).unsqueeze(1)
    problem = make(ids_TK=ids_TK, experts=3)
    problem.grad_TD[torch.arange(96).remainder(3).eq(0) & torch.arange(96).gt(20)] *= 1e-3
    for selector in ("topq", "pps"):
        found, even = (
            run(problem, LRMoEConfig(drop=0.25, selector=selector, quota=quota)).call for quota in ("pooled", "expert")
        )
        assert found is not None
        assert even is not None
        kept_E, even_E = (torch.stack([c.kept_TK[ids_TK == e].sum() for e in range(3)]) for c in (found, even))
        assert even_E.tolist() == [24, 24, 24]
        assert kept_E[0] == 16
        assert kept_E.sum() == 72
        assert torch.equal(found.quota_E, even.quota_E)
    exact = run(problem, LRMoEConfig(drop=0.0, quota="pooled"))
    assert exact.call is not None
    assert exact.call.kept_TK.all()
    assert_equal(exact, expected(problem, torch.ones_like(problem.alpha_TK)), 1e-10)


@pytest.mark.usefixtures("starving")
def test_a_loaded_expert_without_quota_gets_exact_zeros() -> None:
    # Levelled to a cap of zero for most: experts 1 to 4 have load and keep nothing.
    ids_TK = torch.tensor([[0], [0], [0], [1], [2], [3], [4]])
    problem = make(ids_TK=ids_TK, bias=True)
    found = run(problem, LRMoEConfig(drop=0.86, quota="level", selector="topq", router_grad="kept"))
    assert found.call is not None
    assert found.call.load_E.tolist() == [3, 1, 1, 1, 1]
    assert found.call.quota_E.tolist() == [1, 0, 0, 0, 0]
    for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"):
        assert found.grads[name][0].abs().max() > 0
        assert found.grads[name][1:].abs().max() == 0
    nothing = run(problem, LRMoEConfig(drop=0.95, quota="level", router_grad="kept"))
    assert nothing.call is not None
    assert not nothing.call.kept_TK.any()
    assert all(grad.abs().max() == 0 for grad in nothing.grads.values())


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("metric", ["lrm", "random"])
def test_masked_tokens_change_nothing_for_the_others(selector: Any, metric: Any) -> None:
    """Loads, quotas, draws, kept pairs and gradients of the real tokens are those of a run without the masked ones."""
    generator = torch.Generator().manual_seed(1)
    mask_T = torch.rand(30, generator=generator) < 0.6
    ids_TK = routes(30, 5, 2, generator)
    ids_TK[~mask_T] = torch.tensor([0, 1])  # All padding goes to the same experts.
    full = make(ids_TK=ids_TK, mask_T=mask_T, bias=True)
    real = replace(
        full,
        mask_T=None,
        **{name: getattr(full, name)[mask_T] for name in ("x_TD", "ids_TK", "alpha_TK", "grad_TD")},
    )
    config = LRMoEConfig(drop=0.4, selector=selector, metric=metric)
    found, wanted = run(full, config, step=5), run(real, config, step=5)
    assert found.call is not None
    assert wanted.call is not None
    assert found.call.load_E.tolist() == torch.bincount(real.ids_TK.flatten(), minlength=5).tolist()
    assert found.call.quota_E.tolist() == wanted.call.quota_E.tolist()
    assert not found.call.kept_TK[~mask_T].any()
    assert not found.call.importance_TK[~mask_T].any()
    assert torch.equal(found.call.kept_TK[mask_T], wanted.call.kept_TK)
    # Scores from products over other numbers of rows: as fp64 has them, recorded in fp32.
    rtol = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.call.weight_TK[mask_T], wanted.call.weight_TK, rtol=rtol, atol=0)
    assert error(found.out_TD, expected(full).out_TD) < 1e-12
    for name in ("x_TD", "topk_weights_TK"):
        assert not found.grads[name][~mask_T].any()
        assert error(found.grads[name][mask_T], wanted.grads[name]) < 1e-12
    for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"):
        assert error(found.grads[name], wanted.grads[name]) < 1e-12


def test_only_the_gradients_that_are_asked_for() -> None:
    problem = make(bias=True, dtype=torch.float64)
    config = LRMoEConfig(drop=0.5, router_grad="exact")
    everything = run(problem, config)
    names = list(problem.leaves())
    for wanted in itertools.product((False, True), repeat=len(names)):
        leaves = problem.leaves()
        for leaf, needed in zip(leaves.values(), wanted, strict=True):
            leaf.requires_grad_(needed)
        out_TD = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=config, **leaves)
        assert out_TD.requires_grad == any(wanted)
        if any(wanted):
            out_TD.backward(problem.grad_TD)
        for name, needed in zip(names, wanted, strict=True):
            if needed:
                assert error(leaves[name].grad, everything.grads[name]) < 1e-13, (name, wanted)
            else:
                assert leaves[name].grad is None


@pytest.mark.parametrize("layout", ["expanded", "transposed", "strided"])
def test_gradients_of_any_layout(layout: str) -> None:
    problem = make(dtype=torch.float32, dim=16)
    grad_TD = {
        "expanded": torch.ones(()).expand(problem.grad_TD.shape),
        "transposed": problem.grad_TD.t().contiguous().t(),
        "strided": torch.stack([problem.grad_TD, problem.grad_TD], dim=-1)[..., 0],
    }[layout]
    config = LRMoEConfig(drop=0.5)
    found = run(replace(problem, grad_TD=grad_TD), config)
    wanted = run(replace(problem, grad_TD=grad_TD.contiguous()), config)
    assert all(torch.equal(found.grads[name], wanted.grads[name]) for name in wanted.grads)


def test_inputs_of_any_layout() -> None:
    # Views as routers and models hand them on: a slice of more choices, a transposed activation, a strided bias.
    problem = make(bias=True)
    views = {
        "x_TD": problem.x_TD.t().contiguous().t(),
        "ids_TK": torch.cat([problem.ids_TK, problem.ids_TK], dim=1)[:, :2],
        "alpha_TK": torch.stack([problem.alpha_TK, problem.alpha_TK], dim=-1)[..., 1],
        "gate_up_bias": problem.gate_up_bias.t().contiguous().t(),  # type: ignore[union-attr]
        "down_bias": problem.down_bias[:1].expand(5, 8),  # type: ignore[index]
    }
    assert not any(view.is_contiguous() for view in views.values())
    straight = {name: view.contiguous() for name, view in views.items()}
    config = LRMoEConfig(drop=0.5)
    found, wanted = run(replace(problem, **views), config), run(replace(problem, **straight), config)
    assert_equal(found, wanted, 1e-13)


def test_the_output_may_be_changed_in_place() -> None:
    # A residual added into the output, say. The sum rule reads the output in the backward.
    problem = make()
    for router_grad in ROUTER_GRADS:
        config = LRMoEConfig(drop=0.5, router_grad=router_grad)
        leaves = problem.leaves()
        out_TD = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=config, **leaves)
        out_TD += 1.0
        out_TD.backward(problem.grad_TD)
        wanted = run(problem, config)
        assert all(torch.equal(leaves[name].grad, wanted.grads[name]) for name in leaves)


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    problem = make()
    leaves = problem.leaves()
    out_TD = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, **leaves)
    (dx_TD,) = torch.autograd.grad(out_TD.square().sum(), leaves["x_TD"], create_graph=True)
    with pytest.raises(RuntimeError, match="routed_experts_backward"):
        dx_TD.sum().backward()


def test_a_large_selection_weight_does_not_overflow_fp16() -> None:
    """A pair with a small gradient, once kept against the odds, carries a weight of thousands; its contribution to the
    down projection's gradient is ordinary, whatever the order of the products."""
    problem = make(dtype=torch.float16, tokens=400, experts=1, top_k=1, dim=4, width=4)
    small_T1 = (torch.arange(400) % 2).bool().unsqueeze(-1)
    direction_TD = problem.grad_TD / problem.grad_TD.norm(dim=-1, keepdim=True)
    grad_TD = torch.where(small_T1, 1e-5 * direction_TD, 1e-2 * direction_TD)
    # phi in the hundreds, alpha 1.
    problem = replace(
        problem, grad_TD=grad_TD, alpha_TK=torch.ones(400, 1), gate_up_proj=problem.gate_up_proj.abs() * 20,
        x_TD=problem.x_TD.abs() + 0.5, down_proj=problem.down_proj / 20,
    )  # fmt: skip
    config = LRMoEConfig(drop=0.9)
    heaviest = 0.0
    for step in range(150):
        found = run(problem, config, step=step)
        assert found.call is not None
        heaviest = max(heaviest, float(found.call.weight_TK.max()))
        assert all(grad.isfinite().all() for grad in found.grads.values())
        if found.call.weight_TK.max() > 1000:
            wanted = expected(problem, found.call.weight_TK)
            assert error(found.grads["down_proj"], wanted.grads["down_proj"]) < 0.02
    # The test is about nothing unless such a pair was kept: its weight times phi is beyond 65504.
    assert heaviest * 100 > 65504
