"""The forward is exact: for every selector, rate, quota, activation, layout and dtype."""

from __future__ import annotations

import itertools

import pytest
import torch
from experts.problem import error, expected, make, run, with_ids

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.ops import activations

ACTIVATIONS = [
    name + layout
    for name in ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu(alpha=1.702,limit=0.8)")
    for layout in ("", "|interleaved")
]
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_forward_is_the_reference_for_every_selector_rate_and_quota(dtype: torch.dtype) -> None:
    problem = make(dtype=dtype, bias=True)
    wanted_TD = expected(problem).out_TD
    outputs = []
    for selector, drop, quota, save in itertools.product(
        ("topq", "pps", "random", "auto"), (0.0, 0.2, 0.5, 0.9), ("expert", "level"), ("preactivation", "input")
    ):
        config = LRMoEConfig(drop=drop, selector=selector, quota=quota, save=save)
        outputs.append(run(problem, config).out_TD)
        assert error(outputs[-1], wanted_TD) < ROUNDING[dtype], (selector, drop, quota, save)
    # Not only close: nothing of the configuration reaches the forward.
    assert all(torch.equal(out_TD, outputs[0]) for out_TD in outputs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_forward_is_the_reference_for_every_activation_and_dtype(
    dtype: torch.dtype, activation: str, bias: bool
) -> None:
    problem = make(dtype=dtype, activation=activation, bias=bias, tokens=40)
    found_TD = run(problem).out_TD
    assert found_TD.dtype == dtype
    assert error(found_TD, expected(problem).out_TD) < ROUNDING[dtype]


@pytest.mark.parametrize("train", [False, True])
def test_forward_without_gradients_is_the_same(train: bool) -> None:
    problem = make(dtype=torch.float32)
    leaves = problem.leaves()
    with torch.set_grad_enabled(train):
        out_TD = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, **leaves)
    assert out_TD.requires_grad == train
    assert torch.equal(out_TD.detach(), run(problem).out_TD)


def test_inference_mode() -> None:
    problem = make(dtype=torch.float32)
    with torch.inference_mode():
        out_TD = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, **problem.leaves())
    assert torch.equal(out_TD, run(problem).out_TD)


def test_int32_ids_and_pairs_without_an_expert() -> None:
    problem = make(dtype=torch.float64)
    ids_TK = problem.ids_TK.clone()
    ids_TK[3] = -1
    ids_TK[5, 1] = -1
    holes = with_ids(problem, ids_TK)
    found = run(with_ids(holes, ids_TK.to(torch.int32)), LRMoEConfig(drop=0.5))
    assert error(found.out_TD, expected(holes).out_TD) < 1e-12
    assert found.out_TD[3].abs().max() == 0


def test_the_clamp_is_reached_on_every_side() -> None:
    # Otherwise the tests above would compare clamped_swiglu where it is not clamped.
    problem = make(activation=ACTIVATIONS[-2], tokens=40)
    h = torch.einsum("td,efd->tef", problem.x_TD, problem.gate_up_proj)
    gate, up = activations.get(problem.activation).split(h)
    assert (gate > 0.8).any()
    assert (up > 0.8).any()
    assert (up < -0.8).any()
    assert (gate < -0.8).any()


@pytest.mark.parametrize("name", ["swish", "silu|transposed", "clamped_swiglu(alpha=1)", ""])
def test_unknown_activations_are_refused_by_name(name: str) -> None:
    problem = make()
    with pytest.raises(ValueError, match=r"activation='.*'"):
        lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, activation=name, **problem.leaves())
