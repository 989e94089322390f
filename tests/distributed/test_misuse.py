"""What goes wrong on one rank alone: it says what, the others stop at once and name it, and the next call works."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.plans import RandomPlans
from distributed.spread import even_shares, local_leaves, own_tokens
from distributed.world import run_world
from experts.problem import PARAMETERS, Problem, make
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.balance import BudgetExceeded, Plan, get
from lrmoe.parallel import ExpertParallel

Arguments = dict[str, Any]


def arguments(problem: Problem, engine: ExpertParallel) -> Arguments:
    """The right ones, by name."""
    mine = own_tokens(even_shares(problem.x_TD.shape[0], engine.size), engine.rank)
    return {**local_leaves(problem, engine, mine), "topk_ids_TK": problem.ids_TK[mine]}


def set_to(name: str, value: Any) -> Callable[[Arguments], Arguments]:
    return lambda right: {**right, name: value}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda right: {**right, name: change(right[name])}


def with_id(value: int) -> Callable[[Arguments], Arguments]:
    def change(ids_TK: Tensor) -> Tensor:
        ids_TK = ids_TK.clone()
        ids_TK[0, 0] = value
        return ids_TK

    return changed("topk_ids_TK", change)


def as_dtensor(placement: Any) -> Callable[[Tensor], Tensor]:
    return lambda tensor: DTensor.from_local(
        tensor.detach(), DeviceMesh("cpu", list(range(dist.get_world_size()))), [placement], run_check=False
    )


# A wrong argument and a piece of the error that its rank must give.
WRONG: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "flat tokens": (changed("x_TD", lambda x: x.unsqueeze(0)), "x_TD must be"),
    "no tensor": (set_to("x_TD", None), "x_TD must be a tensor"),
    "a list for ids": (set_to("topk_ids_TK", [[0, 1]]), "topk_ids_TK must be a tensor"),
    "ids as floats": (changed("topk_ids_TK", lambda ids: ids.float()), "topk_ids_TK must be int64"),
    "id too large": (with_id(7), r"holds id 7, but there are 7 experts"),
    "id below -1": (with_id(-2), "holds id -2"),
    "ids of fewer tokens": (changed("topk_ids_TK", lambda ids: ids[1:]), "topk_ids_TK must be"),
    "weights of fewer choices": (changed("topk_weights_TK", lambda a: a[:, :1]), "topk_weights_TK must have shape"),
    "integer routing weights": (changed("topk_weights_TK", lambda a: a.long()), "topk_weights_TK must be floating"),
    "one local expert too few": (
        lambda right: {name: value[1:] if name in PARAMETERS else value for name, value in right.items()},
        "owns",
    ),
    "down_proj of another width": (changed("down_proj", lambda w: w[..., 1:]), "down_proj must have shape"),
    "a bias of another width": (changed("gate_up_bias", lambda b: b[:, 1:]), "gate_up_bias must have shape"),
    "a mask of numbers": (lambda right: {**right, "token_mask_T": torch.ones(len(right["x_TD"]))}, "must be bool"),
    "integer experts": (
        lambda right: {**right, **{k: right[k].detach().long() for k in ("gate_up_proj", "down_proj")}},
        "gate_up_proj is torch.int64; it must be float32",
    ),
    "an activation nobody knows": (set_to("activation", "swish"), "swish"),
    "an activation that is no name": (set_to("activation", torch.relu), "activation="),
    "a negative step": (set_to("step", -1), "step=-1"),
    "a layer that is no number": (set_to("layer", "first"), "layer='first'"),
    "a microbatch of half": (set_to("microbatch", 0.5), "microbatch=0.5"),
    "experts sharded inside": (
        changed("gate_up_proj", as_dtensor(Shard(1))),
        "gate_up_proj is sharded inside the experts",
    ),
    "experts as a DTensor": (changed("gate_up_proj", as_dtensor(Replicate())), "gate_up_proj is a DTensor"),
}


def attempt(function: Callable[[], Any]) -> tuple[str, str, float]:
    """(class of the error or '', its message, seconds)."""
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def step_of(engine: ExpertParallel, given: Arguments) -> list[Tensor]:
    out_TD = engine.routed_experts(**given)
    out_TD.sum().backward()
    return [out_TD.detach(), *(t.grad for t in given.values() if isinstance(t, Tensor) and t.grad is not None)]


def refuse_one_by_one(group: dist.ProcessGroup, problem: Problem, bad: int) -> dict[str, tuple[str, str, float]]:
    engine = ExpertParallel(group, num_experts=7, policy=RandomPlans(1, repeats=True))
    told = {}
    before = step_of(engine, arguments(problem, engine))
    for name, (change, _) in WRONG.items():
        given = arguments(problem, engine)
        if engine.rank == bad:
            given = change(given)
        told[name] = attempt(lambda given=given: engine.routed_experts(**given))  # type: ignore[misc]
        after = step_of(engine, arguments(problem, engine))
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), name
    return told


@pytest.mark.parametrize(("ranks", "bad"), [(1, 0), (2, 1), (4, 2)])
def test_a_wrong_argument_on_one_rank_stops_all_and_the_next_call_works(ranks: int, bad: int) -> None:
    problem = make(tokens=26, experts=7, bias=True)
    told = run_world(ranks, refuse_one_by_one, problem, bad, timeout=60)
    for name, (_, message) in WRONG.items():
        for rank, answers in enumerate(told):
            kind, text, seconds = answers[name]
            assert seconds < 10
            if rank == bad:
                assert kind == "ValueError", (name, kind, text)
                assert message in text, (name, text)
            else:
                assert kind == "RuntimeError", (name, kind, text)
                assert f"rank {bad} " in text, (name, text)


# What rank 1 does otherwise than the others, and how the error names it.
DIFFERENT: dict[str, tuple[Arguments, str]] = {
    "step": ({"step": 4}, "on layer 0 (step 0, microbatch 0), while rank 1 trains on layer 0 (step 4, microbatch 0)"),
    "layer": (
        {"layer": 1},
        "on layer 0 (step 0, microbatch 0), while rank 1 trains on layer 1 (step 0, microbatch 0)",
    ),
    "microbatch": (
        {"microbatch": 2},
        "while rank 1 trains on layer 0 (step 0, microbatch 2)",
    ),
    "activation": ({"activation": "gelu"}, "activation is not the same"),
    "frozen weights": ({"freeze": "gate_up_proj"}, "which gradients are wanted"),
    "frozen tokens": ({"freeze": "x_TD"}, "which gradients are wanted"),
    "no bias": ({"without": "down_bias"}, "which biases there are"),
    "evaluation": ({"no_grad": True}, "on layer 0 (step 0, microbatch 0), while rank 1 runs layer 0 without gradients"),
    "dtype": ({"dtype": torch.float32}, "the dtype of the products"),
    "width": ({"width": 20}, "the width of the experts"),
    "tokens' width": ({"dim": 4}, "the width of x_TD"),
}
ENGINES: dict[str, tuple[Arguments, str]] = {
    "config": ({"config": LRMoEConfig(drop=0.2, selector="topq")}, "config is not the same"),
    "seed": ({"config": LRMoEConfig(drop=0.2, seed=1)}, "is not the same"),
    "drop": ({"config": LRMoEConfig(drop=0.3)}, "is not the same"),
    "number of experts": ({"num_experts": 8}, "num_experts is"),
    "policy": ({"policy": "fixed"}, "policy is 'lrmoe'"),
    "policy's options": ({"policy": get("lrmoe", target=1.2)}, "target=1.05"),
    "slots": ({"slots": 2}, "slots=1"),
    "divisor": ({"gradient_divisor": 2.0}, "gradient_divisor is 1.0"),
}


def differ(group: dist.ProcessGroup) -> dict[str, tuple[str, str, float]]:
    told = {}
    sizes: dict[str, Any] = {"tokens": 20, "experts": 7, "bias": True}
    for name, (other, _) in DIFFERENT.items():
        options = dict(other) if group.rank() == 1 else {}
        engine = ExpertParallel(group, num_experts=7)
        problem = make(**sizes, **{key: options.pop(key) for key in ("dtype", "width", "dim") if key in options})
        given = arguments(problem, engine)
        if "freeze" in options:
            given[options.pop("freeze")].requires_grad_(False)
        if "without" in options:
            del given[options.pop("without")]
        with torch.set_grad_enabled(not options.pop("no_grad", False)):
            told[name] = attempt(lambda engine=engine, given={**given, **options}: engine.routed_experts(**given))  # type: ignore[misc]
        step_of(engine, arguments(make(**sizes), engine))
    for name, (other, _) in ENGINES.items():
        options = {"num_experts": 7, "config": LRMoEConfig(drop=0.2), **(other if group.rank() == 1 else {})}
        engine = ExpertParallel(group, **options)
        given = arguments(make(**{**sizes, "experts": engine.num_experts}), engine)
        # The second time as the first.
        for _ in range(2):
            told[name] = attempt(lambda engine=engine, given=given: engine.routed_experts(**given))  # type: ignore[misc]
    return told


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_make_different_calls_are_told_what_differs(ranks: int) -> None:
    told = run_world(ranks, differ, timeout=60)
    for name, (_, message) in {**DIFFERENT, **ENGINES}.items():
        for answers in told:
            kind, text, seconds = answers[name]
            assert kind == "RuntimeError", (name, kind, text)
            assert "rank 1" in text or "all ranks" in text
            assert seconds < 10
        assert message in told[0][name][1], (name, told[0][name][1])


def record_alone(group: dist.ProcessGroup, problem: Problem) -> list[Any]:
    """Rank 0 records, the others do not; then the other way round, and only the forward."""
    engine = ExpertParallel(group, num_experts=7, policy=RandomPlans(3, repeats=True), config=LRMoEConfig(drop=0.4))
    calls: list[Any] = []
    if group.rank() == 0:
        with lrmoe.recording() as calls:
            gradients = step_of(engine, arguments(problem, engine))
    else:
        gradients = step_of(engine, arguments(problem, engine))
    plain = step_of(engine, arguments(problem, engine))
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
    with lrmoe.recording() as all_calls:
        step_of(engine, arguments(problem, engine))
    return [calls, all_calls]


def test_one_rank_may_record_alone() -> None:
    told = run_world(2, record_alone, make(tokens=26, experts=7, bias=True))
    (alone, together), (nothing, _) = told
    assert nothing == []
    assert len(alone) == 1
    for name in ("kept_TK", "weight_TK", "importance_TK", "quota_E", "load_E"):
        assert torch.equal(getattr(alone[0], name), getattr(together[0], name))
    assert 0 < int(alone[0].kept_TK.sum()) < alone[0].kept_TK.numel()


def exceed(group: dist.ProcessGroup, problem: Problem) -> list[Any]:
    told: list[Any] = []
    for name, drop in (("fixed", 0.0), ("lrmoe", 0.0), ("lrmoe", 0.2)):
        engine = ExpertParallel(group, num_experts=7, policy=name, capacity=10, config=LRMoEConfig(drop=drop))
        try:
            engine.routed_experts(**arguments(problem, engine))
        except BudgetExceeded as error:
            told.append((str(error), error.demand, error.rank))
        # Nothing was left half done: the group still works.
        exact = ExpertParallel(group, num_experts=7, policy=name)
        step_of(exact, arguments(problem, exact))
    return told


def test_a_plan_that_does_not_fit_stops_all_ranks_with_the_same_numbers() -> None:
    told = run_world(4, exceed, make(tokens=40, experts=7, bias=True))
    assert len(told[0]) == 3
    assert told[1:] == told[:-1]
    assert all("capacity" in message for message, _, _ in told[0])


class Wrong(RandomPlans):
    """Plans that break a promise."""

    def __init__(self, how: str) -> None:
        super().__init__(0, repeats=True)
        self.how = how

    def plan(self, *args: Any, **options: Any) -> Plan:
        plan = super().plan(*args, **options)
        if self.how == "rows":
            plan.rows_EG[0, 0] += 1
        elif self.how == "quota":
            plan.quota_EG[0, 0] = plan.rows_EG[0, 0] + 1
        elif self.how == "slots":
            self.slots = 0
        elif self.how == "home":
            plan = Plan(tuple(ranks[::-1] for ranks in plan.hosts), plan.rows_EG, plan.quota_EG, plan.lam_GE)
        return plan


def plan_wrongly(group: dist.ProcessGroup, problem: Problem) -> list[tuple[str, str, float]]:
    told = []
    for how in ("rows", "quota", "slots", "home"):
        engine = ExpertParallel(group, num_experts=7, policy=Wrong(how))
        told.append(attempt(lambda engine=engine: engine.routed_experts(**arguments(problem, engine))))  # type: ignore[misc]
    return told


def test_a_plan_of_the_users_own_is_checked() -> None:
    told = run_world(2, plan_wrongly, make(tokens=26, experts=7))
    assert told[0][0][:2] == told[1][0][:2]
    for answers in told:
        for (kind, text, _), message in zip(answers, ("add up", "quota_EG", "slots", "home"), strict=True):
            assert kind == "ValueError", text
            assert message in text


class Placing(RandomPlans):
    """Says that it places experts, and cannot say where."""

    ownership = "placed"


def construct(group: dist.ProcessGroup) -> dict[str, tuple[str, str, float]]:
    last = dist.new_group([group.size() - 1])
    options: dict[str, Arguments] = {
        "ranks": {"num_experts": 1},
        "no experts": {"num_experts": 0},
        "text": {"num_experts": "8"},
        "policy": {"policy": "round_robin"},
        "no policy": {"policy": 5},
        "slots": {"slots": -1},
        "half a slot": {"slots": 0.5},
        "capacity": {"capacity": 0.0},
        "capacity of a policy": {"policy": get("fixed"), "capacity": 5.0},
        "slots of a policy": {"policy": get("lrmoe"), "slots": 2},
        "ownership": {"policy": Placing(1)},
        "config": {"config": {"drop": 0.5}},
        "divisor": {"gradient_divisor": 0},
        "infinite divisor": {"gradient_divisor": float("inf")},
        "timeout": {"timeout_s": 0},
        "infinite timeout": {"timeout_s": float("inf")},
        "group": {"group": "ep"},
        "member": {"group": last},
    }
    told = {}
    for name, given in options.items():
        told[name] = attempt(lambda given=given: ExpertParallel(**{"group": group, "num_experts": 8, **given}))  # type: ignore[misc]
    told["option"] = attempt(lambda: get("lrmoe", slot=1))
    engine = ExpertParallel(group, num_experts=8)
    told["local"] = attempt(lambda: engine.local(torch.zeros(4, 2)))
    told["state"] = attempt(
        lambda: engine.load_state_dict(ExpertParallel(group, num_experts=8, policy="fixed").state_dict())
    )
    told["no state"] = attempt(lambda: engine.load_state_dict({}))
    return told


def test_wrong_options_are_refused_at_once_naming_the_value() -> None:
    told = run_world(2, construct)
    messages = {
        "ranks": "num_experts=1 is less than the 2 ranks",
        "no experts": "num_experts=0",
        "text": "num_experts='8'",
        "policy": "policy='round_robin' is not known; choose one of fixed, ultraep, lrmoe",
        "no policy": "policy=5",
        "slots": "slots=-1",
        "half a slot": "slots=0.5",
        "capacity": "capacity=0.0",
        "capacity of a policy": "capacity=5.0 is for policies given by name; give it to the policy itself",
        "slots of a policy": "slots=2 is for policies given by name; give it to the policy itself",
        "ownership": "ownership='placed', which must be",
        "config": "must be an LRMoEConfig",
        "divisor": "gradient_divisor=0",
        "infinite divisor": "gradient_divisor=inf",
        "timeout": "timeout_s=0",
        "infinite timeout": "timeout_s=inf",
        "group": "group='ep'",
        "option": "no option 'slot'; its options are slots,",
        "local": "its first dimension must be 8",
        "state": "the state is of the policy 'fixed', this is 'lrmoe'",
        "no state": "None",
    }
    for answers in told:
        for name, message in messages.items():
            kind, text, _ = answers[name]
            assert kind == "ValueError", (name, kind, text)
            assert message in text, (name, text)
    assert told[0]["member"][0] == "ValueError"
    assert "no member of the group" in told[0]["member"][1]
    assert told[1]["member"][0] == ""


def inside_a_group(group: dist.ProcessGroup, problem: Problem) -> list[Tensor]:
    """Two groups of two, by ranks that do not follow each other, each with its own tokens and experts."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = groups[group.rank() % 2]
    engine = ExpertParallel(mine, num_experts=7, policy=RandomPlans(4, repeats=True), config=LRMoEConfig(drop=0.4))
    assert engine.rank == group.rank() // 2
    assert engine.size == 2
    return step_of(engine, arguments(problem, engine))


def test_a_group_that_is_not_the_default_one() -> None:
    problem = make(tokens=26, experts=7, bias=True)
    told = run_world(4, inside_a_group, problem)
    wanted = run_world(2, in_the_default_group, problem)
    for rank, answers in enumerate(told):
        assert all(torch.equal(a, b) for a, b in zip(answers, wanted[rank // 2], strict=True))


def in_the_default_group(group: dist.ProcessGroup, problem: Problem) -> list[Tensor]:
    engine = ExpertParallel(num_experts=7, policy=RandomPlans(4, repeats=True), config=LRMoEConfig(drop=0.4))
    return step_of(engine, arguments(problem, engine))
