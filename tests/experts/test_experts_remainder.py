"""The row that stands for dropped pairs: against plain loops, and that it leaves sampling unbiased.

T tokens, K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases.fixtures import poisoned_memory
from experts.completion import completed, operands
from experts.problem import Result, assert_equal, error, expected, live_pairs, make, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.experts.reference import reference_experts

WEIGHTS = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


def recorded(result: Result) -> Any:
    assert result.call is not None
    return result.call


CASES: dict[str, dict[str, Any]] = {
    "biases": {"bias": True},
    "interleaved": {"activation": "clamped_swiglu(alpha=1.702,limit=0.8)|interleaved", "bias": True},
    "gelu": {"activation": "gelu"},
    "masked tokens": {"mask_T": torch.arange(17) % 3 != 0, "bias": True},
    "pairs without an expert": {"ids_TK": torch.tensor([[0, -1], [-1, -1], [3, 1], [-1, 2], [0, 1], [0, 3]])},
    "empty experts": {"ids_TK": torch.full((11, 1), 3)},
    "a token twice in an expert": {"ids_TK": torch.tensor([[0, 0], [1, 2], [4, 4], [0, 0]])},
    "nothing": {"ids_TK": torch.full((4, 2), -1)},
}


@pytest.mark.parametrize("case", list(CASES))
def test_the_weights_get_one_more_row_of_means(case: str) -> None:
    problem = make(**CASES[case])
    for save, quota, selector in itertools.product(
        ("preactivation", "input"), ("expert", "level"), ("topq", "pps", "random")
    ):
        config = LRMoEConfig(drop=0.6, selector=selector, quota=quota, save=save, remainder="mean", router_grad="exact")
        found = run(problem, config)
        # Weights are recorded in fp32; topq's are 1.
        tolerance = 1e-10 if selector == "topq" else 1e-6
        assert_equal(found, completed(problem, recorded(found).weight_TK), tolerance)


@pytest.mark.parametrize("case", ["biases", "interleaved", "masked tokens", "empty experts"])
def test_the_reference_has_the_row_of_means_too(case: str) -> None:
    problem = make(**CASES[case])
    weight_TK = torch.rand(problem.ids_TK.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    weight_TK[::3] = 0
    weight_TK = weight_TK * live_pairs(problem)
    wanted, leaves = completed(problem, weight_TK), problem.leaves()
    out_TD = reference_experts(
        topk_ids_TK=problem.ids_TK,
        activation=problem.activation,
        pair_weight_TK=weight_TK,
        live_TK=live_pairs(problem),
        remainder="mean",
        **leaves,
    )
    grads = torch.autograd.grad(out_TD, list(leaves.values()), problem.grad_TD)
    found = Result(out_TD=out_TD.detach(), grads=dict(zip(leaves, grads, strict=True)))
    assert_equal(found, wanted, 1e-12)


def test_pairs_are_scored_by_their_distance_from_the_mean() -> None:
    problem = make(tokens=30)
    call = recorded(run(problem, LRMoEConfig(drop=0.5, selector="topq", remainder="mean")))
    for expert in range(problem.num_experts):
        places, _, phi, _ = operands(problem, expert)
        t, k = places.unbind(1)
        g = problem.alpha_TK[t, k] * problem.grad_TD[t].norm(dim=1)
        assert torch.allclose(call.importance_TK[t, k], (g * (phi - phi.mean(0)).norm(dim=1)).square(), rtol=1e-9)
    # Other metrics look at something else.
    plain, completed_too = (
        recorded(run(problem, LRMoEConfig(drop=0.5, selector="topq", metric="alpha_grad", remainder=remainder)))
        for remainder in ("none", "mean")
    )
    assert torch.equal(plain.kept_TK, completed_too.kept_TK)


def test_without_drop_nothing_changes() -> None:
    problem = make(dtype=torch.float32, bias=True)
    plain, found = (run(problem, LRMoEConfig(drop=0.0, remainder=remainder)) for remainder in ("none", "mean"))
    assert all(torch.equal(found.grads[name], grad) for name, grad in plain.grads.items())


def test_the_mean_over_draws_is_the_exact_gradient_and_the_error_smaller() -> None:
    problem = make(tokens=60, experts=3, bias=True, seed=3)
    # Inputs with something in common, as they have in a model.
    problem.x_TD.add_(1.5)
    exact = expected(problem)
    draws, errors = 40, {}
    for remainder in ("none", "mean"):
        total = {name: torch.zeros_like(grad) for name, grad in exact.grads.items()}
        squares = dict.fromkeys(WEIGHTS, 0.0)
        for step in range(draws):
            found = run(problem, LRMoEConfig(drop=0.5, router_grad="exact", remainder=remainder), step=step)
            for name, grad in found.grads.items():
                total[name] += grad / draws
            for name in WEIGHTS:
                squares[name] += float((found.grads[name] - exact.grads[name]).square().sum()) / draws
        for name in WEIGHTS:
            bias = float((total[name] - exact.grads[name]).square().sum())
            # The mean of `draws` has the variance of one over their number, if there is nothing else in it.
            assert bias <= 2.0 * squares[name] / draws + 1e-20, (remainder, name)
        errors[remainder] = squares
    assert errors["mean"]["down_proj"] < 0.8 * errors["none"]["down_proj"]
    assert errors["mean"]["gate_up_proj"] < 0.9 * errors["none"]["gate_up_proj"]
    # The bias of the down projection adds up alpha g itself: nothing of it is missing.
    assert errors["mean"]["down_bias"] < 1e-20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(dtype: torch.dtype) -> None:
    problem = make(dtype=dtype, bias=True, tokens=40)
    found = run(problem, LRMoEConfig(drop=0.5, selector="topq", remainder="mean", router_grad="exact"))
    wanted = completed(problem, recorded(found).weight_TK)
    for name, grad in found.grads.items():
        assert grad.dtype == (torch.float32 if name == "topk_weights_TK" else dtype)
        assert error(grad, wanted.grads[name]) < (1e-5 if dtype == torch.float32 else 0.05), name


def test_a_gradient_that_overflowed_is_seen_where_it_belongs() -> None:
    problem = make(dtype=torch.float32, mask_T=torch.arange(17) != 5)
    problem.grad_TD[3, 2] = torch.inf
    # Of a masked token nothing counts.
    problem.grad_TD[5], problem.x_TD[5] = torch.nan, torch.nan
    found = run(problem, LRMoEConfig(drop=0.5, remainder="mean"))
    for expert in range(problem.num_experts):
        assert found.grads["down_proj"][expert].isfinite().all() == (expert not in problem.ids_TK[3])


@pytest.mark.parametrize("mask_T", [None, torch.arange(17) % 3 != 0])
def test_memory_that_nobody_wrote_is_never_read(mask_T: Tensor | None) -> None:
    holes_TK = torch.where(torch.arange(34).view(17, 2) % 7 == 0, -1, make().ids_TK)
    problem = make(ids_TK=holes_TK, mask_T=mask_T, bias=True)
    config = LRMoEConfig(drop=0.5, remainder="mean")
    plain = run(problem, config)
    with poisoned_memory():
        again = run(problem, config)
    assert all(torch.equal(again.grads[name], grad) for name, grad in plain.grads.items())


@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_forwards_change_no_bit(save: Any, use_reentrant: bool) -> None:
    problem = make(dtype=torch.float32, bias=True)
    config = LRMoEConfig(drop=0.5, save=save, remainder="mean")
    plain, leaves = run(problem, config), problem.leaves()

    def layer(x_TD: Tensor, alpha_TK: Tensor) -> Tensor:
        given = {**leaves, "x_TD": x_TD, "topk_weights_TK": alpha_TK}
        return lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=config, **given)

    out_TD = checkpoint(layer, leaves["x_TD"], leaves["topk_weights_TK"], use_reentrant=use_reentrant)
    out_TD.backward(problem.grad_TD)
    assert all(torch.equal(leaf.grad, plain.grads[name]) for name, leaf in leaves.items())


def test_frozen_weights_get_nothing_and_the_input_what_it_got() -> None:
    problem = make(dtype=torch.float32)
    config = LRMoEConfig(drop=0.5, metric="alpha_grad", remainder="mean")
    leaves = problem.leaves()
    for name in ("gate_up_proj", "down_proj"):
        leaves[name].requires_grad_(False)
    out_TD = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=config, **leaves)
    out_TD.backward(problem.grad_TD)
    plain = run(problem, LRMoEConfig(drop=0.5, metric="alpha_grad"))
    assert torch.equal(leaves["x_TD"].grad, plain.grads["x_TD"])
    assert leaves["down_proj"].grad is None
