"""The reference itself, against the formulas written out pair by pair in plain fp64 arithmetic."""

from __future__ import annotations

import pytest
import torch
from experts.problem import Problem, Result, assert_equal, expected, live_pairs, make
from torch import Tensor


def pair_by_pair(problem: Problem, weight_TK: Tensor, router_grad: str) -> Result:
    """Forward and backward of SwiGLU experts without autograd: one pair after the other."""
    ids_TK, alpha_TK, grad_TD = problem.ids_TK, problem.alpha_TK, problem.grad_TD
    out_TD = torch.zeros_like(problem.x_TD)
    grads = {name: torch.zeros_like(leaf) for name, leaf in problem.leaves().items()}
    live_TK = live_pairs(problem)
    dalpha_TK = grads["topk_weights_TK"]
    for t in range(ids_TK.shape[0]):
        x, g = problem.x_TD[t], grad_TD[t]
        for k in range(ids_TK.shape[1]):
            e = int(ids_TK[t, k])
            if e < 0:
                continue
            w_gate, w_up = problem.gate_up_proj[e].chunk(2)
            gate = w_gate @ x + problem.gate_up_bias[e].chunk(2)[0]
            up = w_up @ x + problem.gate_up_bias[e].chunk(2)[1]
            sig = 1 / (1 + torch.exp(-gate))
            phi = gate * sig * up
            y = problem.down_proj[e] @ phi + problem.down_bias[e]
            out_TD[t] += alpha_TK[t, k] * y
            if not live_TK[t, k]:
                continue
            w = weight_TK[t, k]
            if w != 0 or router_grad == "exact":
                dalpha_TK[t, k] = g @ y
            dy = w * alpha_TK[t, k] * g
            dphi = problem.down_proj[e].T @ dy
            dgate = dphi * up * sig * (1 + gate * (1 - sig))
            dup = dphi * gate * sig
            dh = torch.cat([dgate, dup])
            grads["down_proj"][e] += torch.outer(dy, phi)
            grads["down_bias"][e] += dy
            grads["gate_up_proj"][e] += torch.outer(dh, x)
            grads["gate_up_bias"][e] += dh
            grads["x_TD"][t] += problem.gate_up_proj[e].T @ dh
    if router_grad == "sum_rule":
        for t in range(ids_TK.shape[0]):
            dropped = [k for k in range(ids_TK.shape[1]) if live_TK[t, k] and weight_TK[t, k] == 0]
            left = grad_TD[t] @ out_TD[t] - sum(alpha_TK[t, k] * dalpha_TK[t, k] for k in range(ids_TK.shape[1]))
            for k in dropped:
                dalpha_TK[t, k] = left / sum(alpha_TK[t, j] for j in dropped)
    return Result(out_TD=out_TD, grads=grads)


@pytest.mark.parametrize("router_grad", ["exact", "sum_rule", "kept"])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_reference_is_the_formulas_of_every_pair(share: float, router_grad: str) -> None:
    problem = make(top_k=3, bias=True)
    weight_TK = torch.rand(problem.ids_TK.shape, dtype=torch.float64) + 0.5
    weight_TK = torch.where(torch.rand(problem.ids_TK.shape) < share, weight_TK, 0.0)
    assert_equal(expected(problem, weight_TK, router_grad), pair_by_pair(problem, weight_TK, router_grad), 1e-12)


def test_reference_with_masked_tokens_and_pairs_without_an_expert() -> None:
    # A masked token whose pairs all have an expert; the sum rule shares among live pairs alone.
    ids_TK = torch.tensor([[0, 1, 2], [1, -1, 3], [-1, -1, -1], [4, 0, 1], [2, 3, 4]])
    mask_T = torch.tensor([True, True, True, False, True])
    problem = make(ids_TK=ids_TK, mask_T=mask_T, bias=True)
    weight_TK = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0, 0], [0, 0, 0], [0, 0, 0]]).double()
    found = expected(problem, weight_TK, "sum_rule")
    # Without an own output nothing is left to share out for the pair at [1, 1].
    wanted = pair_by_pair(problem, weight_TK, "sum_rule")
    assert_equal(found, wanted, 1e-12)
    assert found.out_TD[2].abs().max() == 0
    assert found.grads["x_TD"][3].abs().max() == 0
    assert found.grads["topk_weights_TK"][3].abs().max() == 0
