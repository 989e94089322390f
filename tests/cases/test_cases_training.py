"""Steps, microbatches, frozen and adapted weights, gradients taken in parts, determinism, compilation."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.fixtures import DIM, EXPERTS, WIDTH, into, layer, standard
from experts.problem import error, expected, run
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lrmoe
from lrmoe import LRMoEConfig


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_case_16_low_rank_adapters_on_frozen_experts(drop: float) -> None:
    """Base weights frozen, rank-4 factors per expert, merged as W + B A each step: in three steps every factor of an
    expert that kept a pair moves, no other does, and the base gets no gradient. The importance is that of the merged
    weights' gradient. (A separate adapter path inside an expert has no place in this operator's signature.)"""
    problem = standard()
    rank = 4
    shapes = {"gate_up_proj": (2 * WIDTH, DIM), "down_proj": (DIM, WIDTH)}
    base = {name: getattr(problem, name) for name in shapes}
    b = {name: nn.Parameter(0.1 * torch.randn(EXPERTS, out, rank)) for name, (out, _) in shapes.items()}
    a = {name: nn.Parameter(0.1 * torch.randn(EXPERTS, rank, inner)) for name, (_, inner) in shapes.items()}
    factors = [*b.values(), *a.values()]
    before = [factor.detach().clone() for factor in factors]
    optimizer = torch.optim.SGD(factors, lr=0.1)
    # Expert 6 gets no token at all.
    ids_TK = torch.where(problem.ids_TK == 6, 7, problem.ids_TK)
    kept_E = torch.zeros(EXPERTS, dtype=torch.bool)
    for step in range(3):
        merged = {name: base[name] + b[name] @ a[name] for name in shapes}
        with lrmoe.recording() as calls:
            out = lrmoe.routed_experts(
                problem.x_TD, ids_TK, problem.alpha_TK, **merged, config=LRMoEConfig(drop=drop), step=step
            )
            optimizer.zero_grad()
            out.backward(problem.grad_TD)
        optimizer.step()
        kept_E |= torch.tensor([bool(calls[0].kept_TK[ids_TK == e].any()) for e in range(EXPERTS)])
    assert kept_E.tolist() == [True] * 6 + [False, True]
    for factor, old in zip(factors, before, strict=True):
        assert torch.equal((factor != old).flatten(1).any(1), kept_E)
    assert all(weight.grad is None for weight in base.values())


def test_case_18_one_batch_or_four_microbatches() -> None:
    """Quotas are per microbatch, each with draws of its own; the schedule moves once per optimizer step; kept pairs of
    a step are the sum over its microbatches; without drop the gradients add up to the batch's."""
    x = torch.randn(128, DIM)
    results = {}
    for drop, parts in itertools.product((0.0, 0.5), (1, 4)):
        model = nn.Sequential(layer())
        recal = lrmoe.attach(model, LRMoEConfig(drop=drop, ramp_steps=2))
        recal.set_step(5)
        with lrmoe.recording() as calls:
            for part in x.chunk(parts):
                (model(part).square().sum() / 128).backward()
        assert [c.microbatch for c in calls] == list(range(parts))
        assert {c.step for c in calls} == {5}
        recal.step()
        metrics = recal.metrics()
        assert metrics["step"] == 6
        assert metrics["drop"] == drop
        read = metrics["layers"]["0"]
        assert sum(read["kept"]) == sum(int(c.kept_TK.sum()) for c in calls) == sum(int(c.quota_E.sum()) for c in calls)
        assert sum(read["load"]) == 256
        for c in calls:
            share = (1 - drop) * int(c.load_E.sum())
            assert abs(int(c.quota_E.sum()) - share) <= 1
        results[drop, parts] = [p.grad for p in model.parameters()]
    for one, four in zip(results[0.0, 1], results[0.0, 4], strict=True):
        assert error(four, one.double()) < 1e-5


def test_case_18_a_factor_on_the_loss_changes_no_choice() -> None:
    """Accumulation divides the loss, token-normalised losses divide by 5, 50, 32 or 41, a scaler multiplies by 65536:
    kept pairs and their weights are the same, gradients scale with the loss."""
    problem = standard()
    for selector in ("pps", "topq", "random", "auto"):
        config = LRMoEConfig(drop=0.5, selector=selector)  # type: ignore[arg-type]
        plain = run(problem, config)
        for factor in (1 / 4, 1 / 5, 1 / 50, 1 / 32, 1 / 41, 65536.0, 1e-12):
            scaled = run(type(problem)(**{**vars(problem), "grad_TD": problem.grad_TD * factor}), config)
            assert plain.call is not None
            assert scaled.call is not None
            assert torch.equal(plain.call.kept_TK, scaled.call.kept_TK)
            assert torch.allclose(plain.call.weight_TK, scaled.call.weight_TK, rtol=1e-5)
            for name, grad in plain.grads.items():
                assert error(scaled.grads[name] / factor, grad.double()) < 1e-4


def test_case_23_ties_go_to_the_lowest_pair() -> None:
    """1000 pairs, ten of them with importance and the rest with none, quota 20: the ten, then the first ten others; the
    same bits in eight runs, and with deterministic algorithms demanded. (Atomics can only differ on a GPU.)"""
    problem = standard(ids_TK=torch.zeros(1000, 1, dtype=torch.int64), experts=1)
    important = torch.arange(37, 1000, 101)
    problem.grad_TD[[t for t in range(1000) if t not in important.tolist()]] = 0
    config = LRMoEConfig(drop=0.98, selector="topq")
    first = run(problem, config)
    assert first.call is not None
    others = [t for t in range(1000) if t not in important.tolist()]
    assert first.call.kept_TK.view(-1).nonzero().view(-1).tolist() == sorted([*important.tolist(), *others[:10]])
    for repeat in range(8):
        torch.use_deterministic_algorithms(repeat % 2 == 1)
        again = run(problem, config)
        torch.use_deterministic_algorithms(False)
        assert all(torch.equal(first.grads[name], again.grads[name]) for name in first.grads)


@pytest.mark.parametrize("selector", ["topq", "pps"])
def test_case_23_upcycled_experts_tie_everywhere(selector: Any) -> None:
    """All experts alike, all tokens alike, all routing weights alike: every importance ties. Top-q keeps the first
    pairs of each expert; every selector repeats bit for bit. The numbers are small integers: equal rows of a product
    are equal bits only where nothing is rounded."""
    problem = standard(ids_TK=torch.tensor([[0, 1], [2, 3]]).repeat(16, 1), experts=4)
    whole = {name: (2 * getattr(problem, name)[:1]).round() for name in ("x_TD", "grad_TD")}
    whole |= {name: (8 * getattr(problem, name)[:1]).round() for name in ("gate_up_proj", "down_proj")}
    assert all(value.unique().numel() > 2 for value in whole.values())
    alike = {name: value.expand_as(getattr(problem, name)) for name, value in whole.items()}
    problem = replace(problem, **alike, alpha_TK=torch.full((32, 2), 0.5), activation="relu")
    config = LRMoEConfig(drop=0.5, selector=selector)
    runs = [run(problem, config) for _ in range(8)]
    call = runs[0].call
    assert call is not None
    assert call.importance_TK.unique().numel() == 1
    if selector == "topq":
        # Tokens 0, 2, ... visit experts 0 and 1, the others 2 and 3: the first eight of sixteen each.
        assert call.kept_TK.all(-1).tolist() == [True] * 16 + [False] * 16
    for other in runs[1:]:
        assert all(torch.equal(other.grads[name], grad) for name, grad in runs[0].grads.items())


def test_case_26_a_compiled_layer_trains_without_breaks_or_recompiles() -> None:
    """fullgraph=True, 20 steps of an attached layer with other loads each, an expert without tokens on step 7 and a
    rising drop: one graph; the numbers of the eager layer. A new length costs one more."""
    torch._dynamo.reset()
    counters.clear()
    results = []
    for compiled in (True, False):
        moe = layer()
        model = nn.Sequential(moe, nn.Linear(DIM, DIM))
        recal = lrmoe.attach(model, LRMoEConfig(drop=0.6, warmup_steps=2, ramp_steps=9, guard_variance=None))
        call: Any = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        generator = torch.Generator().manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        with lrmoe.recording() as calls:
            for step in range(22):
                x = torch.randn(48 if step < 20 else 30 + step, DIM, generator=generator)
                if step == 7:
                    # Positive tokens, which a router row of large negative weights never chooses.
                    x = x.abs() + 0.1
                with torch.no_grad():
                    row = moe.router.weight[3].clone()
                    moe.router.weight[3] = -1e3 if step == 7 else row
                optimizer.zero_grad()
                loss = call(x).square().mean()
                loss.backward()
                with torch.no_grad():
                    moe.router.weight[3] = row
                optimizer.step()
                recal.step()
                losses.append(float(loss.detach()))
            if compiled:
                assert counters["stats"]["unique_graphs"] == 2
                assert not counters["graph_break"]
        assert len(calls) == 22
        assert [c.step for c in calls] == list(range(22))
        assert len({tuple(c.load_E.tolist()) for c in calls}) > 15
        assert [step for step, c in enumerate(calls) if c.load_E[3] == 0] == [7]
        kept = [int(c.kept_TK.sum()) / int(c.load_E.sum()) for c in calls]
        assert kept[0] == kept[1] == 1.0
        assert kept[2] > kept[6] > kept[15] == pytest.approx(0.4, abs=0.02)
        results.append((losses, [p.detach() for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    for found, wanted in zip(results[0][1], results[1][1], strict=True):
        assert error(found, wanted.double()) < 1e-3


def test_case_31_several_forwards_before_one_backward() -> None:
    """Two forwards of different lengths, a layer used twice in one graph, and a forward without gradients in between:
    the state of each lies in its own graph. After the backward nothing of it is referenced by the module."""
    moe = layer(LRMoEConfig(drop=0.5)).double()
    parameters = list(moe.parameters())
    x1, x2 = torch.randn(40, DIM).double(), torch.randn(11, DIM).double()

    def alone(x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(moe(x).square().sum(), parameters))

    wanted = [a + b for a, b in zip(alone(x1), alone(x2), strict=True)]
    y1 = moe(x1)
    with torch.no_grad():
        moe(torch.randn(64, DIM).double())
    y2 = moe(x2)
    moe.eval()
    moe(torch.randn(3, DIM).double())
    moe.train()
    found = torch.autograd.grad(y1.square().sum() + y2.square().sum(), parameters)
    assert all(error(a, b) < 1e-12 for a, b in zip(found, wanted, strict=True))
    # The same layer twice in one graph: as two layers that share their weights.
    first, second = layer(LRMoEConfig(drop=0.5)).double(), layer(LRMoEConfig(drop=0.5)).double()
    shared = torch.autograd.grad(moe(moe(x1)).square().sum(), parameters)
    apart = torch.autograd.grad(second(first(x1)).square().sum(), [*first.parameters(), *second.parameters()])
    half = len(parameters)
    for i, grad in enumerate(shared):
        assert error(grad, apart[i] + apart[half + i]) < 1e-12
    x = torch.randn(40, DIM, dtype=torch.float64, requires_grad=True)
    out = moe(x)
    refs = [weakref.ref(x), weakref.ref(out)]
    out.sum().backward()
    del x, out
    gc.collect()
    assert all(ref() is None for ref in refs)


@pytest.mark.parametrize("router_grad", ["exact", "sum_rule", "kept"])
@pytest.mark.parametrize(("x", "router", "experts"), list(itertools.product((False, True), repeat=3)))
def test_case_41_frozen_parts(x: bool, router: bool, experts: bool, router_grad: Any) -> None:
    """All eight combinations of frozen input, router and experts: what trains gets the gradient it has when everything
    trains, what is frozen none. Frozen experts still pass on the gradient of kept pairs alone: quotas hold for the
    input's gradient too, as documented."""
    results = []
    for all_train in (True, False):
        moe = layer(LRMoEConfig(drop=0.5, router_grad=router_grad)).double()
        x_TD = torch.randn(64, DIM, generator=torch.Generator().manual_seed(4)).double()
        x_TD.requires_grad_(x or all_train)
        moe.router.requires_grad_(router or all_train)
        moe.experts.requires_grad_(experts or all_train)
        out = moe(x_TD)
        assert out.requires_grad == (x or router or experts or all_train)
        if out.requires_grad:
            out.square().sum().backward()
        results.append([x_TD.grad, moe.router.weight.grad, moe.experts.gate_up_proj.grad, moe.experts.down_proj.grad])
    for wanted, found, trains in zip(results[0], results[1], (x, router, experts, experts), strict=True):
        if trains:
            assert error(found, wanted) < 1e-12
        else:
            assert found is None


def test_case_41_experts_frozen_by_hooks_and_single_frozen_parts() -> None:
    """A hook that zeroes some experts' gradients, one projection frozen and not the other, biases frozen alone, and
    biases that are None."""
    problem = standard(bias=True, dtype=torch.float64)
    config = LRMoEConfig(drop=0.5)
    everything = run(problem, config).grads
    leaves = problem.leaves()
    frozen = torch.tensor([0, 3])
    leaves["down_proj"].register_hook(lambda grad: grad.index_fill(0, frozen, 0.0))
    lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=config, **leaves).backward(problem.grad_TD)
    assert (leaves["down_proj"].grad[frozen] == 0).all()
    assert torch.equal(leaves["down_proj"].grad[[1, 2, 4]], everything["down_proj"][[1, 2, 4]])
    for names in (["gate_up_proj"], ["down_proj"], ["gate_up_bias", "down_bias"], ["x_TD", "down_bias"]):
        leaves = problem.leaves()
        for name in names:
            leaves[name].requires_grad_(False)
        lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=config, **leaves).backward(problem.grad_TD)
        for name, leaf in leaves.items():
            assert (leaf.grad is None) == (name in names)
            assert leaf.grad is None or error(leaf.grad, everything[name]) < 1e-12
    without = standard(dtype=torch.float64)
    assert set(run(without, config).grads) == {"x_TD", "topk_weights_TK", "gate_up_proj", "down_proj"}


def test_case_46_gradients_kept_in_fp32_by_a_hook() -> None:
    """bf16 parameters whose gradients a hook adds to an fp32 buffer filled with 1: after two microbatches the buffer
    holds exactly 1 plus both gradients. The operator returns ordinary gradients; there is no fused accumulation."""
    problem = standard(dtype=torch.bfloat16)
    config = LRMoEConfig(drop=0.5)
    leaves = problem.leaves()
    main_grads = {name: torch.ones(leaf.shape, dtype=torch.float32) for name, leaf in leaves.items()}
    for name, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(into(main_grads[name]))
    wanted = {name: torch.ones(leaf.shape, dtype=torch.float32) for name, leaf in leaves.items()}
    for microbatch in range(2):
        out = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=config, microbatch=microbatch, **leaves)
        out.backward(problem.grad_TD)
        for name, grad in run(problem, config, microbatch=microbatch).grads.items():
            wanted[name] += grad
    for name, main_grad in main_grads.items():
        assert torch.equal(main_grad, wanted[name]), name
        assert leaves[name].grad is None


def test_case_47_gradients_taken_in_parts_keep_the_same_pairs() -> None:
    """The input's gradient first and the weights' later, as zero-bubble schedules do: both passes keep the same pairs
    with the same weights, and together they are the one backward."""
    problem = standard()
    config = LRMoEConfig(drop=0.5)
    whole = run(problem, config, step=3).grads
    leaves = problem.leaves()
    out = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=config, step=3, **leaves)
    with lrmoe.recording() as calls:
        first = torch.autograd.grad(out, [leaves["x_TD"]], problem.grad_TD, retain_graph=True)
        torch.rand(100)
        later = torch.autograd.grad(
            out, [leaves[name] for name in ("topk_weights_TK", "gate_up_proj", "down_proj")], problem.grad_TD
        )
    assert len(calls) == 2
    assert torch.equal(calls[0].kept_TK, calls[1].kept_TK)
    assert torch.equal(calls[0].weight_TK, calls[1].weight_TK)
    for found, wanted in zip([*first, *later], whole.values(), strict=True):
        assert error(found, wanted.double()) < 1e-6
    assert error(first[0], expected(problem, calls[0].weight_TK).grads["x_TD"]) < 1e-5
