"""Copies of experts on other ranks: what is in them, what becomes of their gradients, and who must not see them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.plans import GivenPlans, RandomPlans
from distributed.spread import even_shares, local_leaves, own_tokens
from distributed.world import run_world
from experts.problem import PARAMETERS, Problem, error, expected, make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.balance.plan import Plan
from lrmoe.parallel import ExpertParallel, parallelize
from lrmoe.parallel.meeting import all_gather_json


class Watched(RandomPlans):
    """Random plans that remember the last one."""

    last: Plan

    def plan(self, *args: Any, **options: Any) -> Plan:
        self.last = super().plan(*args, **options)
        return self.last


def all_experts(group: dist.ProcessGroup, local: Tensor) -> Tensor:
    """The homes' weights of all ranks together."""
    return torch.cat(
        [torch.tensor(part, dtype=local.dtype) for part in all_gather_json(local.tolist(), group, what="t")]
    )


class Experts(nn.Module):
    """Expert weights of one rank as a module's parameters."""

    def __init__(self, leaves: dict[str, Tensor]) -> None:
        super().__init__()
        for name in PARAMETERS:
            self.register_parameter(name, nn.Parameter(leaves[name].detach().clone()))


def change_weights(group: dist.ProcessGroup, problem: Problem) -> dict[str, list[int]]:
    """Changes the home weights in every way there is; after each, replicas must be the home's copies and the outputs
    and gradients those without replicas."""
    policy = Watched(5, slots=2)
    engine, plain = (
        ExpertParallel(group, num_experts=7, policy=which, config=LRMoEConfig(drop=0.0)) for which in (policy, "fixed")
    )
    mine = own_tokens(even_shares(problem.x_TD.shape[0], engine.size), engine.rank)
    leaves = local_leaves(problem, engine, mine)
    module = Experts(leaves)
    names = list(module.state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    tokens = {"x_TD": leaves["x_TD"], "topk_weights_TK": leaves["topk_weights_TK"], "topk_ids_TK": problem.ids_TK[mine]}
    told: dict[str, list[int]] = {}

    def compare(how: str) -> None:
        found = []
        for ep in (engine, plain):
            module.zero_grad()
            out_TD = ep.routed_experts(**tokens, **dict(module.named_parameters()), step=len(told))
            out_TD.backward(problem.grad_TD[mine])
            found.append([out_TD.detach(), *(p.grad.clone() for p in module.parameters())])  # type: ignore[union-attr]
        assert all(error(a, b) < 1e-12 for a, b in zip(*found, strict=True)), how
        hosted = list(policy.last.slots[engine.rank])
        told[how] = hosted
        for name in names:
            # Homes that gather over JSON: fp64 survives that bit for bit.
            every = all_experts(group, getattr(module, name).detach())
            assert engine.store.bank is not None
            assert torch.equal(getattr(engine.store.bank, name), every[hosted]), (how, name)

    for step in range(5):
        compare(f"step {step}")
        optimizer.step()
    saved = {name: 0.5 * value + 1.0 for name, value in module.state_dict().items()}
    average = copy.deepcopy(module)
    with torch.no_grad():
        for p in average.parameters():
            p.mul_(0.9).add_(0.1)
    compare("optimizer.step")
    module.load_state_dict(saved)
    compare("load_state_dict")
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p.roll(1, 0) * 0.9)
    compare("copy_")
    for p, other in zip(module.parameters(), average.parameters(), strict=True):
        p.data, other.data = other.data, p.data
    compare("swap with the average")
    for p in module.parameters():
        p.data = p.data + 0.25
    compare("new data")
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.01 * (1 + engine.rank))
    compare("add_")
    assert list(module.state_dict()) == names
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == sum(
        p.numel() for p in module.parameters()
    )
    return told


@pytest.mark.parametrize("ranks", [2, 4])
def test_case_29_replicas_are_their_homes_after_every_way_to_change_a_weight(ranks: int) -> None:
    """Replicas that are refreshed by the optimizer's hook alone serve stale weights after a checkpoint is loaded or an
    average swapped in: accuracy falls, and there is no error."""
    told = run_world(ranks, change_weights, make(tokens=26, experts=7, bias=True), timeout=60)
    slots = [tuple(answers[how] for answers in told) for how in told[0]]
    assert len(set(map(str, slots))) > 5, "placements change during the run"
    assert any(len(hosted) > 1 for ranks_slots in slots for hosted in ranks_slots), "two replicas on one rank"


def merge(group: dist.ProcessGroup, problem: Problem, cases: list[Any]) -> list[Any]:
    """For each list of plans: the recorded calls and the gradients accumulated over that many microbatches."""
    told = []
    for plans, selector, save, recompute in cases:
        config = LRMoEConfig(drop=0.5, selector=selector, save=save, router_grad="exact")
        policy = GivenPlans(*plans)
        engine = ExpertParallel(group, num_experts=4, policy=policy, config=config)
        mine = own_tokens(even_shares(problem.x_TD.shape[0], engine.size), engine.rank)
        leaves = local_leaves(problem, engine, mine)
        with lrmoe.recording() as calls:
            for microbatch in range(len(plans)):
                rest = {name: leaf for name, leaf in leaves.items() if name != "x_TD"}
                run = functools.partial(
                    engine.routed_experts, topk_ids_TK=problem.ids_TK[mine], microbatch=microbatch, **rest
                )
                x_TD = leaves["x_TD"]
                out_TD = checkpoint(run, x_TD, use_reentrant=recompute == "reentrant") if recompute else run(x_TD)
                out_TD.backward(problem.grad_TD[mine])
        assert policy.calls == len(plans)
        assert engine.metrics()["plans"] == len(plans)
        told.append((calls, {name: leaf.grad for name, leaf in leaves.items()}))
    return told


KEEPS_NOTHING = {0: [(1, 12, 0)]}
ANOTHER = {0: [(1, 3, 2)], 2: [(0, 5, 3)], 3: [(0, 0, 0)]}
HOME_KEEPS_NOTHING = {0: [(1, 20, 14)]}


def test_case_30_gradients_of_replicas_come_home_whatever_they_keep() -> None:
    """Where a replica keeps nothing, or the placement changes between microbatches, its gradient is lost, added twice,
    or the reduction that only some ranks enter hangs."""
    ids_TK = torch.stack([torch.arange(28) % 2 * 0, 1 + torch.arange(28) % 3], dim=1)
    ids_TK[:, 0] = 0
    problem = make(ids_TK=ids_TK, experts=4, bias=True)
    cases = [
        (plans, selector, save, recompute)
        for plans in (
            [KEEPS_NOTHING],
            [HOME_KEEPS_NOTHING],
            [KEEPS_NOTHING, ANOTHER],
            [ANOTHER, {}, HOME_KEEPS_NOTHING],
        )
        for selector, save, recompute in (
            ("topq", "preactivation", None),
            ("pps", "input", "reentrant"),
            ("pps", "preactivation", "non-reentrant"),
        )
    ]
    told = run_world(2, merge, problem, cases, timeout=60)
    for number, (plans, selector, *_) in enumerate(cases):
        per_rank = [answers[number] for answers in told]
        found = {name: torch.cat([grads[name] for _, grads in per_rank]) for name in per_rank[0][1]}
        total: dict[str, Tensor] = {}
        for microbatch in range(len(plans)):
            calls = [calls[microbatch] for calls, _ in per_rank]
            weight_TK = torch.cat([call.weight_TK for call in calls])
            assert calls[0].quota_E.sum() == int((weight_TK > 0).sum())
            for name, grad in expected(problem, weight_TK).grads.items():
                total[name] = total.get(name, 0) + grad
        for name in found:
            assert error(found[name], total[name]) < (1e-12 if selector == "topq" else 1e-6), (number, name)


def stack_layers(group: dist.ProcessGroup, problems: list[Problem], how: str) -> list[Any]:
    """Three layers one after the other on one engine, two microbatches; ``how`` the forwards are recomputed."""
    policy = Watched(9, slots=2)
    config = LRMoEConfig(drop=0.3, router_grad="exact")
    engine = ExpertParallel(group, num_experts=7, policy=policy, config=config)
    mine = own_tokens(even_shares(problems[0].x_TD.shape[0], engine.size), engine.rank)
    layers = [local_leaves(problem, engine, mine) for problem in problems]
    told: list[Any] = []
    for microbatch in range(2):

        def layer(number: int, x_TD: Tensor, microbatch: int = microbatch) -> Tensor:
            given = {**layers[number], "x_TD": x_TD, "topk_ids_TK": problems[number].ids_TK[mine]}
            return x_TD + engine.routed_experts(**given, layer=number, microbatch=microbatch)

        x_TD = problems[0].x_TD[mine].clone().requires_grad_()
        h_TD = x_TD
        with lrmoe.recording() as calls:
            for number in range(3):
                if how == "whole":
                    h_TD = layer(number, h_TD)
                else:
                    h_TD = checkpoint(layer, number, h_TD, use_reentrant=how == "reentrant")
            h_TD.backward(problems[0].grad_TD[mine])
        told += [h_TD.detach(), x_TD.grad, *(call.weight_TK for call in calls), *(call.kept_TK for call in calls)]
    told += [leaves[name].grad for leaves in layers for name in leaves if name != "x_TD"]
    metrics = engine.metrics()
    told += [torch.tensor([policy.calls, metrics["plans"], *sorted(policy.observed)])]
    return [told, metrics["sent_bytes"]["weights to replicas"]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_share_the_slots_and_recomputed_forwards_keep_their_plans(ranks: int) -> None:
    """The policy gives another plan every time it is asked: it must be asked once a forward, whatever is recomputed,
    and gradients must be the same bit for bit with both kinds of activation checkpointing."""
    problems = [make(tokens=26, experts=7, bias=True, seed=seed) for seed in range(3)]
    whole = run_world(ranks, stack_layers, problems, "whole")
    for how in ("reentrant", "non-reentrant"):
        again = run_world(ranks, stack_layers, problems, how)
        for (wanted, _), (found, _) in zip(whole, again, strict=True):
            assert len(found) == len(wanted)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for told, _ in whole:
        # Six forwards, told to the policy once each.
        assert told[-1].tolist() == [6, 6, 0, 0, 1, 1, 2, 2]


def count_sent_weights(group: dist.ProcessGroup, problem: Problem) -> list[int]:
    sent = []
    policy = GivenPlans({0: [(1, 4, 4)]})
    engine = ExpertParallel(group, num_experts=4, policy=policy)
    leaves = local_leaves(problem, engine, own_tokens([14, 14], engine.rank))
    given = {**leaves, "topk_ids_TK": problem.ids_TK[own_tokens([14, 14], engine.rank)]}
    for layers in (1, 2, 3):
        engine.metrics()
        outs = [engine.routed_experts(**given, layer=layer) for layer in range(layers)]
        for out_TD in outs[::-1]:
            out_TD.sum().backward()
        sent.append(engine.metrics()["sent_bytes"]["weights to replicas"])
    return sent


def test_weights_are_sent_again_for_a_backward_only_where_the_slots_were_used_since() -> None:
    problem = make(tokens=28, experts=4, dim=8, width=12, bias=True)
    one_expert = 8 * (2 * 12 * 8 + 8 * 12 + 2 * 12 + 8)
    home, host = run_world(2, count_sent_weights, problem)
    # n forwards, n backwards, of which the first finds its weights where its forward left them.
    assert home == [one_expert * (2 * layers - 1) for layers in (1, 2, 3)]
    assert host == [0, 0, 0]


def hide(group: dist.ProcessGroup) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(lrmoe.MoE(dim=8, expert_dim=12, num_experts=7, top_k=2, bias=True) for _ in range(2)))
    whole = sum(p.numel() for p in model[0].experts.parameters())
    engine = ExpertParallel(group, num_experts=7, policy=RandomPlans(3, slots=3))
    parallelize(model, engine)
    before = [name for name, _ in model.named_parameters()], list(model.state_dict()), len(list(model.modules()))
    optimizer = torch.optim.AdamW(model.parameters())
    for seed in range(3):
        x_TD = torch.randn(20, 8, generator=torch.Generator().manual_seed(seed))
        model(x_TD).square().sum().backward()
        optimizer.step()
    assert engine.store.bank is not None
    assert engine.store.bank.gate_up_proj.numel() > 0
    kept = {t.untyped_storage().data_ptr() for t in vars_of(engine.store.bank)}
    owned = [*model.parameters(), *model.buffers(), *model.state_dict().values(), *optimizer.state_dict()["state"]]
    assert not kept & {t.untyped_storage().data_ptr() for t in owned if isinstance(t, Tensor)}
    assert not any(t.requires_grad for t in vars_of(engine.store.bank))
    assert before == (
        [name for name, _ in model.named_parameters()],
        list(model.state_dict()),
        len(list(model.modules())),
    )
    copied = copy.deepcopy(model[0].state_dict())
    assert copied.keys() == model[0].state_dict().keys()
    return [whole, sum(p.numel() for p in model[0].experts.parameters())]


def vars_of(bank: Any) -> list[Tensor]:
    return [getattr(bank, name) for name in PARAMETERS]


def test_replicas_are_no_parameters() -> None:
    """Not in the parameters, the state, the optimizer or the modules; and no copy that a gradient could reach."""
    told = run_world(2, hide)
    assert sum(own for _, own in told) == told[0][0]


def grow(group: dist.ProcessGroup, problem: Problem, replicas: bool) -> Any:
    policy: Any = RandomPlans(3, slots=3) if replicas else "fixed"
    engine = ExpertParallel(group, num_experts=7, policy=policy, config=LRMoEConfig(drop=0.0))
    leaves = local_leaves(problem, engine, own_tokens(even_shares(26, engine.size), engine.rank))
    ids_TK = problem.ids_TK[own_tokens(even_shares(26, engine.size), engine.rank)]
    for step in range(4):
        engine.routed_experts(**leaves, topk_ids_TK=ids_TK, step=step).square().sum().backward()
    assert not replicas or engine.metrics()["replicas"] > 1
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_nothing_but_rounding_tells_that_there_are_replicas(ranks: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        problem = make(tokens=26, experts=7, bias=True, dtype=dtype)
        with_, without = (run_world(ranks, grow, problem, replicas) for replicas in (True, False))
        for found, wanted in zip(with_, without, strict=True):
            assert all(error(found[name], wanted[name].double()) < tolerance for name in wanted)
