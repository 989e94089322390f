"""Routed experts over 1, 2 and 4 ranks against one process, and against the fp64 reference with the recorded weights.

E experts, G ranks, T tokens, K choices.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.fixtures import poisoned_memory
from distributed.plans import instance_of_pairs, loads, policies
from distributed.spread import Job, Spread, even_shares, one_job, run_jobs
from distributed.world import run_world
from experts.problem import PARAMETERS, Result, assert_equal, error, expected, live_pairs, make, run
from rounding import allowance
from torch import Tensor

from lrmoe import LRMoEConfig
from lrmoe.balance.plan import Plan, home_ranks
from lrmoe.balance.quotas import rank_quotas

SELECTORS = ("topq", "pps", "random", "auto")
METRICS = ("lrm", "grad_norm", "abs_grad", "alpha_grad", "forward", "random")
SAVES = ("preactivation", "input")
ROUTER_GRADS = ("sum_rule", "exact", "kept")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def shares_of(job: Job, ranks: int) -> list[int]:
    return list(job.shares or even_shares(job.problem.x_TD.shape[0], ranks))


def plan_of(job: Job, ranks: int) -> Plan:
    """The plan that the ranks must have made."""
    config = job.config or LRMoEConfig()
    lam_GE = loads(job.problem, shares_of(job, ranks))
    policy = copy.deepcopy(job.options["policy"])
    return policy.plan(lam_GE, drop=config.drop, quota=config.quota).validate(policy.slots)


def kept_by_instance(job: Job, spread: Spread, ranks: int, plan: Plan) -> Tensor:
    """(E, G): how many pairs each instance kept."""
    assert spread.result.call is not None
    rank_TK = instance_of_pairs(job.problem, shares_of(job, ranks), plan)
    kept_EG = torch.zeros(job.problem.num_experts, ranks, dtype=torch.int64)
    for expert, rank in itertools.product(range(job.problem.num_experts), range(ranks)):
        chosen_TK = (job.problem.ids_TK == expert) & (rank_TK == rank)
        kept_EG[expert, rank] = spread.result.call.kept_TK[chosen_TK].sum()
    return kept_EG


def check(job: Job, spread: Spread, ranks: int, tolerance: float | None = None) -> Plan:
    """Everything that has to hold of one job. Returns its plan."""
    problem, config = job.problem, job.config or LRMoEConfig()
    tolerance = TOLERANCE[problem.x_TD.dtype] if tolerance is None else tolerance
    plan = plan_of(job, ranks)
    found, one = spread.result, run(problem, config, **job.position)
    assert found.call is not None
    assert one.call is not None
    load_E = plan.lam_GE.sum(0)
    homes = home_ranks(problem.num_experts, ranks)
    assert torch.equal(found.call.load_E, load_E)
    assert torch.equal(found.call.quota_E, rank_quotas(config.quota, load_E, homes, config.drop))
    assert error(found.out_TD, one.out_TD) <= tolerance
    if config.quota == "pooled":
        assert torch.equal(kept_by_instance(job, spread, ranks, plan).sum(0), plan.quota_EG.sum(0))
    elif config.error_budget is None:
        assert torch.equal(kept_by_instance(job, spread, ranks, plan), plan.quota_EG)
    # Experts on one instance that keeps as many pairs as on one process: the same pairs with the same weights. Their
    # products have the same shapes, but the rows lie elsewhere in memory, and some products round by that; none of the
    # pairs here is so nearly tied that it would matter.
    dim, width = problem.down_proj.shape[1:]
    scores = torch.promote_types(problem.x_TD.dtype, torch.float32)
    rtol = max(torch.finfo(torch.float32).eps, 4 * allowance(scores, dim, width))
    same = [e for e, hosts in enumerate(plan.hosts) if len(hosts) == 1 and found.call.quota_E[e] == one.call.quota_E[e]]
    if config.quota == "pooled" and ranks > 1:
        same = []  # A rank pools over what it hosts.
    for expert in same:
        mine_TK = problem.ids_TK == expert
        assert torch.equal(found.call.kept_TK[mine_TK], one.call.kept_TK[mine_TK])
        torch.testing.assert_close(found.call.weight_TK[mine_TK], one.call.weight_TK[mine_TK], rtol=rtol, atol=0)
    found_r_TK, one_r_TK = found.call.importance_TK, one.call.importance_TK
    if config.metric == "random":
        # A split expert deals the same numbers to its pairs in another order.
        for expert in range(problem.num_experts):
            mine_TK = problem.ids_TK == expert
            assert torch.equal(found_r_TK[mine_TK].sort().values, one_r_TK[mine_TK].sort().values)
    else:
        assert torch.allclose(found_r_TK, one_r_TK, rtol=1e-5)
    if config.drop == 0 or len(same) == problem.num_experts:
        assert_equal(found, as_double(one), tolerance)
    # Weights are recorded in fp32; topq's are 1.
    whole = config.drop == 0 or config.selector == "topq"
    oracle = expected(problem, found.call.weight_TK, config.router_grad)
    assert_equal(found, oracle, tolerance if whole else max(tolerance, 1e-6))
    return plan


def as_double(result: Result) -> Result:
    return Result(out_TD=result.out_TD.double(), grads={name: grad.double() for name, grad in result.grads.items()})


def check_all(jobs: Iterable[Job], ranks: int, tolerance: float | None = None) -> list[Plan]:
    jobs = list(jobs)
    plans = []
    for number, (job, spread) in enumerate(zip(jobs, run_jobs(jobs, ranks), strict=True)):
        try:
            plans.append(check(job, spread, ranks, tolerance))
        except AssertionError as wrong:
            raise AssertionError(f"job {number}, {ranks} ranks, {job.config}, {job.options}, {job.shares}") from wrong
    return plans


def job(config: dict[str, Any], policy: Any, **sizes: Any) -> Job:
    sizes = {"tokens": 26, "experts": 7, "bias": True, **sizes}
    return Job(problem=make(**sizes), config=LRMoEConfig(**config), options={"policy": policy}, position={"step": 3})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_without_drop_all_gradients_are_those_of_one_process(ranks: int) -> None:
    jobs = [
        job({"drop": 0.0, "save": save}, policy, dtype=dtype)
        for (dtype, save), policy in itertools.product(
            ((torch.float64, "preactivation"), (torch.float32, "input"), (torch.float32, "preactivation")),
            policies().values(),
        )
    ]
    plans = check_all(jobs, ranks)
    # Where there is more than one rank, all policies but `fixed` have replicas here.
    assert sum(plan.num_replicas > 0 for plan in plans) == (0 if ranks == 1 else len(plans) * 6 // 7)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_selector_keeps_what_one_process_keeps_and_exactly_its_quotas(ranks: int) -> None:
    jobs = [
        job({"drop": 0.4, "selector": selector, "save": save, "router_grad": router_grad}, policy)
        for (selector, save), (router_grad, policy) in zip(
            itertools.cycle(itertools.product(SELECTORS, SAVES)),
            itertools.product(ROUTER_GRADS, policies().values()),
            strict=False,
        )
    ]
    jobs += [job({"drop": 0.4, "selector": s, "save": v}, policies()["fixed"]) for s in SELECTORS for v in SAVES]
    jobs += [job({"drop": 0.3, "selector": s}, policies()["lrmoe"], dtype=torch.float32) for s in ("pps", "topq")]
    plans = check_all(jobs, ranks)
    assert ranks == 1 or sum(plan.num_replicas > 0 for plan in plans) >= 15


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_metric_level_and_pooled_quotas(ranks: int) -> None:
    some = [policies()[name] for name in ("fixed", "lrmoe, two slots", "random")]
    jobs = [
        job({"drop": 0.5, "metric": metric, "selector": selector}, policy, top_k=3)
        for (metric, policy), selector in zip(
            itertools.product(METRICS, some), itertools.cycle(("pps", "topq")), strict=False
        )
    ]
    jobs += [
        job({"drop": drop, "quota": "level", "selector": selector}, policy)
        for (drop, selector), policy in itertools.product(((0.2, "topq"), (0.6, "pps")), policies().values())
    ]
    jobs += [
        job({"drop": 0.2, "quota": "pooled", "selector": selector}, policy, top_k=4)
        for selector, policy in itertools.product(("topq", "pps"), some)
    ]
    check_all(jobs, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_rank_is_the_local_path_bit_for_bit_and_every_run_repeats_itself(ranks: int) -> None:
    configs = [
        {"drop": drop, "selector": selector, "save": save, "quota": quota, "router_grad": router_grad}
        for drop, selector, save, quota, router_grad in itertools.chain(
            itertools.product((0.0, 0.4), ("pps",), SAVES, ("expert", "level"), ("sum_rule",)),
            itertools.product((0.2,), ("pps", "topq"), ("input",), ("pooled",), ("sum_rule",)),
            itertools.product((0.4,), ("topq", "auto"), ("input",), ("expert",), ROUTER_GRADS),
        )
    ]
    jobs = [
        job(config, policies()[name if ranks > 1 else "fixed"], dtype=dtype)
        for config, name, dtype in zip(
            configs,
            itertools.cycle(("random", "lrmoe", "fixed", "random, other")),
            itertools.cycle((torch.float32, torch.float64, torch.bfloat16)),
            strict=False,
        )
    ]
    for again in (jobs, jobs[::-1]):
        spreads = run_jobs(again, ranks)
        if again is jobs:
            first = spreads
        else:
            for spread, other in zip(first, spreads[::-1], strict=True):
                assert_same_bits(spread.result, other.result)
    if ranks > 1:
        return
    for done, spread in zip(jobs, first, strict=True):
        one = run(done.problem, done.config, **done.position)
        # With "exact", the rank of the tokens has the experts' outputs, where one process recomputes them.
        but = {"topk_weights_TK"} if done.config is not None and done.config.router_grad == "exact" else set()
        assert_same_bits(spread.result, one, but=but)


def assert_same_bits(found: Result, wanted: Result, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    assert torch.equal(found.out_TD, wanted.out_TD)
    assert found.call is not None
    assert wanted.call is not None
    for name in ("kept_TK", "weight_TK", "importance_TK", "quota_E", "load_E"):
        assert torch.equal(getattr(found.call, name), getattr(wanted.call, name)), name
    for name, grad in found.grads.items():
        assert grad.dtype == wanted.grads[name].dtype
        assert name in but or torch.equal(grad, wanted.grads[name]), name


SHARES = {2: ([37, 5], [42, 0], [0, 42], [1, 41]), 4: ([0, 0, 42, 0], [30, 0, 1, 11], [42, 0, 0, 0])}


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_share_of_the_tokens_masks_and_pairs_without_an_expert(ranks: int) -> None:
    generator = torch.Generator().manual_seed(5)
    mask_T = torch.rand(42, generator=generator) < 0.7
    base = make(tokens=42, experts=7, bias=True)
    holes_TK = torch.where(torch.rand(base.ids_TK.shape, generator=generator) < 0.25, -1, base.ids_TK)
    kinds: list[dict[str, Any]] = [
        {},
        {"mask_T": mask_T},
        {"ids_TK": holes_TK, "mask_T": mask_T},
        {"ids_TK": torch.full_like(holes_TK, -1)},
        {"mask_T": torch.zeros(42, dtype=torch.bool)},
        # Everything to the last expert, twice a token.
        {"ids_TK": torch.full_like(holes_TK, 6)},
    ]
    names = itertools.cycle(("random", "lrmoe, two slots", "fixed", "random, other", "ultraep"))
    drops = itertools.cycle((0.3, 0.0, 0.8))
    selectors = itertools.cycle(("pps", "topq"))
    jobs = []
    for shares, kind in itertools.product(SHARES[ranks], kinds):
        config = LRMoEConfig(drop=next(drops), selector=next(selectors), router_grad="exact")
        problem = make(**{"tokens": 42, "experts": 7, "bias": True, **kind})
        jobs.append(Job(problem=problem, config=config, shares=shares, options={"policy": policies()[next(names)]}))
    nobody = make(tokens=0, experts=7, bias=True)
    jobs += [Job(problem=nobody, options={"policy": policies()[name]}) for name in ("fixed", "random", "lrmoe")]
    for done, spread in zip(jobs, run_jobs(jobs, ranks), strict=True):
        plan = check(done, spread, ranks)
        masked = ~live_pairs(done.problem)
        assert not spread.result.call.kept_TK[masked].any()  # type: ignore[union-attr]
        for name in ("x_TD", "topk_weights_TK"):
            if done.problem.mask_T is not None:
                assert not spread.result.grads[name][~done.problem.mask_T].any()
        for expert in range(7):
            if not int(plan.quota_EG[expert].sum()):
                assert not any(spread.result.grads[name][expert].any() for name in PARAMETERS)


@pytest.mark.parametrize("ranks", [2, 4])
def test_half_precision_rounds_no_more_than_one_process_does(ranks: int) -> None:
    """Against fp64 on the same rounded inputs: within a few units of the dtype's resolution, as in
    test_experts_gradients."""
    jobs = [
        job(
            {"drop": drop, "selector": selector, "save": save, "router_grad": "exact"},
            policies()[name],
            dtype=dtype,
            tokens=48,
            dim=16,
            width=24,
            bias=bias,
        )
        for (dtype, save, bias), (drop, selector), name in zip(
            itertools.product((torch.bfloat16, torch.float16), SAVES, (False, True)),
            itertools.cycle(((0.0, "pps"), (0.5, "pps"), (0.5, "topq"))),
            itertools.cycle(("fixed", "random", "lrmoe, two slots", "random, other")),
            strict=False,
        )
    ]
    for done, spread in zip(jobs, run_jobs(jobs, ranks), strict=True):
        dtype = done.problem.x_TD.dtype
        assert spread.result.call is not None
        wanted = expected(done.problem, spread.result.call.weight_TK)
        one = run(done.problem, done.config, **done.position)
        assert one.call is not None
        one_wanted = expected(done.problem, one.call.weight_TK)
        for name, grad in spread.result.grads.items():
            assert grad.dtype == (torch.float32 if name == "topk_weights_TK" else dtype)
            mine, single = error(grad, wanted.grads[name]), error(one.grads[name], one_wanted.grads[name])
            assert mine < 6 * torch.finfo(dtype).eps, (name, done.config, mine)
            assert mine < 1.5 * single + torch.finfo(dtype).eps, (name, done.config, mine, single)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_activation_and_transposed_weights(ranks: int) -> None:
    activations = ("silu", "gelu|interleaved", "gelu_tanh", "relu", "clamped_swiglu(alpha=1.702,limit=0.8)|interleaved")
    jobs = [
        job({"drop": 0.5, "router_grad": "exact"}, policies()[name], activation=activation, transposed=transposed)
        for activation, name, transposed in zip(
            (*activations, *activations),
            itertools.cycle(("random", "fixed", "lrmoe, two slots")),
            itertools.cycle((False, True, False, False)),
            strict=False,
        )
    ]
    check_all(jobs, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_error_budget_and_gradients_that_are_not_finite(ranks: int) -> None:
    """A NaN or infinite row is kept whatever the quota, with weight 1, and shows in the gradients it belongs to and in
    no others; an error budget raises quotas until it is met, of each instance."""
    problem = make(tokens=40, experts=7, bias=True)
    grad_TD = problem.grad_TD.clone()
    flawed = torch.tensor([3, 17, 22, 39])
    grad_TD[flawed[:2]] = torch.nan
    grad_TD[flawed[2:], 1] = torch.inf
    broken = replace(problem, grad_TD=grad_TD)
    padded = replace(broken, mask_T=torch.arange(40) % 5 != 0)
    names = ("fixed", "random", "lrmoe, two slots")
    jobs = [
        Job(problem=flawed_one, config=LRMoEConfig(drop=0.9, selector=selector), options={"policy": policies()[name]})
        for flawed_one, selector, name in itertools.product((broken, padded), ("pps", "topq"), names)
    ]
    for done, spread in zip(jobs, run_jobs(jobs, ranks), strict=True):
        call = spread.result.call
        assert call is not None
        assert call.kept_TK[flawed].all()
        assert torch.equal(call.weight_TK[flawed], torch.ones(4, 2))
        assert not spread.result.grads["x_TD"][flawed].isfinite().all(-1).any()
        sound_T = torch.ones(40, dtype=torch.bool).index_fill(0, flawed, False)
        assert spread.result.grads["x_TD"][sound_T].isfinite().all()
        touched = broken.ids_TK[flawed].unique().tolist()
        for expert in range(7):
            assert spread.result.grads["down_proj"][expert].isfinite().all() == (expert not in touched)
        one = run(done.problem, done.config)
        assert one.call is not None
        if done.options["policy"].name == "fixed":
            assert torch.equal(call.kept_TK, one.call.kept_TK)
    budgets = [
        job({"drop": 0.8, "selector": "topq", "error_budget": budget}, policies()[name])
        for budget, name in itertools.product((0.0, 0.05), names)
    ]
    for done, spread in zip(budgets, run_jobs(budgets, ranks), strict=True):
        check(done, spread, ranks)
        call, one = spread.result.call, run(done.problem, done.config, **done.position).call
        assert call is not None
        assert one is not None
        left = call.importance_TK[~call.kept_TK].sum() / call.importance_TK.sum()
        assert done.config is not None
        assert left <= done.config.error_budget + 1e-12  # type: ignore[operator]
        if done.options["policy"].name == "fixed":
            assert torch.equal(call.kept_TK, one.kept_TK)


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_and_weights_of_different_dtypes(ranks: int) -> None:
    """Products run in the dtype of the weights, as in one process; gradients come in that of what they belong to."""
    base = make(tokens=26, experts=7, bias=True, dtype=torch.float32)
    jobs = []
    for x, weight, alpha in (
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ):
        weights = {name: getattr(base, name).to(weight) for name in PARAMETERS}
        mixed = replace(
            base, x_TD=base.x_TD.to(x), grad_TD=base.grad_TD.to(x), alpha_TK=base.alpha_TK.to(alpha), **weights
        )
        jobs += [
            Job(problem=mixed, config=LRMoEConfig(drop=0.3, selector="topq"), options={"policy": policies()[name]})
            for name in ("fixed", "lrmoe, two slots")
        ]
    for done, spread in zip(jobs, run_jobs(jobs, ranks), strict=True):
        leaves = done.problem.leaves()
        assert spread.result.call is not None
        assert spread.result.out_TD.dtype == done.problem.x_TD.dtype
        wanted = expected(done.problem, spread.result.call.weight_TK, "sum_rule")
        for name, grad in spread.result.grads.items():
            assert grad.dtype == leaves[name].dtype
            # The sum rule subtracts rounded numbers.
            assert error(grad, wanted.grads[name]) < (0.3 if name == "topk_weights_TK" else 0.03), name
        assert error(spread.result.out_TD, wanted.out_TD) < 0.02


def poisoned(group: dist.ProcessGroup, jobs: list[Job]) -> list[bool]:
    """Whether each job gives the same bits where fresh memory reads as NaN."""
    plain = [one_job(group, job) for job in jobs]
    with poisoned_memory():
        again = [one_job(group, job) for job in jobs]
    return [
        torch.equal(a[0], b[0]) and all(torch.equal(a[1][name], b[1][name]) for name in a[1])
        for a, b in zip(plain, again, strict=True)
    ]


def test_memory_that_nobody_wrote_is_never_read() -> None:
    """Buffers of rows are as long as the pairs; what lies behind the live ones must not matter, be it NaN."""
    holes_TK = torch.where(torch.arange(52).view(26, 2) % 7 == 0, -1, make(tokens=26, experts=7).ids_TK)
    jobs = [
        Job(
            problem=make(ids_TK=holes_TK, mask_T=mask_T, experts=7, bias=True),
            config=LRMoEConfig(drop=drop, save=save, router_grad=router_grad),
            shares=[20, 6],
            options={"policy": policies()[name]},
        )
        for (drop, save, router_grad, mask_T), name in zip(
            itertools.product((0.0, 0.5), SAVES, ROUTER_GRADS, (None, torch.arange(26) % 3 != 0)),
            itertools.cycle(("fixed", "random", "random, other")),
            strict=False,
        )
    ]
    assert run_world(2, poisoned, jobs) == [[True] * len(jobs)] * 2
