"""Plans: homes, the exact split, the checks, and quotas over ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lrmoe.balance.plan import Plan, build_plan, home_ranks, split_exact
from lrmoe.balance.quotas import proportional, rank_quotas, split_quotas

M1 = [400, 100, 100, 100, 50, 50, 100, 100]


@pytest.mark.parametrize(
    ("experts", "ranks", "wanted"),
    [(8, 4, [0, 0, 1, 1, 2, 2, 3, 3]), (7, 3, [0, 0, 0, 1, 1, 2, 2]), (3, 3, [0, 1, 2]), (4, 1, [0, 0, 0, 0])],
)
def test_homes_are_contiguous_and_the_first_ranks_hold_one_more(experts: int, ranks: int, wanted: list[int]) -> None:
    assert home_ranks(experts, ranks) == wanted


@pytest.mark.parametrize(("experts", "ranks"), [(2, 3), (4, 0)])
def test_every_rank_owns_an_expert(experts: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"num_ranks={ranks} must be between 1 and num_experts={experts}"):
        home_ranks(experts, ranks)


def loop_split(lam: list[int], rows: list[int]) -> list[list[int]]:
    """One row after the other: hosts serve themselves, then the remaining pairs in order take the first free place."""
    split = [[0] * len(lam) for _ in lam]
    left, free = list(lam), list(rows)
    for rank in range(len(lam)):
        split[rank][rank] = min(left[rank], free[rank])
        left[rank] -= split[rank][rank]
        free[rank] -= split[rank][rank]
    for source in range(len(lam)):
        for _ in range(left[source]):
            host = next(rank for rank, places in enumerate(free) if places)
            split[source][host] += 1
            free[host] -= 1
    return split


def test_split_of_the_worked_example() -> None:
    split = split_exact(torch.tensor([[40, 160, 100, 100]]), torch.tensor([[150, 50, 150, 50]]))[0].tolist()
    # By host rank 0..3; the example lists the instances in planned order 0, 2, 1, 3.
    assert [[row[d] for d in (0, 2, 1, 3)] for row in split] == [
        [40, 0, 0, 0],
        [110, 0, 50, 0],
        [0, 100, 0, 0],
        [0, 50, 0, 50],
    ]


def test_sources_that_would_round_alike_do_not_overfill_a_host() -> None:
    # Sources 2..5 have one token each for hosts 0 and 1: rounding on its own, each would choose host 0.
    split = split_exact(torch.tensor([[0, 0, 1, 1, 1, 1]]), torch.tensor([[2, 2, 0, 0, 0, 0]]))[0]
    assert split.sum(0).tolist() == [2, 2, 0, 0, 0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_split_is_exact_local_first_and_in_order(pairs: list[tuple[int, int]], random: object) -> None:
    lam = [a for a, _ in pairs]
    rows = [0] * len(lam)
    for _ in range(sum(lam)):
        rows[random.randrange(len(lam))] += 1  # type: ignore[attr-defined]
    split = split_exact(torch.tensor([lam]), torch.tensor([rows]))[0]
    assert split.tolist() == loop_split(lam, rows)
    assert split.sum(1).tolist() == lam
    assert split.sum(0).tolist() == rows


def example_plan(lam_GE: torch.Tensor | None = None) -> Plan:
    lam_GE = torch.tensor([M1] + [[0] * 8] * 3) if lam_GE is None else lam_GE
    hosts, rows_EG = build_plan(lam_GE, home_ranks(8, 4), [(0, 2, 150), (0, 1, 50), (2, 2, 10)])
    return Plan(hosts, rows_EG, split_quotas(lam_GE.sum(0), rows_EG, hosts), lam_GE)


def test_a_plan_says_who_hosts_what() -> None:
    plan = example_plan().validate(slots=2)
    assert plan.hosts[0] == (0, 2, 1)
    assert plan.slots == ((), (0,), (0, 2), ())
    assert plan.rows_EG.sum(0).tolist() == [300, 240, 260, 200]
    assert (plan.num_replicas, plan.moved_rows) == (3, 210)
    assert torch.equal(plan.quota_EG, plan.rows_EG)


def test_alloc_adds_up_to_loads_and_rows() -> None:
    lam_GE = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(0))
    lam_GE[:, 0] += 100
    plan = example_plan(lam_GE)
    assert plan.alloc.shape == (4, 8, 4)
    assert torch.equal(plan.alloc.sum(2), lam_GE)
    assert torch.equal(plan.alloc.sum(0), plan.rows_EG)
    assert int(plan.alloc.min()) == 0
    for expert in range(8):
        wanted = loop_split(lam_GE[:, expert].tolist(), plan.rows_EG[expert].tolist())
        assert plan.alloc[:, expert].tolist() == wanted


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("hosts", lambda plan: (*plan.hosts[:7], (0,)), r"hosts\[7\]=\(0,\) must begin with the expert's home, rank 3"),
        ("hosts", lambda plan: ((0, 2, 2), *plan.hosts[1:]), r"hosts\[0\]=\(0, 2, 2\) must be different ranks"),
        ("hosts", lambda plan: ((0, 2, 4), *plan.hosts[1:]), r"must be different ranks in \[0, 4\)"),
        ("hosts", lambda plan: ((0, 2), *plan.hosts[1:]), "rows on a rank that does not host the expert"),
        ("hosts", lambda plan: plan.hosts[1:], "hosts lists 7 experts"),
        ("rows_EG", lambda plan: plan.rows_EG + 1, "rows on a rank that does not host"),
        ("rows_EG", lambda plan: plan.rows_EG.float(), "rows_EG is torch.float32"),
        ("quota_EG", lambda plan: plan.quota_EG + (plan.quota_EG > 0), r"quota_EG is not in \[0, rows\]"),
        ("lam_GE", lambda plan: plan.lam_GE + 1, "rows_EG does not add up to the loads"),
    ],
)
def test_a_wrong_plan_is_refused(field: str, change: object, message: str) -> None:
    plan = example_plan()
    with pytest.raises(ValueError, match=message):
        replace(plan, **{field: change(plan)}).validate()  # type: ignore[operator]


def test_too_many_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 2 hosts replicas of experts \(0, 2\), but has 1 slots"):
        example_plan().validate(slots=1)


@pytest.mark.parametrize(
    ("kind", "ranks", "wanted"),
    [
        ("expert", 4, [320, 80, 80, 80, 40, 40, 80, 80]),
        ("level", 4, [240, 60, 100, 100, 50, 50, 100, 100]),
        ("level", 1, [200, 100, 100, 100, 50, 50, 100, 100]),  # Over experts, as on one device.
    ],
)
def test_quotas_of_the_worked_example(kind: str, ranks: int, wanted: list[int]) -> None:
    assert rank_quotas(kind, torch.tensor(M1), home_ranks(8, ranks), 0.2).tolist() == wanted  # type: ignore[arg-type]


@settings(max_examples=200)
@example([1, 1, 1, 0, 2], 2, "level", 0.2)
@given(
    st.lists(st.one_of(st.integers(0, 5), st.integers(0, 500)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from(["expert", "level"]),
    st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.9]),
)
def test_quotas_are_exact_and_within_the_loads(loads: list[int], ranks: int, kind: str, drop: float) -> None:
    homes = home_ranks(len(loads), min(ranks, len(loads)))
    quota = rank_quotas(kind, torch.tensor(loads), homes, drop).tolist()  # type: ignore[arg-type]
    assert all(0 <= q <= load for q, load in zip(quota, loads, strict=True))
    target = math.floor((1 - drop) * sum(loads) + 0.5)
    assert sum(quota) == max(target, sum(load > 0 for load in loads))
    if kind == "level" and len(set(homes)) > 1:
        loaded = [int(load > 0) for load in loads]
        before, after, least = (
            [sum(v for v, h in zip(x, homes, strict=True) if h == r) for r in set(homes)]
            for x in (loads, quota, loaded)
        )
        # Ranks that dropped lie at the cap, to a row, or keep one of each expert, however high that is above the cap;
        # the others kept everything.
        cap = max((kept for kept, floor in zip(after, least, strict=True) if kept > floor), default=0)
        for load, kept, floor in zip(before, after, least, strict=True):
            assert kept in (load, floor) or kept >= cap - 1


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 100))
def test_proportional_parts(weights: list[int], percent: int) -> None:
    total = sum(weights) * percent // 100
    parts = proportional(weights, total)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert 0 <= part <= weight
        assert abs(part - (weight * total / sum(weights) if sum(weights) else 0)) < 1


def test_an_experts_quota_is_split_over_its_instances_by_rows() -> None:
    rows_EG = torch.tensor([[150, 50, 150, 50], [0, 7, 0, 0]])
    quota_EG = split_quotas(torch.tensor([321, 5]), rows_EG, [(0, 2, 1, 3), (1,)])
    # 120.375, 40.125, 120.375, 40.125: the missing row goes to the lower rank of the largest remainders.
    assert quota_EG.tolist() == [[121, 40, 120, 40], [0, 5, 0, 0]]
