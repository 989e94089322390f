"""Weights at home, placed in slots and sharded, under every policy: gradients of single backwards against the fp64
reference, on tokens as they come, while the policies place experts anew between steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.spread import own_tokens
from distributed.test_policies_train import POLICIES
from distributed.world import run_world
from experts.problem import PARAMETERS, Problem, error, expected, live_pairs, make
from torch import Tensor

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.balance import get
from lrmoe.parallel import ExpertParallel

STEPS, EXPERTS, TOKENS = 4, 8, 40
SHARES = {2: [[33, 7], [0, 40], [20, 20], [40, 0]], 4: [[10, 10, 10, 10], [0, 25, 0, 15], [37, 1, 1, 1], [0, 0, 0, 40]]}


def problem_of(step: int) -> Problem:
    """Weights that never change, tokens that go to another pair of experts each step."""
    base = make(tokens=TOKENS, experts=EXPERTS, bias=True)
    generator = torch.Generator().manual_seed(step)
    hot_K = torch.tensor([2 * step % EXPERTS, (2 * step + 1) % EXPERTS])
    hot_T1 = torch.rand(TOKENS, 1, generator=generator) < 0.7
    holes_TK = torch.rand(TOKENS, 2, generator=generator) < 0.1
    ids_TK = torch.where(holes_TK, -1, torch.where(hot_T1, hot_K, base.ids_TK))
    mask_T = torch.rand(TOKENS, generator=generator) < 0.8 if step % 2 else None
    return replace(base, ids_TK=ids_TK, mask_T=mask_T)


def one_rank(group: dist.ProcessGroup, name: str, storage: Any, config: LRMoEConfig) -> list[Any]:
    options = POLICIES[name]
    if options.get("slots") == 3 and group.size() == 2:
        options = {**options, "slots": 5}  # Every expert needs one.
    engine = ExpertParallel(group, num_experts=EXPERTS, policy=get(name, **options), storage=storage, config=config)
    weights = {key: engine.local(getattr(problem_of(0), key)).clone().requires_grad_() for key in PARAMETERS}
    engine.register(0, *weights.values())
    optimizer = torch.optim.SGD(weights.values(), lr=0.0, momentum=0.9)
    told = []
    for step in range(STEPS):
        problem = problem_of(step)
        mine = own_tokens(SHARES[group.size()][step], group.rank())
        x_TD, alpha_TK = (t[mine].clone().requires_grad_() for t in (problem.x_TD, problem.alpha_TK))
        mask_T = None if problem.mask_T is None else problem.mask_T[mine]
        held: Any = engine.local_experts
        if engine.ownership == "placed":
            held = engine.policy.placement(0)[engine.rank]  # type: ignore[attr-defined]
        optimizer.zero_grad()
        with lrmoe.recording() as calls:
            out_TD = engine.routed_experts(
                x_TD, problem.ids_TK[mine], alpha_TK, **weights, token_mask_T=mask_T, step=step
            )
            out_TD.backward(problem.grad_TD[mine])
        grads = {key: weight.grad.clone() for key, weight in weights.items()}  # type: ignore[union-attr]
        told.append((out_TD.detach(), x_TD.grad, alpha_TK.grad, list(held), grads, calls[0], engine.ownership))
        optimizer.step()
        engine.step(optimizer)
    return told


def put_together(ranks: list[Any], key: str) -> Tensor:
    """The gradient of all experts, from what each rank has of it."""
    if ranks[0][-1] == "sharded":
        return torch.cat([grads[key] for *_, grads, _, _ in ranks], dim=1)
    whole: dict[int, Tensor] = {}
    for *_, held, grads, _, _ in ranks:
        for expert, row in zip(held, grads[key], strict=True):
            assert torch.equal(whole.setdefault(expert, row), row), "slots of an expert have one gradient"
    return torch.stack([whole[expert] for expert in range(EXPERTS)])


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 4) for name in POLICIES), ("symi", 2), ("laer", 2), ("smartmoe", 2)]
)
def test_every_store_gives_the_gradients_of_the_pairs_it_kept(name: str, ranks: int) -> None:
    for drop, storage in ((0.4, "policy"), (0.4, "home")) if ranks == 4 else ((0.0, "policy"),):
        config = LRMoEConfig(drop=drop, selector="topq", router_grad="exact")
        told = run_world(ranks, one_rank, name, storage, config, timeout=60)
        for step, steps_told in enumerate(zip(*told, strict=True)):
            problem = problem_of(step)
            weight_TK = torch.cat([call.weight_TK for *_, call, _ in steps_told])
            call = steps_told[0][-2]
            live_TK = live_pairs(problem)
            assert int((weight_TK > 0).sum()) == int(call.quota_E.sum())
            assert int(call.load_E.sum()) == int(live_TK.sum())
            if drop == 0:
                assert torch.equal(weight_TK > 0, live_TK)
            wanted = expected(problem, weight_TK)
            assert error(torch.cat([out for out, *_ in steps_told]), wanted.out_TD) < 1e-12
            for place, key in ((1, "x_TD"), (2, "topk_weights_TK")):
                found = torch.cat([own[place] for own in steps_told])
                assert error(found, wanted.grads[key]) < 1e-12, (storage, step, key)
            for key in PARAMETERS:
                assert error(put_together(list(steps_told), key), wanted.grads[key]) < 1e-12, (storage, step, key)
