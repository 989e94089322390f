"""The router's gradient, where routing weights apply, and routing that comes from elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases.fixtures import DIM, layer, standard
from experts.problem import Problem, error, expected, make, run
from torch import Tensor

import lrmoe
from lrmoe import LRMoEConfig, MoE, TopKRouter


def gate(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Renormalised softmax over the chosen experts."""
    return logits_TE.gather(-1, ids_TK).softmax(-1)


def dlogits(problem: Problem, logits_TE: Tensor, **options: Any) -> tuple[Tensor, Any]:
    leaf = logits_TE.clone().requires_grad_()
    with lrmoe.recording() as calls:
        out_TD = lrmoe.routed_experts(
            problem.x_TD, problem.ids_TK, gate(leaf, problem.ids_TK), problem.gate_up_proj, problem.down_proj,
            config=LRMoEConfig(**options),
        )  # fmt: skip
        (found,) = torch.autograd.grad(out_TD, leaf, problem.grad_TD)
    return found, calls[0]


@pytest.mark.parametrize("drop", [0.0, 0.5, 0.97])
@pytest.mark.usefixtures("starving")
def test_case_13_the_gradient_of_the_logits(drop: float) -> None:
    """With quotas of all, half, and next to none of the load: "exact" gives the loop's gradient of the logits always;
    "sum_rule" for tokens that lost at most one pair of two or more; "kept" where nothing was lost. (Copies of the
    router on several ranks need several processes.)"""
    problem = standard(dtype=torch.float64)
    logits_TE = torch.randn(64, 8, dtype=torch.float64)
    leaf = logits_TE.clone().requires_grad_()
    alpha_TK = gate(leaf, problem.ids_TK)
    dalpha_TK = expected(replace(problem, alpha_TK=alpha_TK.detach())).grads["topk_weights_TK"]
    (wanted,) = torch.autograd.grad(alpha_TK, leaf, dalpha_TK)
    quota: Any = "level" if drop > 0.9 else "expert"
    found, call = dlogits(problem, logits_TE, drop=drop, quota=quota, router_grad="exact")
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)
    if drop == 0.97:
        assert call.kept_TK.sum() == 4
        assert (call.quota_E[call.load_E > 0] == 0).any()
    lost_T = (~call.kept_TK).sum(-1)
    by_rule, _ = dlogits(problem, logits_TE, drop=drop, quota=quota, router_grad="sum_rule")
    assert torch.allclose(by_rule[lost_T <= 1], wanted[lost_T <= 1], rtol=1e-9, atol=1e-12)
    # Nothing distinguishes the pairs of a token that lost all: no preference between them is made up.
    assert by_rule[lost_T == 2].abs().max() < 1e-10 if (lost_T == 2).any() else drop == 0.0
    of_kept, _ = dlogits(problem, logits_TE, drop=drop, quota=quota, router_grad="kept")
    assert torch.allclose(of_kept[lost_T == 0], wanted[lost_T == 0], rtol=1e-10, atol=1e-12)
    if drop:
        assert error(of_kept, wanted) > 0.1


def test_case_38_one_renormalised_choice_gives_the_router_nothing() -> None:
    """With k = 1 and renormalisation the weight is the constant 1: the router is warned about, gets no gradient but
    from auxiliary losses, and the importance ranks by g and phi alone."""
    with pytest.warns(UserWarning, match="top_k=1"):
        moe = layer(LRMoEConfig(drop=0.5), top_k=1)
    x = torch.randn(64, DIM)
    with lrmoe.recording() as calls:
        out = moe(x)
        grad = torch.randn_like(out)
        out.backward(grad)
    routing = moe.router(x)
    assert (routing.topk_weights_TK == 1).all()
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.abs().max() < 1e-6 * moe.experts.down_proj.grad.abs().max()  # type: ignore[union-attr]
    for t in range(64):
        e = int(routing.topk_ids_TK[t, 0])
        gate_F, up_F = (moe.experts.gate_up_proj[e] @ x[t]).chunk(2)
        wanted = grad[t].norm() ** 2 * (F.silu(gate_F) * up_F).norm() ** 2
        assert float(calls[0].importance_TK[t, 0]) == pytest.approx(float(wanted.detach()), rel=1e-4)
    # Without renormalisation the same layer's router learns.
    free = layer(LRMoEConfig(drop=0.5), top_k=1, normalize=False)
    free(x).backward(grad)
    assert free.router.weight.grad is not None
    assert free.router.weight.grad.abs().max() > 1e-2


@pytest.mark.parametrize(("experts", "top_k"), [(4, 4), (1, 1), (512, 10)])
def test_case_39_extreme_counts_that_are_fine(experts: int, top_k: int) -> None:
    """Every expert for every token, one expert alone, and ten of 512."""
    moe = layer(LRMoEConfig(drop=0.5), num_experts=experts, top_k=top_k, normalize=top_k > 1)
    with lrmoe.recording() as calls:
        moe(torch.randn(40, DIM)).square().sum().backward()
    assert int(calls[0].load_E.sum()) == 40 * top_k
    if top_k == experts:
        assert (calls[0].load_E == 40).all()
    loaded = int((calls[0].load_E > 0).sum())
    assert int(calls[0].kept_TK.sum()) == max(20 * top_k, loaded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 4, "top_k": 5}, "top_k=5 must be at most num_experts=4"),
        ({"num_experts": 4, "top_k": 0}, "top_k=0"),
        ({"num_experts": 0, "top_k": 1}, "num_experts=0"),
        ({"num_experts": 8, "top_k": 2, "num_groups": 8, "top_groups": 2}, "num_groups=8 leaves 1 expert per group"),
        ({"num_experts": 8, "top_k": 2, "num_groups": 3, "top_groups": 1}, "num_groups=3 must divide num_experts=8"),
        ({"num_experts": 8, "top_k": 5, "num_groups": 4, "top_groups": 2}, "top_groups=2"),
    ],
)
def test_case_39_extreme_counts_that_are_refused_when_built(options: dict[str, int], message: str) -> None:
    """More choices than experts, and groups too small, are named at construction, not deep inside a kernel."""
    for build in (TopKRouter, lambda **o: MoE(expert_dim=8, **o)):
        with pytest.raises(ValueError, match=message):
            build(dim=DIM, **options)


def test_case_39_more_choices_than_experts_in_the_operator_itself() -> None:
    """A rank that holds two of a model's experts gets all four choices of a token, those elsewhere as -1: the operator
    takes more choices than it has experts; a router does not."""
    problem = make(ids_TK=torch.tensor([[0, -1, 1, -1], [-1, -1, -1, 1], [1, 0, -1, -1]]), experts=2)
    found = run(problem, LRMoEConfig(drop=0.5, router_grad="exact"))
    assert found.call is not None
    assert error(found.out_TD, expected(problem).out_TD) < 1e-12
    assert found.call.load_E.tolist() == [2, 3]
    assert found.call.quota_E.sum() == 3
    too_many = make(ids_TK=torch.tensor([[0, 1, 1, -1]]), experts=2)
    with pytest.raises(ValueError, match="gives a token 3 experts, but there are 2"):
        run(too_many, LRMoEConfig())


def test_case_42_the_routing_weight_applies_to_the_output() -> None:
    """alpha multiplies the experts' output. Applying it to phi instead is the same output, and the same importance:
    the squared norms of the down projection's wgrad operands are alpha^2 ||g||^2 ||phi||^2 either way, so alpha must
    not be counted twice. Applying it to the input is another function, whose phi depends on alpha."""
    problem = standard(dtype=torch.float64)
    found = run(problem, LRMoEConfig(drop=0.5, selector="topq"))
    assert found.call is not None
    on_hidden_TD, on_input_TD = torch.zeros_like(problem.x_TD), torch.zeros_like(problem.x_TD)
    importance_TK = torch.zeros_like(problem.alpha_TK)
    for t in range(64):
        for k in range(2):
            e, alpha = int(problem.ids_TK[t, k]), problem.alpha_TK[t, k]
            gate_F, up_F = (problem.gate_up_proj[e] @ problem.x_TD[t]).chunk(2)
            operand_F = alpha * (F.silu(gate_F) * up_F)
            on_hidden_TD[t] += problem.down_proj[e] @ operand_F
            importance_TK[t, k] = problem.grad_TD[t].norm() ** 2 * operand_F.norm() ** 2
            gate_F, up_F = (problem.gate_up_proj[e] @ (alpha * problem.x_TD[t])).chunk(2)
            on_input_TD[t] += problem.down_proj[e] @ (F.silu(gate_F) * up_F)
    assert error(found.out_TD, on_hidden_TD) < 1e-12
    assert error(found.out_TD, on_input_TD) > 0.1
    assert torch.allclose(found.call.importance_TK, importance_TK, rtol=1e-10)
    # A host that applies alpha itself, outside, hands alpha * g to experts with weights of one: one row a pair.
    rows = replace(
        problem,
        x_TD=problem.x_TD.repeat_interleave(2, dim=0),
        ids_TK=problem.ids_TK.reshape(-1, 1),
        alpha_TK=torch.ones(128, 1, dtype=torch.float64),
        grad_TD=problem.alpha_TK.reshape(-1, 1) * problem.grad_TD.repeat_interleave(2, dim=0),
    )
    outside = run(rows, LRMoEConfig(drop=0.5, selector="topq"))
    assert outside.call is not None
    assert torch.equal(outside.call.kept_TK.view(64, 2), found.call.kept_TK)
    for name in ("gate_up_proj", "down_proj"):
        assert error(outside.grads[name], found.grads[name]) < 1e-12


def test_case_55_routing_that_was_recorded_elsewhere() -> None:
    """Expert ids from another engine, a tenth of the rows differing from the router's own choice, with weights from
    the live logits: gradients reach those logits at the recorded experts, and importance uses the live weights."""
    problem = standard(dtype=torch.float64)
    router = torch.randn(8, DIM, dtype=torch.float64, requires_grad=True)
    logits_TE = problem.x_TD @ router.T
    own_TK = logits_TE.topk(2).indices
    recorded_TK = own_TK.clone()
    recorded_TK[::10] = (recorded_TK[::10] + 3) % 8
    alpha_TK = gate(logits_TE, recorded_TK)
    live = replace(problem, ids_TK=recorded_TK, alpha_TK=alpha_TK.detach())
    with lrmoe.recording() as calls:
        out_TD = lrmoe.routed_experts(
            problem.x_TD, recorded_TK, alpha_TK, problem.gate_up_proj, problem.down_proj,
            config=LRMoEConfig(drop=0.5, router_grad="exact"),
        )  # fmt: skip
        found_logits, found_router = torch.autograd.grad(out_TD, [logits_TE, router], problem.grad_TD)
    wanted = expected(live, calls[0].weight_TK)
    assert error(out_TD.detach(), wanted.out_TD) < 1e-12
    chosen = torch.zeros_like(found_logits, dtype=torch.bool).scatter_(1, recorded_TK, True)
    assert (found_logits[~chosen] == 0).all()
    assert (found_logits[chosen] != 0).all()
    (wanted_router,) = torch.autograd.grad(
        gate(problem.x_TD @ router.T, recorded_TK), router, wanted.grads["topk_weights_TK"]
    )
    assert error(found_router, wanted_router) < 1e-10
    call = run(live, LRMoEConfig(drop=0.5)).call
    assert call is not None
    assert torch.allclose(call.importance_TK, calls[0].importance_TK)
    assert not torch.allclose(call.importance_TK, run(replace(live, alpha_TK=problem.alpha_TK)).call.importance_TK)  # type: ignore[union-attr]
    assert torch.equal(calls[0].load_E, torch.bincount(recorded_TK.flatten(), minlength=8))


def test_case_55_ids_of_the_wrong_model_are_refused() -> None:
    """A recorded id beyond the experts there are is named, not clipped."""
    problem = make(experts=5)
    ids_TK = problem.ids_TK.clone()
    ids_TK[3, 1] = 7
    with pytest.raises(ValueError, match="holds id 7, but there are 5 experts"):
        lrmoe.routed_experts(topk_ids_TK=ids_TK, **problem.leaves())
