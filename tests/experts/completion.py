"""The gradients with one more row of means for each expert, by plain loops.

T tokens, K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from experts.problem import Problem, Result, expected, live_pairs
from torch import Tensor

from lrmoe.ops import activations


def operands(problem: Problem, expert: int, among_TK: Tensor | None = None) -> tuple[Tensor, ...]:
    """(t, k) places of an expert's real pairs, their x, phi and slopes in the layout of the up projection, fp64."""
    mine_TK = (problem.ids_TK == expert) & live_pairs(problem)
    places = (mine_TK if among_TK is None else mine_TK & among_TK).nonzero()
    x = problem.x_TD.double()[places[:, 0]]
    h = x @ problem.gate_up_proj[expert].double().T
    h = h if problem.gate_up_bias is None else h + problem.gate_up_bias[expert].double()
    h.requires_grad_()
    act = activations.get(problem.activation)
    phi = act.forward(*act.split(h))
    (slope,) = torch.autograd.grad(phi.sum(), h)
    return places, x, phi.detach(), slope


def completed(problem: Problem, weight_TK: Tensor, rank_TK: Tensor | None = None, router_grad: Any = "exact") -> Result:
    """The reference's gradients and, for each expert, one more row with the mean operands of all its pairs; with
    ``rank_TK``, which of an expert's instances computes a pair, one for each instance."""
    result = expected(problem, weight_TK, router_grad)
    act = activations.get(problem.activation)
    instances = [None] if rank_TK is None else [rank_TK == rank for rank in rank_TK.unique()]
    for expert in range(problem.num_experts):
        for among_TK in instances:
            places, x, phi, slope = operands(problem, expert, among_TK)
            if not len(places):
                continue
            t, k = places.unbind(1)
            share = problem.alpha_TK.double()[t, k] * (1 - weight_TK.double()[t, k])
            missing = (share.unsqueeze(1) * problem.grad_TD.double()[t]).sum(0)
            dh = slope.mean(0)
            for half in act.split(dh):
                half.mul_(missing @ problem.down_proj[expert].double())
            rows = {
                "down_proj": torch.outer(missing, phi.mean(0)),
                "gate_up_proj": torch.outer(dh, x.mean(0)),
                "down_bias": missing,
                "gate_up_bias": dh,
            }
            for name in rows.keys() & result.grads.keys():
                result.grads[name][expert] += rows[name]
    return result
