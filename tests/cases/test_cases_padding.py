"""Padding, tokens without experts, and quotas that must count neither."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.fixtures import layer, standard
from experts.problem import assert_equal, error, expected, make, run

import lrmoe
from lrmoe import LRMoEConfig


@pytest.mark.parametrize("selector", ["topq", "pps", "auto"])
def test_case_07_padding_displaces_nothing(selector: Any) -> None:
    """Twenty padded and three real pairs in one expert, quota 4, no mask given: padding has no gradient, so its
    importance is 0 and every real pair is kept."""
    ids_TK = torch.zeros(23, 1, dtype=torch.int64)
    problem = standard(ids_TK=ids_TK)
    real = torch.tensor([4, 11, 22])
    problem.grad_TD[[t for t in range(23) if t not in real.tolist()]] = 0
    for step in range(10):
        call = run(problem, LRMoEConfig(drop=1 - 4 / 23, selector=selector), step=step).call
        assert call is not None
        assert call.quota_E[0] == 4
        assert call.kept_TK[real].all()
        assert (call.importance_TK[real] > 0).all()
        assert call.importance_TK.count_nonzero() == 3
        assert (call.weight_TK[real] == 1).all()


@pytest.mark.usefixtures("starving")
def test_case_07_and_N4_a_mask_keeps_padding_out_of_loads_and_quotas() -> None:
    """Two sequences of 8 with 11 of 16 places padded by one and the same vector: with the mask, load report, quota and
    kept pairs are of the 5 real tokens; without it the quota counts padding and so is three times as large."""
    moe = layer(LRMoEConfig(drop=0.5, quota="level"))
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, :3] = mask[1, :2] = True
    x = torch.randn(2, 8, 16)
    x[~mask] = torch.ones(16)

    def train(token_mask: torch.Tensor | None) -> Any:
        with lrmoe.recording() as calls:
            out = moe(x, token_mask=token_mask)
            # The loss is masked, as every loss over padded text is.
            out[mask].square().sum().backward()
        return calls[0]

    with_mask, without = train(mask), train(None)
    assert int(with_mask.load_E.sum()) == 5 * 2
    assert int(without.load_E.sum()) == 16 * 2
    assert without.load_E.max() >= 11
    assert int(with_mask.quota_E.sum()) == 5
    assert int(without.quota_E.sum()) == 16
    kept_TK = with_mask.kept_TK.view(2, 8, 2)
    assert int(kept_TK.sum()) == 5
    assert not kept_TK[~mask].any()
    totals = moe.control.meter.totals()
    assert totals is not None
    assert sum(totals["load"]) == 10 + 32


def test_case_N4_quotas_are_shares_of_real_pairs() -> None:
    """Pairs of padding and pairs without an expert enlarge no quota, whatever their number."""
    ids_TK = torch.tensor([[0, 1]] * 10 + [[0, -1]] * 6 + [[-1, -1]] * 20)
    mask_T = torch.arange(36) % 2 == 0
    call = run(standard(ids_TK=ids_TK, mask_T=mask_T), LRMoEConfig(drop=0.5)).call
    assert call is not None
    assert call.load_E.tolist() == [5 + 3, 5] + [0] * 6
    assert call.quota_E.tolist() == [4, 3] + [0] * 6
    assert call.kept_TK.sum() == 7


@pytest.mark.parametrize("alpha_of_none", [0.0, 5.0, float("nan")])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_case_57_tokens_with_any_number_of_experts(drop: float, alpha_of_none: float) -> None:
    """From none to four experts a token, padded with id -1: output and gradients are the loop's, and a token without
    experts gets exactly 0, whatever its routing weights hold there (NaN, say, from a softmax over nothing)."""
    torch.manual_seed(0)
    ids_TK = torch.stack([torch.randperm(8)[:4] for _ in range(30)])
    ids_TK[torch.arange(4) >= (torch.arange(30) % 5).unsqueeze(1)] = -1
    problem = make(ids_TK=ids_TK, experts=8, dtype=torch.float32)
    problem.alpha_TK[ids_TK < 0] = alpha_of_none
    for router_grad in ("exact", "sum_rule", "kept"):
        found = run(problem, LRMoEConfig(drop=drop, router_grad=router_grad))
        assert found.call is not None
        assert_equal(found, expected(problem, found.call.weight_TK, router_grad), 1e-5)
        nobody = (ids_TK < 0).all(-1)
        assert nobody.sum() == 6
        assert (found.out_TD[nobody] == 0).all()
        assert (found.grads["x_TD"][nobody] == 0).all()
        assert (found.grads["topk_weights_TK"][ids_TK < 0] == 0).all()
        assert int(found.call.load_E.sum()) == int((ids_TK >= 0).sum()) == 60


def test_case_57_an_identity_expert_is_the_callers_and_counts_in_no_quota() -> None:
    """An expert that passes its input on has no weights to train: the caller gives it id -1 and adds alpha x. Output
    and gradients are those of the whole, and only real experts have loads and quotas."""
    problem = standard(dtype=torch.float64)
    identity = problem.ids_TK == 7
    ids_TK = torch.where(identity, -1, problem.ids_TK)
    leaves = problem.leaves()
    x_TD, alpha_TK = leaves["x_TD"], leaves["topk_weights_TK"]
    with lrmoe.recording() as calls:
        out_TD = lrmoe.routed_experts(topk_ids_TK=ids_TK, config=LRMoEConfig(drop=0.5, router_grad="exact"), **leaves)
        out_TD = out_TD + torch.where(identity, alpha_TK, 0).sum(-1, keepdim=True) * x_TD
        out_TD.backward(problem.grad_TD)
    assert calls[0].load_E[7] == calls[0].quota_E[7] == 0
    assert calls[0].load_E.sum() == (~identity).sum()
    # dalpha is exact with router_grad="exact": <g, x> for the identity, <g, y> for the others.
    dot_T1 = (problem.grad_TD * problem.x_TD).sum(-1, keepdim=True)
    assert torch.allclose(alpha_TK.grad[identity], dot_T1.expand_as(identity)[identity])
    rest = expected(type(problem)(**{**vars(problem), "ids_TK": ids_TK}), calls[0].weight_TK)
    assert error(alpha_TK.grad[~identity], rest.grads["topk_weights_TK"][~identity]) < 1e-10
    through = torch.where(identity, problem.alpha_TK, 0).sum(-1, keepdim=True) * problem.grad_TD
    assert error(x_TD.grad, rest.grads["x_TD"] + through) < 1e-6
