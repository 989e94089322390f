"""Ranks with few tokens, no tokens, tokens of which nothing is kept, and what all that must not change for others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.plans import GivenPlans, RandomPlans
from distributed.spread import local_leaves, own_tokens
from distributed.world import run_world
from experts.problem import PARAMETERS, Problem, error, make, run
from rounding import allowance
from torch import Tensor

from lrmoe import LRMoEConfig
from lrmoe.parallel import ExpertParallel, RankFailure

Step = tuple[Problem, Sequence[int]]
"""The tokens of all ranks (its weights are not used) and how many of them each rank has."""


def train(group: dist.ProcessGroup, start: Problem, steps: list[Step], config: LRMoEConfig, policy: Any) -> list[Any]:
    """Trains the experts of ``start`` by AdamW; every step's outputs, gradients of the tokens, and weights."""
    engine = ExpertParallel(group, num_experts=start.num_experts, config=config, policy=policy)
    weights = {n: w for n, w in local_leaves(start, engine, slice(0, 0)).items() if n in PARAMETERS}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.05)
    told = []
    for number, (tokens, shares) in enumerate(steps):
        mine = own_tokens(shares, engine.rank)
        x_TD, alpha_TK = (t[mine].clone().requires_grad_() for t in (tokens.x_TD, tokens.alpha_TK))
        out_TD = engine.routed_experts(x_TD, tokens.ids_TK[mine], alpha_TK, **weights, step=number)
        optimizer.zero_grad()
        out_TD.backward(tokens.grad_TD[mine])
        assert all(weight.grad is not None for weight in weights.values())
        optimizer.step()
        told.append([out_TD.detach(), x_TD.grad, alpha_TK.grad, *(w.detach().clone() for w in weights.values())])
    return told


def train_alone(start: Problem, steps: list[Step], config: LRMoEConfig) -> list[list[Tensor]]:
    """The same in one process, on the union of the tokens."""
    weights = {name: leaf for name, leaf in start.leaves().items() if name in PARAMETERS}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.05)
    told = []
    for number, (tokens, _) in enumerate(steps):
        now = replace(tokens, **{name: weight.detach() for name, weight in weights.items()})
        result = run(now, config, step=number)
        for name, weight in weights.items():
            weight.grad = result.grads[name]
        optimizer.step()
        told.append(
            [result.out_TD, result.grads["x_TD"], result.grads["topk_weights_TK"]]
            + [weight.detach().clone() for weight in weights.values()]
        )
    return told


def assert_trains_alike(start: Problem, steps: list[Step], config: LRMoEConfig, policy: Any, ranks: int) -> None:
    told = run_world(ranks, train, start, steps, config, policy, timeout=60)
    for number, wanted in enumerate(train_alone(start, steps, config)):
        for place, tensor in enumerate(wanted):
            found = torch.cat([own[number][place] for own in told])
            assert error(found, tensor) < 1e-9, (number, place)


def tokens_to(experts: Sequence[int], shares: Sequence[int], seed: int) -> Step:
    """Tokens that visit these experts alone, each two of them."""
    pairs = torch.tensor(list(itertools.permutations(experts, 2)))
    ids_TK = pairs[torch.arange(sum(shares)) % len(pairs)].reshape(-1, 2)
    return make(ids_TK=ids_TK, experts=4, seed=seed), shares


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_case_5_a_rank_without_rows_enters_every_collective(ranks: int, drop: float) -> None:
    """A rank that gets no rows, or has no tokens, returns early and skips a collective or an expert's gradient: the
    others then wait for it for ever, at this layer or a later one."""
    few = [3] * ranks
    none = [0, 9, 0, 4][:ranks]
    steps = [
        *(tokens_to((0, 1), few, seed) for seed in range(3)),
        tokens_to((2, 3), few, 3),
        tokens_to((2, 3), none, 4),
        tokens_to((0, 1, 2, 3), none[::-1], 5),
        tokens_to((0, 1, 2, 3), [0] * ranks, 6),
        # The last rank has tokens, and no pair of them is kept: they have no gradient.
        silent(tokens_to((0, 1, 2, 3), [6] * ranks, 7)),
        tokens_to((0, 3), few, 8),
    ]
    start = make(experts=4, bias=True)
    for selector in ("topq", "pps"):
        config = LRMoEConfig(drop=drop, selector=selector, router_grad="exact")  # type: ignore[arg-type]
        assert_trains_alike(start, steps, config, "fixed", ranks)
    assert_trains_alike(start, steps, LRMoEConfig(drop=0.0), RandomPlans(1), ranks)


def silent(step: Step) -> Step:
    tokens, shares = step
    grad_TD = tokens.grad_TD.clone()
    grad_TD[-shares[-1] :] = 0
    return replace(tokens, grad_TD=grad_TD), shares


@pytest.mark.parametrize("shares", [[37, 5], [37, 0], [0, 1]])
def test_case_19_ranks_with_different_numbers_of_tokens(shares: list[int]) -> None:
    """Buffer sizes or numbers of chunks that come of a rank's own token count do not fit those of the others."""
    total = sum(shares)
    whole = make(tokens=total, experts=4)
    # In chunks of 16: every rank takes part in each, with nothing where it has none left.
    chunks: list[Step] = []
    for first in range(0, max(shares), 16):
        counts = [max(0, min(16, share - first)) for share in shares]
        starts = [sum(shares[:rank]) + first for rank in range(2)]
        place = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        taken = {name: getattr(whole, name)[place] for name in ("x_TD", "ids_TK", "alpha_TK", "grad_TD")}
        chunks.append((replace(whole, **taken), counts))
    assert len(chunks) == (3 if total > 1 else 1)
    config = LRMoEConfig(drop=0.3, router_grad="exact")
    assert_trains_alike(make(experts=4, bias=True), [(whole, shares), *chunks], config, "fixed", 2)
    assert_trains_alike(make(experts=4, bias=True), chunks, LRMoEConfig(drop=0.0), RandomPlans(2), 2)


def leave_early(group: dist.ProcessGroup, problem: Problem) -> str:
    """Rank 1 has one chunk, and stops."""
    engine = ExpertParallel(group, num_experts=4, timeout_s=1.0)
    leaves = local_leaves(problem, engine, own_tokens([8, 8], engine.rank))
    ids_TK = problem.ids_TK[own_tokens([8, 8], engine.rank)]
    try:
        for chunk in range(3 if engine.rank == 0 else 1):
            engine.routed_experts(**leaves, topk_ids_TK=ids_TK, microbatch=chunk)
    except RankFailure as failure:
        return str(failure)
    return ""


def test_case_19_a_rank_that_makes_fewer_calls_is_named() -> None:
    told = run_world(2, leave_early, make(tokens=16, experts=4), timeout=60, breaks_group=True)
    assert "loads: rank 1 did not arrive" in told[0]
    assert told[1] == ""


def fixed_beside(group: dist.ProcessGroup, fixed: Problem, others: list[Problem], policy: str) -> list[list[Tensor]]:
    """The same tokens on rank 0, whatever the others have."""
    engine = ExpertParallel(group, num_experts=fixed.num_experts, policy=policy, config=LRMoEConfig(drop=0.4))
    found = []
    for other in others:
        problem = fixed if engine.rank == 0 else replace(
            fixed, x_TD=other.x_TD, ids_TK=other.ids_TK, alpha_TK=other.alpha_TK, grad_TD=other.grad_TD
        )  # fmt: skip
        leaves = local_leaves(problem, engine, slice(None))
        out_TD = engine.routed_experts(**leaves, topk_ids_TK=problem.ids_TK)
        out_TD.backward(problem.grad_TD)
        found.append([out_TD.detach(), leaves["x_TD"].grad])  # type: ignore[list-item]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_case_50_the_output_of_a_sample_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """With kernels whose rounding depends on how many rows they get, the same input gives other logits each time.

    CPU products round so: outputs are the same but for the order in which sums are taken, which is what the engine
    promises. Which pairs the backward keeps depends on the tokens of all ranks: that is what a quota of
    an expert's whole load means."""
    sizes: dict[str, Any] = {"experts": 6, "dim": 16, "width": 24, "dtype": dtype}
    fixed = make(tokens=20, **sizes)
    crowd = torch.stack([torch.zeros(90), torch.ones(90)], 1).long()
    others = [make(tokens=n, seed=n + 1, **sizes) for n in (0, 1, 5, 64)] + [make(ids_TK=crowd, seed=9, **sizes)]
    for policy in ("fixed", "lrmoe"):
        first, *rest = run_world(2, fixed_beside, fixed, others, policy)[0]
        tolerance = allowance(dtype, 16, 24, 2)  # dim, width, choices
        assert all(error(out_TD, first[0].double()) <= tolerance for out_TD, _ in rest)
        assert not all(torch.equal(first[1], dx_TD) for _, dx_TD in rest)


def send_by(group: dist.ProcessGroup, matrices: list[list[list[int]]], dtypes: list[torch.dtype]) -> None:
    """Rank s routes ``matrix[s][d]`` pairs to an expert of rank d."""
    for matrix, dtype in itertools.product(matrices, dtypes):
        counts = matrix[group.rank()]
        ids_TK = torch.tensor([2 * d + i % 2 for d, n in enumerate(counts) for i in range(n)]).reshape(-1, 1)
        problem = make(ids_TK=ids_TK.long(), experts=4, dtype=dtype)
        for policy in (GivenPlans({}), GivenPlans({}, without_quota=(0, 1)), GivenPlans({}, without_quota=range(4))):
            config = LRMoEConfig(drop=0.5, selector="topq")
            engine = ExpertParallel(group, num_experts=4, policy=policy, config=config)
            leaves = local_leaves(problem, engine, slice(None))
            # A gradient that is not contiguous.
            out_TD = engine.routed_experts(**leaves, topk_ids_TK=problem.ids_TK)
            out_TD.backward(torch.stack([problem.grad_TD, problem.grad_TD], -1)[..., 0])
            own = run(replace(problem), LRMoEConfig(drop=0.0))
            assert error(out_TD.detach(), own.out_TD.double()) <= (1e-6 if dtype == torch.float32 else 0.02)
            silent_T = torch.isin(problem.ids_TK[:, 0], torch.tensor(list(policy.without_quota), dtype=torch.int64))
            assert not leaves["x_TD"].grad[silent_T].any()  # type: ignore[index]
            for name in ("gate_up_proj", "down_proj"):
                for e, grad in zip(engine.local_experts, leaves[name].grad, strict=True):  # type: ignore[arg-type]
                    assert e not in policy.without_quota or not grad.any()


def test_case_51_ranks_that_send_or_receive_nothing() -> None:
    """Empty sends are a corner case that backends got wrong at some time: a rank that sends nothing, one that receives
    nothing, an exchange that is empty altogether."""
    matrices = [[[1, 1], [0, 0]], [[0, 0], [0, 0]], [[3, 0], [5, 0]], [[0, 4], [4, 0]]]
    run_world(2, send_by, matrices, [torch.float32, torch.bfloat16, torch.float16])


def test_case_n2_the_backward_sends_other_counts_than_its_forward() -> None:
    """Counts of the forward that are used again for the backward's rows send dropped rows, or rows of nobody. Here the
    rows of each pair of ranks differ between both, down to none at all, one way or both."""
    counts = [(0, 1), (2, 3), (), (0, 1, 2, 3), (1, 2)]
    problem = make(tokens=24, experts=4, bias=True)
    steps: list[Step] = [(problem, [17, 7])] * len(counts)
    for without in counts:
        policy = GivenPlans({0: [(1, 5, 0)]} if 0 in without else {}, without_quota=without)
        told = run_world(2, train, problem, steps[:2], LRMoEConfig(drop=0.3, router_grad="kept"), policy)
        first = [own[0] for own in told]
        dx_TD, dalpha_TK = (torch.cat([own[place] for own in first]) for place in (1, 2))
        dropped_TK = torch.isin(problem.ids_TK, torch.tensor(without, dtype=torch.int64))
        assert not dalpha_TK[dropped_TK].any()
        assert not dx_TD[dropped_TK.all(1)].any()
        for e in range(4):
            # Weight decay is all that moves an expert that kept nothing.
            place = 3 + PARAMETERS.index("down_proj")
            moved = torch.cat([own[place] for own in first])[e] - problem.down_proj[e] * (1 - 0.05 * 0.01)
            assert (moved.abs().max() < 1e-12) == (e in without)
