"""What holds for every policy: the registry, bad input, state, and fixed ownership."""

from __future__ import annotations

import pytest
import torch
from balance.problem import M1, loads

from lrmoe.balance import BudgetExceeded, get


def test_an_unknown_policy_or_option_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"policy='megatron' is not known; choose one of fixed"):
        get("megatron")
    with pytest.raises(ValueError, match=r"policy 'fixed' has no option 'slot'; its options are slots, capacity"):
        get("fixed", slot=1)


@pytest.mark.parametrize(
    ("lam", "message"),
    [
        ([[1, 2]], r"lam_GE is list; it must be a tensor \(ranks, experts\)"),
        (torch.ones(3, dtype=torch.int64), r"lam_GE is \(3,\); it must be a tensor"),
        (torch.ones(2, 3), "lam_GE is torch.float32; it counts pairs"),
        (torch.ones(3, 2, dtype=torch.int64), "num_ranks=3 must be between 1 and num_experts=2"),
        (torch.tensor([[1, 2], [3, -4]]), r"lam_GE\[1, 1\]=-4 is negative"),
    ],
)
def test_bad_loads_are_named(lam: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get("fixed").plan(lam)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": 1.0}, r"drop=1.0 must be in \[0, 1\)"),
        ({"drop": float("nan")}, "drop=nan must be a number"),
        ({"quota": "rank"}, "quota='rank' is not known; choose one of expert, level"),
    ],
)
def test_bad_plan_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get("fixed").plan(loads(M1), **options)  # type: ignore[arg-type]


def test_fixed_ownership_leaves_every_row_at_home() -> None:
    policy = get("fixed", slots=2)
    plan = policy.plan(loads(M1)).validate(slots=0)
    assert policy.slots == 0
    assert plan.rows_EG.sum(0).tolist() == [500, 200, 100, 200]
    assert torch.equal(plan.quota_EG, plan.rows_EG)
    kept = policy.plan(loads(M1), drop=0.2).validate().quota_EG
    assert kept.sum(0).tolist() == [400, 160, 80, 160]


def test_fixed_ownership_says_what_does_not_fit() -> None:
    policy = get("fixed", capacity=250)
    with pytest.raises(BudgetExceeded, match="rank 0 needs 500 rows, the capacity is 250; a capacity of 500") as caught:
        policy.plan(loads(M1))
    assert (caught.value.demand, caught.value.capacity, caught.value.rank) == (500, 250, 0)
    assert get("fixed", capacity=caught.value.would_fit).plan(loads(M1)).num_replicas == 0
    with pytest.raises(ValueError, match="capacity=0 must be a positive number"):
        get("fixed", capacity=0)


def test_state_of_another_policy_is_refused() -> None:
    policy = get("fixed")
    policy.observe(loads(M1), layer=0)
    policy.step()
    policy.load_state_dict(policy.state_dict())
    with pytest.raises(ValueError, match="policy 'fixed' has no state, but is given 'history'"):
        policy.load_state_dict({"history": []})
