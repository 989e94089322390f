"""Which gradients are asked for, how the backward is called, and what it sends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.plans import RandomPlans, policies
from distributed.spread import Job, even_shares, local_leaves, own_tokens, run_jobs
from distributed.world import run_world
from experts.problem import Problem, Result, assert_equal, error, expected, live_pairs, make, run
from torch import Tensor

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.parallel import ExpertParallel


def parts(
    group: dist.ProcessGroup, problem: Problem, **options: Any
) -> tuple[ExpertParallel, slice, dict[str, Tensor]]:
    """An engine, and this rank's tokens and leaves."""
    engine = ExpertParallel(group, num_experts=problem.num_experts, **options)
    mine = own_tokens(even_shares(problem.x_TD.shape[0], engine.size), engine.rank)
    return engine, mine, local_leaves(problem, engine, mine)


def ask_for_some(group: dist.ProcessGroup, problem: Problem, options: dict[str, Any]) -> list[dict[str, Tensor | None]]:
    found: list[dict[str, Tensor | None]] = []
    engine, mine, leaves = parts(group, problem, **options)
    for wanted in itertools.product((False, True), repeat=len(leaves)):
        for leaf, needed in zip(leaves.values(), wanted, strict=True):
            leaf.grad = None
            leaf.requires_grad_(needed)
        out_TD = engine.routed_experts(topk_ids_TK=problem.ids_TK[mine], **leaves)
        assert out_TD.requires_grad == any(wanted)
        if any(wanted):
            out_TD.backward(problem.grad_TD[mine])
        found.append({name: leaf.grad for name, leaf in leaves.items()})
    return found


@pytest.mark.parametrize("replicas", [False, True])
def test_only_the_gradients_that_are_asked_for(replicas: bool) -> None:
    problem = make(tokens=26, experts=7, bias=True)
    config = LRMoEConfig(drop=0.5, router_grad="exact")
    options = {"policy": RandomPlans(1, repeats=True) if replicas else "fixed"}
    told = run_world(2, ask_for_some, problem, {"config": config, **options})
    (everything,) = run_jobs([Job(problem=problem, config=config, options=options)], 2)
    names = list(problem.leaves())
    for number, wanted in enumerate(itertools.product((False, True), repeat=len(names))):
        for name, needed in zip(names, wanted, strict=True):
            grads = [answers[number][name] for answers in told]
            if needed:
                assert error(torch.cat(grads), everything.result.grads[name]) < 1e-13, (name, wanted)  # type: ignore[arg-type]
            else:
                assert grads == [None, None]


def call_in_odd_ways(group: dist.ProcessGroup, problem: Problem) -> dict[str, Any]:
    config = LRMoEConfig(drop=0.4, selector="topq")
    engine, mine, leaves = parts(group, problem, config=config, policy=RandomPlans(1, repeats=True))
    ids_TK, grad_TD = problem.ids_TK[mine], problem.grad_TD[mine]

    def gradients(change: Any = None, grad_TD: Tensor = grad_TD, **more: Any) -> list[Tensor]:
        out_TD = engine.routed_experts(**{"topk_ids_TK": ids_TK, **leaves, **more})
        out_TD = out_TD if change is None else change(out_TD)
        return list(torch.autograd.grad(out_TD, list(leaves.values()), grad_TD))

    def same(first: list[Tensor], second: list[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def in_place(out_TD: Tensor) -> Tensor:
        out_TD += 1.0
        return out_TD

    told: dict[str, Any] = {}
    plain = gradients()
    told["again"] = same(plain, gradients())
    told["changed in place"] = same(plain, gradients(in_place))
    told["strided gradient"] = same(plain, gradients(grad_TD=torch.stack([grad_TD, grad_TD], -1)[..., 1]))
    one_TD = torch.ones(()).double().expand(grad_TD.shape)
    told["expanded gradient"] = same(gradients(grad_TD=one_TD), gradients(grad_TD=one_TD.contiguous()))
    views = {name: torch.stack([leaf, leaf], -1)[..., 0] for name, leaf in leaves.items()}
    # The products run on other strides, and may round otherwise.
    told["strided arguments"] = all(error(a, b) < 1e-13 for a, b in zip(gradients(**views), plain, strict=True))
    told["int32 ids"] = same(plain, gradients(topk_ids_TK=ids_TK.int()))
    out_TD = engine.routed_experts(topk_ids_TK=ids_TK, **leaves)
    first = torch.autograd.grad(out_TD, list(leaves.values()), grad_TD, retain_graph=True)
    told["twice"] = same(list(first), list(torch.autograd.grad(out_TD, list(leaves.values()), grad_TD)))
    # Two forwards, of which the first one's backward comes last, with other replicas in the slots.
    layers = [engine.routed_experts(topk_ids_TK=ids_TK, layer=layer, **leaves) for layer in (0, 1)]
    second = [list(torch.autograd.grad(out, list(leaves.values()), grad_TD)) for out in layers]
    told["interleaved"] = same(plain, second[0])
    with torch.no_grad():
        evaluated = engine.routed_experts(topk_ids_TK=ids_TK, **leaves)
    told["evaluated"] = torch.equal(evaluated, out_TD) and not evaluated.requires_grad
    with torch.inference_mode():
        told["inference"] = torch.equal(engine.routed_experts(topk_ids_TK=ids_TK, **leaves), out_TD)
    halved = ExpertParallel(
        group, num_experts=7, config=config, policy=RandomPlans(1, repeats=True), gradient_divisor=float(group.size())
    )
    out_TD = halved.routed_experts(topk_ids_TK=ids_TK, **leaves)
    averaged = torch.autograd.grad(out_TD, list(leaves.values()), grad_TD)
    told["divided"] = same([g if i < 2 else g / group.size() for i, g in enumerate(plain)], list(averaged))
    if group.size() == 2:
        compiled = torch.compile(
            lambda given: engine.routed_experts(topk_ids_TK=ids_TK, **given) * 1.0, backend="eager"
        )
        told["compiled"] = same(plain, list(torch.autograd.grad(compiled(leaves), list(leaves.values()), grad_TD)))
    out_TD = engine.routed_experts(topk_ids_TK=ids_TK, **leaves)
    (dx,) = torch.autograd.grad(out_TD.square().sum(), leaves["x_TD"], create_graph=True)
    try:
        dx.sum().backward()
    except RuntimeError as refusal:
        told["second derivative"] = str(refusal)
    return told


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_way_of_calling_gives_the_same_gradients(ranks: int) -> None:
    for told in run_world(ranks, call_in_odd_ways, make(tokens=26, experts=7, bias=True)):
        assert "can be differentiated once" in told.pop("second derivative")
        assert all(told.values()), told


def with_autocast(group: dist.ProcessGroup, problem: Problem) -> Result:
    engine, mine, leaves = parts(
        group, problem, config=LRMoEConfig(drop=0.3, router_grad="exact"), policy=RandomPlans(1, repeats=True)
    )
    with lrmoe.recording() as calls, torch.autocast("cpu", dtype=torch.bfloat16):
        out_TD = engine.routed_experts(topk_ids_TK=problem.ids_TK[mine], **leaves)
    with lrmoe.recording() as calls, torch.autocast("cpu", dtype=torch.bfloat16):
        out_TD = engine.routed_experts(topk_ids_TK=problem.ids_TK[mine], **leaves)
        out_TD.backward(problem.grad_TD[mine])
    assert len(calls) == 1
    return Result(
        out_TD=out_TD.detach(),
        grads={n: leaf.grad for n, leaf in leaves.items()},
        call=calls[0],  # type: ignore[misc]
    )


def test_under_autocast_products_are_half_precision_and_gradients_are_not() -> None:
    problem = make(tokens=40, experts=7, bias=True, dtype=torch.float32, dim=16, width=24)
    told = run_world(2, with_autocast, problem)
    weight_TK = torch.cat([result.call.weight_TK for result in told])  # type: ignore[union-attr]
    wanted = expected(problem, weight_TK)
    out_TD = torch.cat([result.out_TD for result in told])
    assert out_TD.dtype == torch.float32
    assert 1e-5 < error(out_TD, wanted.out_TD) < 0.03
    for name in wanted.grads:
        found = torch.cat([result.grads[name] for result in told])
        assert found.dtype == torch.float32
        assert error(found, wanted.grads[name]) < 0.05, name


PURPOSES = {
    "gradients to experts": "wide",
    "gradients to tokens": "wide",
    "routing weights to experts": 1,
    "routing weight gradients to tokens": 1,
    "scores to experts": 1,
    "kept flags to tokens": 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["fixed", "lrmoe, two slots", "random"])
def test_both_ways_of_the_backward_carry_kept_rows_only(policy: str, dtype: torch.dtype) -> None:
    """Counted against what the kept pairs, found one by one, must cost: a row of D numbers each way and 8 bytes for
    each kept pair that lives elsewhere, and 5 bytes for every such pair."""
    from distributed.plans import instance_of_pairs
    from distributed.test_exactness import plan_of

    ranks, dim = 2, 256
    problem = make(tokens=200, experts=8, dim=dim, width=8, dtype=dtype)
    jobs = [
        Job(problem=problem, config=LRMoEConfig(drop=drop), options={"policy": policies()[policy]}, record=record)
        for drop, record in ((0.0, False), (0.2, False), (0.2, True))
    ]
    whole, dropped, recorded = run_jobs(jobs, ranks)
    totals = []
    for done, spread, calls in ((jobs[0], whole, None), (jobs[1], dropped, recorded.result.call)):
        kept_TK = live_pairs(problem) if calls is None else calls.kept_TK
        rank_TK = instance_of_pairs(problem, even_shares(200, ranks), plan_of(done, ranks))
        total = 0
        for source, tokens in enumerate(torch.arange(200).split(even_shares(200, ranks))):
            away_TK = rank_TK[tokens] != source
            home = torch.arange(200).split(even_shares(200, ranks))[1 - source]
            arriving_TK = rank_TK[home] == source
            kept_away, kept_arriving = int((away_TK & kept_TK[tokens]).sum()), int((arriving_TK & kept_TK[home]).sum())
            sent = spread.metrics[source]["sent_bytes"]
            assert sent["gradients to experts"] == kept_away * dim * dtype.itemsize
            assert sent["gradients to tokens"] == kept_arriving * dim * dtype.itemsize
            assert sent["routing weights to experts"] == 4 * kept_away
            assert sent["routing weight gradients to tokens"] == 4 * kept_arriving
            assert sent.get("scores to experts", 0) == (0 if calls is None else 4 * int(away_TK.sum()))
            assert sent.get("kept flags to tokens", 0) == (0 if calls is None else int(arriving_TK.sum()))
            total += sum(sent.get(purpose, 0) for purpose in PURPOSES)
            rows = int(away_TK.sum()) * dim * dtype.itemsize
            assert sent["tokens to experts"] == rows
            replicas = {"weights to replicas", "gradients of replicas home"} if policy != "fixed" else set()
            assert set(sent) - set(PURPOSES) - replicas == {
                "engines",
                "loads",
                "tokens to experts",
                "outputs to tokens",
            }
        totals.append(total)
    # Plans at random keep other shares on the wire than on the spot.
    assert policy == "random" or 0.79 < totals[1] / totals[0] <= 0.82


def test_a_whole_backward_sends_no_scores() -> None:
    """With nothing to drop, and nobody recording, no rank asks another for scores or tells it what it keeps."""
    problem = make(tokens=26, experts=7, bias=True)
    job = Job(problem=problem, config=LRMoEConfig(drop=0.0), options={"policy": policies()["random"]}, record=False)
    (spread,) = run_jobs([job], 2)
    assert_equal(spread.result, run(problem, job.config), 1e-12)
    for metrics in spread.metrics:
        assert not {"scores to experts", "kept flags to tokens", "record to tokens"} & set(metrics["sent_bytes"])
