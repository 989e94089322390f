"""The row of means that stands for dropped pairs, over several ranks: against one process, against plain loops with the
means of each instance, and what it costs in bytes.

E experts, T tokens, K choices, D model width.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.fixtures import poisoned_memory
from distributed.plans import GivenPlans, RandomPlans, instance_of_pairs, policies
from distributed.spread import Job, even_shares, local_leaves, one_job, own_tokens, run_jobs
from distributed.test_exactness import assert_same_bits, plan_of, shares_of
from distributed.test_stores import SHARES, one_rank, problem_of, put_together
from distributed.world import run_world
from experts.completion import completed
from experts.problem import PARAMETERS, Problem, assert_equal, error, make, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lrmoe import LRMoEConfig
from lrmoe.balance import get
from lrmoe.balance.plan import Plan
from lrmoe.parallel import ExpertParallel
from lrmoe.parallel.remainder import GradientSums

SAVES = ("preactivation", "input")
PURPOSES = {"gradient sums to experts", "token masks to experts"}
MASK_T = torch.arange(26) % 4 != 1


def job(policy: Any, *, shares: Any = None, record: bool = True, config: Any = None, **sizes: Any) -> Job:
    return Job(
        problem=make(**{"tokens": 26, "experts": 7, "bias": True, **sizes}),
        config=LRMoEConfig(**{"drop": 0.5, "remainder": "mean", "router_grad": "exact", **(config or {})}),
        shares=shares,
        record=record,
        position={"step": 3},
        options={"policy": policy},
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_experts_complete_as_in_one_process(ranks: int) -> None:
    """Masks, pairs and experts without each other, ranks without tokens."""
    holes_TK = torch.where(torch.arange(52).view(26, 2) % 5 == 0, -1, make(tokens=26, experts=7).ids_TK)
    none_first = [0] * (ranks - 1) + [26]
    kinds: list[dict[str, Any]] = [
        {},
        {"mask_T": MASK_T},
        {"ids_TK": holes_TK, "mask_T": MASK_T, "shares": none_first},
        {"ids_TK": torch.full((26, 2), 6), "shares": [26, *[0] * (ranks - 1)]},
        {"ids_TK": torch.full((26, 2), -1)},
        {"mask_T": torch.zeros(26, dtype=torch.bool)},
        {"tokens": 0},
    ]
    selectors = [
        {"selector": selector, "save": save} for selector, save in itertools.product(("topq", "pps", "random"), SAVES)
    ]
    jobs = [job("fixed", **kind, config=config) for kind, config in zip(kinds * 2, selectors * 3, strict=False)]
    # Not all metrics look at the mean.
    jobs += [job("fixed", config={"metric": "alpha_grad", "quota": quota}) for quota in ("expert", "level")]
    for done, spread in zip(jobs, run_jobs(jobs, ranks), strict=True):
        one = run(done.problem, done.config, **done.position)
        # The cap of "level" is the ranks', not the experts'.
        if done.config.quota == "expert":  # type: ignore[union-attr]
            assert_equal(spread.result, one, 1e-12)
            found = spread.result.call
            assert torch.equal(found.kept_TK, one.call.kept_TK)  # type: ignore[union-attr]
            # The record rounds to fp32 what may differ in the last bit of fp64.
            assert torch.allclose(found.weight_TK, one.call.weight_TK, rtol=torch.finfo(torch.float32).eps, atol=0)  # type: ignore[union-attr]
            assert torch.allclose(found.importance_TK, one.call.importance_TK, rtol=1e-12)  # type: ignore[union-attr]
        wanted = completed(done.problem, spread.result.call.weight_TK)  # type: ignore[union-attr]
        assert_equal(spread.result, wanted, 1e-10 if done.config.selector == "topq" else 1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_instances_complete_with_their_own_means(ranks: int) -> None:
    names = ("lrmoe, two slots", "random", "random, other", "ultraep")
    jobs = [
        job(policies()[name], mask_T=mask_T, shares=shares, config={"selector": selector, "save": save, "quota": quota})
        for (selector, save, mask_T), name, quota, shares in zip(
            itertools.product(("topq", "pps", "random"), SAVES, (None, MASK_T)),
            itertools.cycle(names),
            itertools.cycle(("expert", "level", "pooled")),
            itertools.cycle((None, [25, 1, *[0] * (ranks - 2)])),
            strict=False,
        )
    ]
    # A replica that keeps nothing, a home that keeps nothing, a whole expert that keeps nothing.
    ids_TK = torch.stack([torch.zeros(28, dtype=torch.int64), 1 + torch.arange(28) % 3], dim=1)
    for plan in ({0: [(1, 12, 0)]}, {0: [(1, 20, 14)]}):
        policy = GivenPlans(plan, without_quota=[3])
        jobs += [job(policy, ids_TK=ids_TK, experts=4, config={"selector": "topq"})]
    replicas = 0
    for done, spread in zip(jobs, run_jobs(jobs, ranks), strict=True):
        policy = done.options["policy"]
        plan = plan_of(done, ranks)
        replicas += plan.num_replicas
        rank_TK = instance_of_pairs(done.problem, shares_of(done, ranks), plan)
        wanted = completed(done.problem, spread.result.call.weight_TK, rank_TK)  # type: ignore[union-attr]
        try:
            assert_equal(spread.result, wanted, 1e-10 if done.config.selector == "topq" else 1e-6)  # type: ignore[union-attr]
        except AssertionError as wrong:
            raise AssertionError(f"{policy.name} {done.config} {done.shares}") from wrong
    assert replicas > len(jobs)


def test_one_rank_is_the_local_path_and_without_drop_nothing_changes_or_travels() -> None:
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float64))
    jobs = [
        job(
            "fixed", dtype=dtype, mask_T=mask_T, config={"selector": s, "save": v, "drop": d, "router_grad": "sum_rule"}
        )
        for (s, v, mask_T, d), dtype in zip(
            itertools.product(("topq", "pps"), SAVES, (None, MASK_T), (0.5, 0.01, 0.0)), dtypes, strict=False
        )
    ]
    for done, spread in zip(jobs, run_jobs(jobs, 1), strict=True):
        assert_same_bits(spread.result, run(done.problem, done.config, **done.position))
    exact = [
        job(policies()[name], dtype=torch.float32, mask_T=mask_T, config={"drop": 0.0, "remainder": remainder})
        for name, mask_T, remainder in itertools.product(("fixed", "random"), (None, MASK_T), ("none", "mean"))
    ]
    spreads = run_jobs(exact, 2)
    for plain, found in zip(spreads[::2], spreads[1::2], strict=True):
        assert_same_bits(found.result, plain.result)
        # First messages of calls are as long as the longest that these ranks have met with in earlier jobs.
        sent, wanted = (
            [{what: size for what, size in m["sent_bytes"].items() if what != "engines"} for m in each.metrics]
            for each in (found, plain)
        )
        assert sent == wanted


def test_a_row_for_each_instance_that_is_sent_pairs_and_a_byte_for_each_pair_under_a_mask() -> None:
    jobs = [
        job(policies()[name], mask_T=mask_T, dtype=dtype, record=False, config={"remainder": remainder})
        for name, mask_T, dtype, remainder in itertools.product(
            ("fixed", "random"), (None, MASK_T), (torch.float32, torch.bfloat16), ("mean", "none")
        )
    ]
    spreads = run_jobs(jobs, 2)
    for done, spread, plain in zip(jobs[::2], spreads[::2], spreads[1::2], strict=True):
        rank_TK = instance_of_pairs(done.problem, even_shares(26, 2), plan_of_named(done))
        real_T = torch.ones(26, dtype=torch.bool) if done.problem.mask_T is None else done.problem.mask_T
        for source, tokens in enumerate(torch.arange(26).split(13)):
            sent = spread.metrics[source]["sent_bytes"]
            assert set(sent) - set(plain.metrics[source]["sent_bytes"]) <= PURPOSES
            away_TK = rank_TK[tokens] == 1 - source
            experts = done.problem.ids_TK[tokens][away_TK & real_T[tokens].unsqueeze(1)].unique()
            assert sent["gradient sums to experts"] == 4 * 8 * len(experts)
            wanted = None if done.problem.mask_T is None else int(away_TK.sum())
            assert sent.get("token masks to experts") == wanted


def plan_of_named(done: Job) -> Any:
    policy = done.options["policy"]
    return plan_of(done if not isinstance(policy, str) else job(get(policy), mask_T=done.problem.mask_T), 2)


def with_instances(group: dist.ProcessGroup, name: str, storage: str, config: LRMoEConfig) -> tuple[Any, list[Tensor]]:
    """What one rank tells, and which instance computed each pair, step by step."""
    instances = []

    def of(plan: Plan, *rest: Any) -> GradientSums | None:
        step = len(instances)
        instances.append(instance_of_pairs(problem_of(step), SHARES[group.size()][step], plan))
        return original(plan, *rest)

    original = GradientSums.of
    with mock.patch.object(GradientSums, "of", of):
        return one_rank(group, name, storage, config), instances


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("flexmoe", "policy"),
        ("symi", "policy"),
        ("laer", "policy"),
        pytest.param("smartmoe", "policy", marks=pytest.mark.slow),
        pytest.param("eplb", "home", marks=pytest.mark.slow),
    ],
)
def test_every_store(name: str, storage: str) -> None:
    config = LRMoEConfig(drop=0.4, selector="topq", router_grad="exact", remainder="mean")
    told = run_world(4, with_instances, name, storage, config)
    instances = told[0][1]
    for step, steps_told in enumerate(zip(*(one for one, _ in told), strict=True)):
        weight_TK = torch.cat([call.weight_TK for *_, call, _ in steps_told])
        wanted = completed(problem_of(step), weight_TK, instances[step])
        for key in PARAMETERS:
            assert error(put_together(list(steps_told), key), wanted.grads[key]) < 1e-12, (step, key)


def recomputed(group: dist.ProcessGroup, problem: Problem, save: Any) -> list[bool]:
    """Whether gradients are the same bits with the forward run again, both ways, and where fresh memory is NaN."""
    config = LRMoEConfig(drop=0.5, save=save, remainder="mean")
    same = []
    for policy in ("fixed", "random"):
        done = Job(problem=problem, config=config, options={"policy": policies()[policy]}, record=False)
        _, plain, *_ = one_job(group, done)
        with poisoned_memory():
            _, again, *_ = one_job(group, done)
        same.append(all(torch.equal(again[name], plain[name]) for name in plain))
        for reentrant in (True, False):
            engine = ExpertParallel(group, num_experts=7, config=config, policy=policies()[policy])
            mine = own_tokens(even_shares(26, engine.size), engine.rank)
            leaves = local_leaves(problem, engine, mine)
            layer = functools.partial(_layer, engine, leaves, problem, mine)
            out_TD: Tensor = checkpoint(layer, leaves["x_TD"], use_reentrant=reentrant)
            out_TD.backward(problem.grad_TD[mine])
            same.append(all(torch.equal(leaf.grad, plain[name]) for name, leaf in leaves.items()))  # type: ignore[arg-type]
    return same


def _layer(engine: ExpertParallel, leaves: dict[str, Tensor], problem: Problem, mine: slice, x_TD: Tensor) -> Tensor:
    given = {**leaves, "x_TD": x_TD, "topk_ids_TK": problem.ids_TK[mine], "token_mask_T": problem.mask_T[mine]}  # type: ignore[index]
    return engine.routed_experts(**given)


@pytest.mark.parametrize("save", SAVES)
def test_recomputed_forwards_and_unwritten_memory_change_no_bit(save: str) -> None:
    problem = make(tokens=26, experts=7, bias=True, mask_T=MASK_T, dtype=torch.float32)
    assert run_world(2, recomputed, problem, save) == [[True] * 6] * 2


def test_half_precision_rounds_no_more_than_one_process_does() -> None:
    jobs = [
        job(policies()[name], dtype=dtype, tokens=48, dim=16, width=24, config={"selector": "topq"})
        for name, dtype in itertools.product(("fixed", "random"), (torch.bfloat16, torch.float16))
    ]
    for done, spread in zip(jobs, run_jobs(jobs, 2), strict=True):
        rank_TK = instance_of_pairs(done.problem, even_shares(48, 2), plan_of(done, 2))
        wanted = completed(done.problem, spread.result.call.weight_TK, rank_TK)  # type: ignore[union-attr]
        for name, grad in spread.result.grads.items():
            assert error(grad, wanted.grads[name]) < 8 * torch.finfo(done.problem.x_TD.dtype).eps, name


def mean_of_draws(group: dist.ProcessGroup, problem: Problem, draws: int) -> list[Tensor]:
    """[exact gradient, mean and mean square deviation over draws] of the experts at home, with replicas."""
    engine = ExpertParallel(group, num_experts=3, policy=RandomPlans(2, repeats=True))
    mine = own_tokens(even_shares(60, 2), engine.rank)
    found = []
    for step in range(draws + 1):
        engine.config = LRMoEConfig(drop=0.5 if step else 0.0, remainder="mean")
        leaves = local_leaves(problem, engine, mine)
        out_TD = engine.routed_experts(topk_ids_TK=problem.ids_TK[mine], step=step, **leaves)
        out_TD.backward(problem.grad_TD[mine])
        found.append(torch.cat([leaves[name].grad.flatten() for name in ("gate_up_proj", "down_proj")]))  # type: ignore[union-attr]
    exact, drawn = found[0], torch.stack(found[1:])
    return [exact, drawn.mean(0), (drawn - exact).square().sum(1).mean()]


def test_with_replicas_the_mean_over_draws_is_the_exact_gradient() -> None:
    draws = 16
    problem = make(tokens=60, experts=3, seed=3)
    problem.x_TD.add_(1.5)
    for exact, mean, variance in run_world(2, mean_of_draws, problem, draws):
        assert float((mean - exact).square().sum()) <= 2.0 * float(variance) / draws
