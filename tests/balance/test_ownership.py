"""What holds for every policy that places experts or copies them to all: exact plans from whatever was observed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from balance.problem import scattered
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.balance import Plan, Policy, get
from lrmoe.balance.ownership import HistoryPolicy, Move, even_rows, moves_between, ownership_of
from lrmoe.balance.plan import home_ranks
from lrmoe.balance.policy import planned_quotas

HISTORY = ("symi", "laer", "flexmoe", "smartmoe", "eplb")
ALL = (*HISTORY, "fastermoe")


def make(name: str, experts: int, ranks: int, spare: int) -> Policy:
    """A policy that decides at every step, with ``spare`` slots a rank more than it needs."""
    least = -(-experts // ranks)
    options: dict[str, dict[str, Any]] = {
        "symi": {"slots": least + spare},
        "laer": {"slots": least + spare, "node_size": 2 if ranks % 2 == 0 else ranks},
        "flexmoe": {"slots": least + spare, "threshold": 1.0, "sync_cost": float(spare)},
        "smartmoe": {"interval": 1},
        "eplb": {"slots": spare, "interval": 1},
        "fastermoe": {"dim": 8, "flops": 1e8, "bandwidth": 1e9},
    }
    return get(name, **options[name])


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[torch.Tensor], int]:
    """Loads of a few microbatches, and spare slots. Experts need not divide evenly over the ranks."""
    ranks = draw(st.integers(1, 5))
    experts = draw(st.integers(ranks, 9))
    load = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 400))
    values = draw(st.lists(st.lists(load, min_size=experts, max_size=experts), min_size=2, max_size=4))
    random = draw(st.randoms(use_true_random=False))
    return [scattered(loads, ranks, random) for loads in values], draw(st.integers(0, 2))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=50, deadline=None)
@given(run=runs(), drop=st.sampled_from([0.0, 0.2, 0.7]), quota=st.sampled_from(["expert", "level"]))
def test_every_plan_is_exact(name: str, run: tuple[list[torch.Tensor], int], drop: float, quota: Any) -> None:
    matrices, spare = run
    num_ranks, num_experts = matrices[0].shape
    policy, twin = make(name, num_experts, num_ranks, spare), make(name, num_experts, num_ranks, spare)
    for lam_GE in matrices:
        plan = policy.plan(lam_GE, drop=drop, quota=quota, layer=1)
        plan.validate(policy.slots, ownership=ownership_of(policy))
        alloc_GEG = plan.alloc
        assert torch.equal(alloc_GEG.sum(2), lam_GE)
        assert torch.equal(alloc_GEG.sum(0), plan.rows_EG)
        assert int(alloc_GEG.min()) >= 0
        # An instance that has rows keeps one, for which an expert may have to keep more than its quota.
        filled_E = (plan.rows_EG > 0).sum(1)
        assert torch.equal(plan.quota_EG.sum(1), torch.maximum(planned_quotas(lam_GE, drop, quota), filled_E))
        assert torch.equal(plan.quota_EG > 0, plan.rows_EG > 0)
        if drop == 0:
            assert torch.equal(plan.quota_EG, plan.rows_EG)
        again = twin.plan(lam_GE, drop=drop, quota=quota, layer=1)
        assert again.hosts == plan.hosts
        assert torch.equal(again.rows_EG, plan.rows_EG)
        # What the backward leaves out changes no row of the forward.
        assert torch.equal(policy.plan(lam_GE, layer=1).rows_EG, plan.rows_EG)
        for one in (policy, twin):
            one.observe(lam_GE, layer=1)
            one.step()


@pytest.mark.parametrize("name", HISTORY)
@settings(max_examples=25, deadline=None)
@given(run=runs())
def test_the_placement_holds_every_expert_in_its_slots(name: str, run: tuple[list[torch.Tensor], int]) -> None:
    matrices, spare = run
    num_ranks, num_experts = matrices[0].shape
    policy = make(name, num_experts, num_ranks, spare)
    assert isinstance(policy, HistoryPolicy)
    policy.prepare(num_experts, num_ranks)
    start = policy.placement(0)
    homes = home_ranks(num_experts, num_ranks)
    if policy.ownership == "placed":
        for rank, slots in enumerate(start):
            own = [e for e, home in enumerate(homes) if home == rank]
            assert list(slots[: len(own)]) == own
    for lam_GE in matrices:
        policy.observe(lam_GE, layer=0)
        before = policy.placement(0)
        policy.step()
        after = policy.placement(0)
        assert [len(slots) for slots in after] == [len(slots) for slots in start]
        assert all(len(slots) <= policy.slots for slots in after)
        assert {e for slots in after for e in slots} == set(range(num_experts))
        slots = [list(held) for held in before]
        for move in policy.moves():
            assert before[move.source_rank][move.source_slot] == move.expert
            slots[move.target_rank][move.target_slot] = move.expert
        if policy.ownership == "placed":
            assert tuple(map(tuple, slots)) == after
        else:
            assert policy.moves() == []
        plan = policy.plan(lam_GE)
        for expert, ranks in enumerate(plan.hosts):
            holding = [rank for rank, held in enumerate(after) if expert in held]
            if policy.ownership == "home":
                assert ranks[0] == homes[expert]
                assert {*ranks[1:], homes[expert]} == {*holding, homes[expert]}
            else:
                assert list(ranks) == holding


@pytest.mark.parametrize("name", ALL)
def test_a_restored_policy_goes_on_the_same(name: str) -> None:
    random = torch.Generator().manual_seed(5)
    matrices = [torch.randint(0, 60, (4, 10), generator=random) ** 2 for _ in range(12)]
    policy, restored = make(name, 10, 4, 1), make(name, 10, 4, 1)
    for number, lam_GE in enumerate(matrices):
        layer = number % 2
        if number == 5:  # In the middle of a step.
            restored.load_state_dict(json.loads(json.dumps(policy.state_dict())))
        if number >= 5:
            restored.observe(lam_GE, layer=layer)
        policy.observe(lam_GE, layer=layer)
        if number % 4 == 3:
            policy.step()
            restored.step()
        if number >= 5:
            one, two = (each.plan(lam_GE, drop=0.2, layer=layer) for each in (policy, restored))
            assert one.hosts == two.hosts
            assert torch.equal(one.alloc, two.alloc)
            assert torch.equal(one.quota_EG, two.quota_EG)
    assert policy.state_dict() == restored.state_dict()


@pytest.mark.parametrize("name", HISTORY)
def test_a_layer_without_loads_keeps_its_placement(name: str) -> None:
    policy = make(name, 8, 4, 1)
    assert isinstance(policy, HistoryPolicy)
    lam_GE = torch.tensor([[60, 50, 1, 1, 5, 1, 1, 40]] * 4)
    policy.observe(lam_GE, layer=7)
    start = policy.placement(0)
    policy.step()
    assert policy.placement(0) == start
    decided = policy.placement(7)
    assert decided != start
    policy.step()
    assert policy.placement(7) == decided
    # Loads that are no more skewed for being none.
    policy.observe(torch.zeros_like(lam_GE), layer=7)
    policy.step()
    policy.plan(lam_GE, layer=7).validate(ownership=policy.ownership)


@pytest.mark.parametrize("name", ["symi", "laer", "flexmoe"])
def test_fewer_slots_than_experts_are_refused(name: str) -> None:
    message = f"policy '{name}' with slots=2 on 3 ranks has 6 slots for 8 experts.*set slots to at least 3"
    policy = get(name, slots=2)
    with pytest.raises(ValueError, match=message):
        policy.prepare(8, 3)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        get(name, slots=2).plan(torch.ones(3, 8, dtype=torch.int64))
    policy.plan(torch.ones(3, 6, dtype=torch.int64))  # It was not bound to what it cannot do.


@pytest.mark.parametrize("name", HISTORY)
def test_sizes_that_change_are_refused(name: str) -> None:
    policy = make(name, 8, 4, 1)
    policy.plan(torch.ones(4, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"'{name}' plans for 8 experts on 4 ranks, but is given 6 on 2"):
        policy.observe(torch.ones(2, 6, dtype=torch.int64), layer=0)
    with pytest.raises(ValueError, match="num_ranks=9 must be between 1 and num_experts=8"):
        make(name, 8, 9, 1).prepare(8, 9)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", HISTORY)
def test_a_placement_needs_sizes(name: str) -> None:
    with pytest.raises(ValueError, match="does not know its sizes yet: call prepare"):
        make(name, 8, 4, 1).placement(0)  # type: ignore[attr-defined]


def test_states_that_do_not_fit_are_refused() -> None:
    policy = make("symi", 8, 4, 1)
    policy.plan(torch.ones(4, 8, dtype=torch.int64))
    state = policy.state_dict()
    with pytest.raises(
        ValueError, match=r"has \[3, 3, 3, 3\] slots on the ranks in layer 0, policy 'symi' has \[4, 4, 4, 4\]"
    ):
        make("symi", 8, 4, 2).load_state_dict(state)
    with pytest.raises(ValueError, match="it belongs to another policy"):
        policy.load_state_dict({})
    other = make("symi", 6, 3, 1)
    other.plan(torch.ones(3, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="the state is of 8 experts on 4 ranks, policy 'symi' plans for 6 on 3"):
        other.load_state_dict(state)
    _, placement, _, _ = state["layers"][0]
    placement[0] = placement[1]
    with pytest.raises(ValueError, match="does not place every expert in layer 0"):
        make("symi", 8, 4, 1).load_state_dict(state)
    assert other.state_dict()["sizes"] == [6, 3]


def test_moves_read_from_their_own_rank_where_they_can() -> None:
    old = ((0, 1), (1, 2), (2, 0))
    new = ((1, 1), (0, 2), (2, 0))
    assert moves_between(3, old, new) == [Move(3, 1, 0, 1, 0, 0), Move(3, 0, 0, 0, 1, 0)]
    assert moves_between(3, old, ((0, 1), (1, 1), (2, 0))) == [Move(3, 1, 1, 0, 1, 1)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any))
def test_even_rows_are_the_nearest_to_an_even_share(load: int, slots: list[int]) -> None:
    rows = even_rows(torch.tensor([load]), torch.tensor([slots]))[0].tolist()
    assert sum(rows) == load
    for held, mine in zip(slots, rows, strict=True):
        assert abs(mine - load * held / sum(slots)) <= 1
        if held == 0:
            assert mine == 0


def test_every_policy_says_where_the_experts_live() -> None:
    found = {name: ownership_of(get(name)) for name in ("fixed", "ultraep", "lrmoe", *ALL)}
    assert found == {
        **dict.fromkeys(("fixed", "ultraep", "lrmoe", "eplb", "fastermoe"), "home"),
        **dict.fromkeys(("symi", "laer"), "sharded"),
        **dict.fromkeys(("flexmoe", "smartmoe"), "placed"),
    }


def test_plans_elsewhere_than_at_home_are_checked() -> None:
    lam_GE = torch.tensor([[3, 5], [2, 1]])
    plan = get("laer", slots=1).plan(lam_GE)
    swapped = Plan(plan.hosts[::-1], plan.rows_EG.flip(0), plan.quota_EG.flip(0), lam_GE.flip(1))
    swapped.validate(1, ownership="sharded")
    with pytest.raises(ValueError, match=r"hosts\[0\]=\(1,\) must begin with the expert's home, rank 0"):
        swapped.validate(1)
    with pytest.raises(ValueError, match="rank 0 hosts 2 experts, but has 1 slots"):
        get("laer", slots=2).plan(lam_GE).validate(1, ownership="sharded")
    with pytest.raises(ValueError, match=r"hosts\[1\] is empty"):
        replace(plan, hosts=(plan.hosts[0], ())).validate(ownership="sharded")
    alloc_GEG = plan.alloc
    for wrong, message in (
        (alloc_GEG[:1], r"alloc is torch.int64 \(1, 2, 2\); it must be int64 \(2, 2, 2\)"),
        (alloc_GEG.flip(0), "alloc does not add up to lam_GE, first at"),
        (alloc_GEG.flip(2), "alloc does not add up to rows_EG, first at"),
        (alloc_GEG - torch.tensor([[[9, -9], [0, 0]]]), "alloc is negative, first at"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(plan, route=lambda table=wrong: table).validate(ownership="sharded")
