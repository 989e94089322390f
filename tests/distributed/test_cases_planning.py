"""Routing shapes, moving hot spots and the break-even, as the planners see them (no process is started)."""

from __future__ import annotations

import pytest
import torch

from lrmoe.balance import Policy, get
from lrmoe.balance.shapes import SHAPES
from lrmoe.cli import main
from lrmoe.studies.balance import Contender, Expert, contenders, measure
from lrmoe.studies.loads import shaped_loads, skew_of


def exact_policies() -> list[Policy]:
    return [get("ultraep", slots=1, floor=1), get("lrmoe", slots=1)]


# Largest over mean rows of a rank with every expert at home; step 3 of those that change from step to step.
HOME = {
    "balanced": 1.0,
    "hot_experts": 1.945,
    "hot_rank": 2.285,
    "spread": 1.0,
    "ragged": 1.0,
    "empty": 1.602,
    "rotating": 2.285,
    "burst": 1.914,
}

# And with one slot a rank, at the least that four slots allow: the two experts of ranks 1 and 2 that the emptier ranks
# 3 and 0 take in "empty" leave 1.2 mean loads behind.
LEAST = {"hot_experts": 1.189, "hot_rank": 1.06, "empty": 1.202, "rotating": 1.06, "burst": 1.05}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["ultraep", "lrmoe"])
@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_case_11_each_shape_before_and_after(shape: str, name: str, drop: float) -> None:
    lam_GE = shaped_loads(shape, step=3)
    policy = next(policy for policy in exact_policies() if policy.name == name)
    record = measure(Contender(label=name, policy=policy, drop=drop), [lam_GE])
    assert record["forward_home"] == pytest.approx(HOME[shape], abs=0.002)
    # Quotas lower the backward alone, by the same share on every rank: its kept rows are as uneven as all rows.
    assert record["backward_home"] == pytest.approx(HOME[shape], abs=0.006)
    policy.plan(lam_GE, drop=drop).validate(slots=1)
    if HOME[shape] == 1.0:
        assert (record["replicas"], record["moved_rows"], record["replica_bytes"]) == (0, 0, 0)
        assert record["forward"] == record["forward_home"]
    else:
        assert record["replicas"] >= 1
        assert record["replica_bytes"] > 0
        assert record["forward"] <= LEAST[shape]
        assert record["backward"] == pytest.approx(record["forward"], abs=0.013)


def test_case_11_level_quotas_flatten_the_backward_without_a_replica() -> None:
    for shape in ("hot_experts", "hot_rank", "burst"):
        lam_GE = shaped_loads(shape, step=3)
        contender = Contender(label="level", policy=get("fixed"), drop=0.2, quota="level")
        record = measure(contender, [lam_GE])
        assert record["forward"] == record["forward_home"] > 1.9
        assert record["backward"] < record["forward"] - 0.125, shape


def test_case_11_the_shapes_in_order() -> None:
    assert sorted(HOME, key=lambda shape: (-skew_of(shaped_loads(shape, step=3)), shape))[:5] == [
        "hot_rank",
        "rotating",
        "hot_experts",
        "burst",
        "empty",
    ]


@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_case_60_a_hot_spot_that_moves_every_step(drop: float) -> None:
    steps = [shaped_loads("rotating", step=step) for step in range(8)]
    assert len({tuple(lam_GE.sum(0).tolist()) for lam_GE in steps}) == 4
    for policy in exact_policies():
        record = measure(Contender(label=policy.name, policy=policy, drop=drop), steps)
        each = [measure(Contender(label=policy.name, policy=policy, drop=drop), [lam_GE]) for lam_GE in steps]
        # Planned from each step's exact counts, so that no step is worse than another, ...
        assert all(one["forward"] <= 1.16 for one in each)
        assert record["forward_home"] == pytest.approx(2.285, abs=0.002)
        # ... at the price of new replicas at every step, which is counted.
        assert record["replicas"] == sum(one["replicas"] for one in each) >= 2 * len(steps)
        assert record["replica_bytes"] == record["replicas"] * 3 * Expert().dim * Expert().expert_dim * 8
    # A plan of the step before would not have helped.
    before, now = steps[0], steps[1]
    stale = get("ultraep", slots=1, floor=1).plan(before)
    hosted = [set(ranks) for ranks in stale.hosts]
    hot = torch.tensor([e for e in range(16) if e // 4 == 1])
    assert all(len(hosted[e]) == 1 for e in hot.tolist())
    assert skew_of(now) > 2


@pytest.mark.parametrize("shape", ["balanced", "hot_rank"])
def test_case_61_the_command_prints_the_crossover(capsys: pytest.CaptureFixture[str], shape: str) -> None:
    assert main(["balance", "--shape", shape, "--floor", "1"]) == 0
    said = capsys.readouterr().out
    for tokens in ("64", "1,024", "65,536"):
        assert f" {tokens} " in said
    for contender in contenders()[1:]:
        if shape == "balanced":
            assert f"{contender.label}: plans no replica for these loads at any size; leave replicas off" in said
        else:
            assert f"{contender.label}: replicas pay from about" in said
    assert ("below that, leave them off (slots=0)" in said) == (shape == "hot_rank")
