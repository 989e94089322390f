"""Gradients that come out too large, activations that are never freed, and experts that do not divide by the ranks."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.plans import GivenPlans, RandomPlans
from distributed.spread import even_shares, local_leaves, own_tokens, run_spread
from distributed.world import run_world
from experts.problem import PARAMETERS, Problem, assert_equal, error, expected, make, run
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.balance.plan import home_ranks
from lrmoe.parallel import ExpertParallel
from lrmoe.parallel.collectives import all_reduce

TOKENS = 128


def one_step(
    group: dist.ProcessGroup, problem: Problem, ep_size: int, config: LRMoEConfig, policy: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """SGD at rate 1 on the mean over all tokens, with ``ep_size`` ranks a copy of the experts and as many copies as
    that makes; what the weights of this rank have moved, and the selection weights of its pairs."""
    mesh = init_device_mesh("cpu", (group.size() // ep_size, ep_size), mesh_dim_names=("copies", "ep"))
    # Dense gradients are averaged over all ranks; the experts of a copy see only that copy's tokens.
    engine = ExpertParallel(
        mesh.get_group("ep"), num_experts=problem.num_experts, config=config, policy=policy, gradient_divisor=ep_size
    )
    mine = own_tokens(even_shares(TOKENS, group.size()), group.rank())
    leaves = local_leaves(problem, engine, mine)
    weights = [leaves[name] for name in PARAMETERS]
    before = [weight.detach().clone() for weight in weights]
    with lrmoe.recording() as calls:
        out_TD = engine.routed_experts(**leaves, topk_ids_TK=problem.ids_TK[mine])
        (out_TD * problem.grad_TD[mine]).sum(1).mean().backward()
    for weight in weights:
        assert weight.grad is not None
        all_reduce(weight.grad, mesh.get_group("copies"), what="gradients")
        weight.grad /= mesh.size(0)
    torch.optim.SGD(weights, lr=1.0).step()
    moved = [weight.detach() - old for weight, old in zip(weights, before, strict=True)]
    return dict(zip(PARAMETERS, moved, strict=True)), calls[0].weight_TK


@pytest.mark.parametrize(("ranks", "ep_size"), [(1, 1), (2, 1), (2, 2), (4, 4), (4, 2)])
def test_case_14_expert_gradients_are_of_the_same_size_at_any_layout(ranks: int, ep_size: int) -> None:
    """An expert's gradient already sums over the tokens of its group: averaged like the rest it is a factor of the
    group's size wrong. Adam hides it from the loss; SGD at rate 1 does not."""
    problem = make(tokens=TOKENS, experts=4, bias=True)
    replica = GivenPlans({0: [(1, 9, 4)]}) if ep_size > 1 else "fixed"
    for drop, policy in itertools.product((0.0, 0.4), ("fixed", replica)):
        config = LRMoEConfig(drop=drop, selector="topq", router_grad="exact")
        if drop == 0 and policy is replica and ep_size > 1:
            policy = GivenPlans({0: [(1, 9, 9)]})
        told = run_world(ranks, one_step, problem, ep_size, config, policy)
        weight_TK = torch.cat([own for _, own in told])
        mean = replace(problem, grad_TD=problem.grad_TD / TOKENS)
        wanted = expected(mean, weight_TK)
        if policy == "fixed" and ep_size == ranks:
            assert_equal(run(mean, config), wanted, 1e-12)
        for name in PARAMETERS:
            copies = [
                torch.cat([told[c * ep_size + r][0][name] for r in range(ep_size)]) for c in range(ranks // ep_size)
            ]
            assert all(torch.equal(copies[0], other) for other in copies)
            assert error(-copies[0], wanted.grads[name]) < 1e-12, (name, drop, policy)


def large_tensors(least: int) -> list[Tensor]:
    """Floating point tensors of that many bytes that Python can reach."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) is Tensor]
    return [t for t in found if t.is_floating_point() and t.untyped_storage().nbytes() >= least]


def offload(group: dist.ProcessGroup, problem: Problem, save: str, how: str) -> tuple[int, int, float]:
    """(bytes that the saved-tensor hooks saw, bytes that stayed in memory, error against a run without hooks)."""
    engine = ExpertParallel(
        group,
        num_experts=8,
        policy=GivenPlans({0: [(1, 40, 30)]}),
        config=LRMoEConfig(drop=0.3, save=save, router_grad="exact"),  # type: ignore[arg-type]
    )
    mine = own_tokens(even_shares(problem.x_TD.shape[0], engine.size), engine.rank)
    leaves = local_leaves(problem, engine, mine)
    ids_TK, grad_TD = problem.ids_TK[mine], problem.grad_TD[mine]
    del problem
    call = partial(engine.routed_experts, topk_ids_TK=ids_TK)
    names = list(leaves)
    plain = torch.autograd.grad(call(**leaves), list(leaves.values()), grad_TD)
    least = 4 * ids_TK.numel() * 8
    engine.store.bank = None
    known = {t.untyped_storage().data_ptr() for t in large_tensors(least)}
    seen = 0

    def pack(tensor: Tensor) -> Any:
        nonlocal seen
        if tensor.untyped_storage().data_ptr() in known:
            return tensor
        seen += tensor.numel() * tensor.element_size() if tensor.is_floating_point() else 0
        return tensor.numpy().copy()

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else torch.from_numpy(packed)

    def layer(*given: Tensor) -> Tensor:
        return call(**dict(zip(names, given, strict=True)))

    if how == "hooks":
        with saved_tensors_hooks(pack, unpack):
            out_TD = layer(*leaves.values())
    else:
        out_TD = checkpoint(layer, *leaves.values(), use_reentrant=how == "reentrant")
    known.add(out_TD.untyped_storage().data_ptr())
    bank = engine.store.bank
    assert bank is not None
    known |= {getattr(bank, name).untyped_storage().data_ptr() for name in ("gate_up_proj", "down_proj")}
    left = [t for t in large_tensors(least) if t.untyped_storage().data_ptr() not in known]
    stayed = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in left}.values())
    again = torch.autograd.grad(out_TD, list(leaves.values()), grad_TD)
    return seen, stayed, max(error(a, b) for a, b in zip(again, plain, strict=True))


@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_case_32_nothing_large_hides_from_saved_tensor_hooks_and_checkpoints(save: str) -> None:
    """Tensors that a backward keeps as attributes of its context are seen by no hook: offloading saves nothing, and a
    checkpointed layer holds its activations all the same."""
    problem = make(tokens=200, experts=8, dim=32, width=48, dtype=torch.float64)
    for seen, stayed, wrong in run_world(2, offload, problem, save, "hooks"):
        # The rows' inputs at least; with save="preactivation" three times as much for the up projections.
        assert seen > (3 if save == "preactivation" else 1) * 150 * 32 * 8
        assert stayed == 0
        assert wrong == 0
    # A reentrant checkpoint cannot be differentiated by autograd.grad.
    for seen, stayed, wrong in run_world(2, offload, problem, save, "non-reentrant"):
        assert (seen, stayed, wrong) == (0, 0, 0)


def hidden_rows(group: dist.ProcessGroup, problem: Problem) -> int:
    """Bytes that the context holds past the hooks, per pair of this rank."""
    engine = ExpertParallel(group, num_experts=8, policy=GivenPlans({0: [(1, 40, 30)]}))
    mine = own_tokens(even_shares(problem.x_TD.shape[0], engine.size), engine.rank)
    out_TD = engine.routed_experts(**local_leaves(problem, engine, mine), topk_ids_TK=problem.ids_TK[mine])
    layout = out_TD.grad_fn.dispatched.layout  # type: ignore[union-attr]
    return sum(t.numel() * t.element_size() for t in (layout.pair_L, layout.order_R)) // problem.ids_TK[mine].numel()


def test_case_32_what_the_context_holds_is_a_few_bytes_a_pair() -> None:
    for held in run_world(2, hidden_rows, make(tokens=200, experts=8)):
        assert held <= 24


@pytest.mark.parametrize("ranks", [2, 4])
def test_case_35_seven_experts_on_two_and_four_ranks(ranks: int) -> None:
    """Owner = id // (experts / ranks) is wrong, or out of range, where the ranks do not divide the experts."""
    assert [home_ranks(7, ranks).count(rank) for rank in range(ranks)] == {2: [4, 3], 4: [2, 2, 2, 1]}[ranks]
    problem = make(tokens=30, experts=7, bias=True)
    # With its one replica the last rank has as many experts as the others.
    for policy in ("fixed", GivenPlans({0: [(ranks - 1, 6, 6)]}, slots=1)):
        found = run_spread(problem, ranks, LRMoEConfig(drop=0.0), policy=policy)
        assert_equal(found.result, run(problem, LRMoEConfig(drop=0.0)), 1e-12)


def construct(group: dist.ProcessGroup, num_experts: int) -> str:
    try:
        ExpertParallel(group, num_experts=num_experts)
    except ValueError as refusal:
        return str(refusal)
    return ""


def test_case_35_more_ranks_than_experts_is_refused_with_both_numbers() -> None:
    assert [home_ranks(60, 8).count(rank) for rank in range(8)] == [8, 8, 8, 8, 7, 7, 7, 7]
    assert run_world(4, construct, 4) == [""] * 4
    for message in run_world(4, construct, 2):
        assert "num_experts=2 is less than the 4 ranks" in message
        assert "smaller expert-parallel group" in message


def shard_inside(group: dist.ProcessGroup, problem: Problem) -> list[tuple[str, int]]:
    """Experts split over both ranks along their width, as expert tensor parallelism has them."""
    mesh = init_device_mesh("cpu", (2,))
    engine = ExpertParallel(dist.new_group([group.rank()], use_local_synchronization=True), num_experts=4)
    told = []
    for gate_up, down in (([Shard(1)], None), (None, [Shard(2)]), ([Shard(1)], [Shard(2)]), ([Shard(0)], None)):
        leaves = local_leaves(problem, engine, slice(None))
        for name, placements in (("gate_up_proj", gate_up), ("down_proj", down)):
            if placements is not None:
                leaves[name] = distribute_tensor(leaves[name].detach(), mesh, placements).requires_grad_()
        try:
            engine.routed_experts(**leaves, topk_ids_TK=problem.ids_TK)
        except ValueError as refusal:
            told.append((str(refusal), engine.traffic.bytes.get("tokens to experts", 0)))
    return told


def test_case_43_experts_sharded_inside_are_refused() -> None:
    """Norms and gradients of a shard, taken for whole, choose other pairs on each shard and add up partial sums, with
    no error."""
    for told in run_world(2, shard_inside, make(tokens=12, experts=4)):
        assert [sent for _, sent in told] == [0] * 4
        messages = [message for message, _ in told]
        assert all("sharded inside the experts" in message for message in messages[:3])
        assert all("expert tensor parallelism is not supported" in message for message in messages[:3])
        assert "gate_up_proj is a DTensor (S(0))" in messages[3]
        assert messages[1].startswith("down_proj")


def keep(group: dist.ProcessGroup, problem: Problem, selector: str, policies: list[Any]) -> list[list[Tensor]]:
    """Kept sets and weights: of the forward's own activations, recomputed in both ways, and of every microbatch."""
    told = []
    for policy, how in itertools.product(policies, (None, False, True)):
        config = LRMoEConfig(drop=0.5, selector=selector)  # type: ignore[arg-type]
        engine = ExpertParallel(group, num_experts=7, policy=policy, config=config)
        mine = own_tokens(even_shares(problem.x_TD.shape[0], engine.size), engine.rank)
        leaves = local_leaves(problem, engine, mine)
        ids_TK = problem.ids_TK[mine]

        def layer(x_TD: Tensor, engine: Any = engine, leaves: Any = leaves, ids_TK: Tensor = ids_TK) -> Tensor:
            return engine.routed_experts(**{**leaves, "x_TD": x_TD}, topk_ids_TK=ids_TK, step=3, layer=2, microbatch=1)

        with lrmoe.recording() as calls:
            out_TD = layer(leaves["x_TD"]) if how is None else checkpoint(layer, leaves["x_TD"], use_reentrant=how)
            out_TD.backward(problem.grad_TD[mine])
        told.append([calls[0].kept_TK, calls[0].weight_TK])
    return told


@pytest.mark.parametrize("selector", ["pps", "topq", "random"])
def test_case_n3_everybody_who_decides_what_is_kept_decides_the_same(selector: str) -> None:
    """An expert that is somewhere else, a forward that is run again, another number of ranks: each of them draws anew
    if the numbers come from a generator's state, and then gradients of a pair exist in one place and not in another."""
    problem = make(tokens=28, experts=7)
    wanted = run(problem, LRMoEConfig(drop=0.5, selector=selector), step=3, layer=2, microbatch=1).call  # type: ignore[arg-type]
    assert wanted is not None
    for ranks in (1, 2, 4):
        told = run_world(ranks, keep, problem, selector, ["fixed", RandomPlans(4, repeats=True)])
        for number in range(6):
            kept_TK, weight_TK = (torch.cat([own[number][part] for own in told]) for part in (0, 1))
            if number < 3 or ranks == 1:
                assert torch.equal(kept_TK, wanted.kept_TK)
                # The record rounds to fp32 what may differ in the last bit of fp64.
                assert torch.allclose(weight_TK, wanted.weight_TK, rtol=torch.finfo(torch.float32).eps, atol=0)
            else:
                first = [torch.cat([own[3][part] for own in told]) for part in (0, 1)]
                assert torch.equal(kept_TK, first[0])
                assert torch.equal(weight_TK, first[1])
                assert int(kept_TK.sum()) == int(wanted.quota_E.sum())
