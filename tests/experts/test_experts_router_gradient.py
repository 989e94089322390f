"""What the routing weights of dropped pairs get as their gradient: the documented sentence of each `router_grad`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from experts.problem import expected, make, run

from lrmoe import LRMoEConfig
from lrmoe.recalibration.router_grad import sum_rule


def dalpha(problem: Any, router_grad: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = run(problem, LRMoEConfig(router_grad=router_grad, **{"drop": 0.5, **options}))
    assert found.call is not None
    return found.grads["topk_weights_TK"], found.call.kept_TK


def test_exact_is_the_gradient_without_any_drop() -> None:
    problem = make(top_k=3, bias=True)
    full_TK, _ = dalpha(problem, "exact", drop=0.0)
    for selector in ("pps", "topq", "random"):
        for drop in (0.2, 0.5, 0.9):
            found_TK, kept_TK = dalpha(problem, "exact", selector=selector, drop=drop)
            assert not kept_TK.all()
            assert torch.allclose(found_TK, full_TK, rtol=1e-10, atol=1e-12)


def test_kept_is_exact_for_kept_pairs_and_zero_for_dropped_ones() -> None:
    problem = make(top_k=3)
    full_TK, _ = dalpha(problem, "exact", drop=0.0)
    found_TK, kept_TK = dalpha(problem, "kept")
    assert torch.allclose(found_TK[kept_TK], full_TK[kept_TK], rtol=1e-10)
    assert (found_TK[~kept_TK] == 0).all()


def test_sum_rule_is_exact_where_a_token_lost_one_pair_and_keeps_the_sum_where_it_lost_more() -> None:
    problem = make(top_k=3, tokens=40)
    full_TK, _ = dalpha(problem, "exact", drop=0.0)
    found_TK, kept_TK = dalpha(problem, "sum_rule")
    lost_T = (~kept_TK).sum(-1)
    assert {0, 1, 2} <= set(lost_T.tolist())
    assert torch.allclose(found_TK[lost_T <= 1], full_TK[lost_T <= 1], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(found_TK[lost_T > 1], full_TK[lost_T > 1], rtol=1e-2)
    alpha_TK = problem.alpha_TK
    assert torch.allclose((alpha_TK * found_TK).sum(-1), (alpha_TK * full_TK).sum(-1), rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_rule_in_low_precision_errs_by_the_rounding_of_the_output_alone(dtype: torch.dtype) -> None:
    # It subtracts known terms from <g, o>, so its error is that of o's rounding, divided by the dropped alpha.
    problem = make(dtype=dtype, top_k=2, tokens=64, dim=16, width=16)
    found_TK, kept_TK = dalpha(problem, "sum_rule")
    wanted_TK = expected(problem, kept_TK.double(), "sum_rule").grads["topk_weights_TK"]
    scale_T1 = (problem.grad_TD.double().norm(dim=-1) * expected(problem).out_TD.norm(dim=-1)).unsqueeze(-1)
    dropped_alpha_T1 = torch.where(kept_TK, 0, problem.alpha_TK).sum(-1, keepdim=True)
    one_lost = (~kept_TK).sum(-1) == 1
    error_T1 = (found_TK - wanted_TK).abs().max(-1, keepdim=True).values * dropped_alpha_T1 / scale_T1
    assert one_lost.sum() > 10
    assert error_T1[one_lost].max() < 4 * torch.finfo(dtype).eps


def test_sum_rule_says_nothing_of_a_pair_too_light_to_be_seen_in_the_output() -> None:
    # Dividing the output's rounding by such an alpha would give any number, up to infinity.
    problem = make(dtype=torch.float32, tokens=64)
    logits_TK = torch.zeros(64, 2)
    logits_TK[:, 1] = -100.0
    for weight in (logits_TK.softmax(-1), torch.tensor([[1.0, 0.0]]).expand(64, 2), torch.zeros(64, 2)):
        large = replace(problem, alpha_TK=weight, grad_TD=problem.grad_TD * 65536)
        found_TK, kept_TK = dalpha(large, "sum_rule", drop=0.4, selector="topq")
        assert not kept_TK.all()
        assert found_TK.isfinite().all()
        unseen_T = kept_TK[:, 0] & ~kept_TK[:, 1] if weight[0, 0] else ~kept_TK[:, 1]
        assert unseen_T.sum() > 10
        assert (found_TK[unseen_T, 1] == 0).all()


def test_sum_rule_ignores_what_belongs_to_nobody() -> None:
    """Weights of pairs without an expert may hold anything, NaN included."""
    ids_TK = torch.tensor([[0, 1, -1], [-1, -1, -1], [2, -1, 3], [0, 2, 4], [1, 0, -1], [3, 4, -1]])
    clean = make(ids_TK=ids_TK, dtype=torch.float64)
    clean = replace(clean, alpha_TK=torch.where(ids_TK >= 0, clean.alpha_TK, 0))
    dirty = replace(clean, alpha_TK=torch.where(ids_TK >= 0, clean.alpha_TK, torch.nan))
    for router_grad in ("exact", "sum_rule", "kept"):
        config = LRMoEConfig(drop=0.5, router_grad=router_grad)
        found, wanted = run(dirty, config), run(clean, config)
        assert torch.equal(found.out_TD, wanted.out_TD)
        for name, grad in wanted.grads.items():
            assert torch.equal(found.grads[name], grad), name


def test_sum_rule_by_hand() -> None:
    alpha = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.7, 0.3, 0.0]])
    known = torch.tensor([[4.0, 9.0, 9.0], [4.0, 1.0, 9.0], [4.0, 1.0, 2.0], [4.0, 1.0, 9.0]])
    kept = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]).bool()
    live = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    dot = torch.tensor([3.0, 3.0, 3.0, 3.1])
    found = sum_rule(alpha, known, kept, live, dot)
    # Token 0: 3 - 0.5*4 = 1 over alphas 0.3 + 0.2. Token 1: 3 - 2.3 = 0.7 over 0.2.
    wanted = torch.tensor([[4.0, 2.0, 2.0], [4.0, 1.0, 3.5], [4.0, 1.0, 2.0], [4.0, 1.0, 0.0]])
    assert torch.allclose(found, wanted)
