"""Experts without tokens, with tokens but nothing kept, and buffers with rows that nobody wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.fixtures import into, poisoned_memory, standard
from experts.problem import assert_equal, expected, forced, make, run

import lrmoe
from lrmoe import LRMoEConfig

SELECTORS = ("topq", "pps", "random")


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_case_01_experts_without_tokens(drop: float, selector: Any) -> None:
    """Forward and backward finish and are right where experts get no token at all. (That a GPU kernel hangs there can
    only be seen on a GPU.)"""
    for ids_TK, experts in (
        (forced([30, 0, 34, 0, 0, 40, 24, 0], 2), 8),
        (torch.tensor([[0, 9], [63, 9], [9, 30], [31, 0]]), 64),
    ):
        problem = standard(ids_TK=ids_TK, experts=experts)
        found = run(problem, LRMoEConfig(drop=drop, selector=selector, router_grad="exact"))
        assert found.call is not None
        assert_equal(found, expected(problem, found.call.weight_TK), 1e-5)
        idle = found.call.load_E == 0
        assert idle.any()
        for name in ("gate_up_proj", "down_proj"):
            assert (found.grads[name][idle] == 0).all()


@pytest.mark.parametrize("accumulate", ["nothing", "grad", "fp32 main_grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("starving")
def test_case_02_idle_experts_get_zeros_and_not_old_memory(dtype: torch.dtype, accumulate: str) -> None:
    """Gradients of experts that got no pair, or kept none, are exactly 0 though the memory for them was dirty, and
    leave what is accumulated into as it was. (The size at which GPU kernels failed needs a GPU.)"""
    ids_TK = forced([6, 0, 40, 9, 0, 3], 1)
    problem = make(ids_TK=ids_TK, experts=6, dim=16, width=8, dtype=dtype)
    # Levelled down so far that the two smallest keep nothing either.
    config = LRMoEConfig(drop=0.98, quota="level", selector="topq")
    leaves = problem.leaves()
    weights = [leaves["gate_up_proj"], leaves["down_proj"]]
    main_grads = [torch.ones(w.shape) for w in weights]
    if accumulate == "grad":
        for weight in weights:
            weight.grad = torch.ones_like(weight)
    if accumulate == "fp32 main_grad":
        for weight, main_grad in zip(weights, main_grads, strict=True):
            weight.register_post_accumulate_grad_hook(into(main_grad))
    with poisoned_memory(), lrmoe.recording() as calls:
        dirty = [torch.full_like(weight, torch.nan) for weight in weights]
        del dirty
        out_TD = lrmoe.routed_experts(topk_ids_TK=ids_TK, config=config, **leaves)
        out_TD.backward(problem.grad_TD)
    kept_E = torch.stack([calls[0].kept_TK[ids_TK == e].sum() for e in range(6)])
    assert kept_E.tolist() == [0, 0, 1, 0, 0, 0]
    assert calls[0].load_E.tolist() == [6, 0, 40, 9, 0, 3]
    for weight, main_grad in zip(weights, main_grads, strict=True):
        result = main_grad if accumulate == "fp32 main_grad" else weight.grad
        assert result.isfinite().all()
        assert (result[kept_E == 0] == (0 if accumulate == "nothing" else 1)).all()
        assert (result[2] != (0 if accumulate == "nothing" else 1)).any()


@pytest.mark.parametrize("live", [32, 0])
@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_case_03_rows_that_nobody_wrote_are_never_read(dtype: torch.dtype, save: Any, live: int) -> None:
    """Half of a buffer's rows, or all, have no expert; with fresh memory poisoned, three training steps give finite
    and right outputs, importances and gradients, none of which would be if such a row were read."""
    ids_TK = torch.full((32, 2), -1)
    ids_TK.view(-1)[torch.randperm(64)[:live]] = torch.randint(0, 8, (live,))
    problem = standard(ids_TK=ids_TK, dtype=dtype)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for step in range(3):
        with poisoned_memory():
            found = run(problem, LRMoEConfig(drop=0.5, save=save, router_grad="exact"), step=step)
        assert found.call is not None
        assert found.call.importance_TK.isfinite().all()
        assert_equal(found, expected(problem, found.call.weight_TK), tolerance)
        # A step of gradient descent: the next one sees other weights.
        problem = replace(
            problem,
            gate_up_proj=problem.gate_up_proj - 0.01 * found.grads["gate_up_proj"],
            down_proj=problem.down_proj - 0.01 * found.grads["down_proj"],
        )


@pytest.mark.parametrize("router_grad", ["exact", "sum_rule", "kept"])
@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.usefixtures("starving")
def test_case_N1_an_expert_that_is_empty_in_the_backward_alone(save: Any, router_grad: Any) -> None:
    """An expert with load and no quota is a group of the forward's products and none of the backward's."""
    problem = standard(ids_TK=forced([60, 1, 1, 1, 1, 0, 0, 64], 2), bias=True)
    config = LRMoEConfig(drop=0.97, quota="level", save=save, router_grad=router_grad)
    with poisoned_memory():
        found = run(problem, config)
    assert found.call is not None
    emptied = (found.call.load_E > 0) & (found.call.quota_E == 0)
    assert emptied.tolist() == [False, False, False, True, True, False, False, False]
    assert_equal(found, expected(problem, found.call.weight_TK, router_grad), 1e-5)
    for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"):
        assert (found.grads[name][found.call.quota_E == 0] == 0).all()
        assert (found.grads[name][found.call.quota_E > 0] != 0).any()
