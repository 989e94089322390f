"""UltraEP's planner: the worked examples, a plain restatement, and what holds for any loads."""

from __future__ import annotations

import math

import pytest
import torch
from balance.problem import LOADS, M1, exports_of, loads, scattered
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.balance import BudgetExceeded, get
from lrmoe.balance.plan import home_ranks
from lrmoe.balance.ultraep import HomeLoads, UltraEP, probe

U2 = [600, 100, 200, 100, 0, 0, 0, 0]


def exact(slots: int = 1, floor: int = 1) -> UltraEP:
    policy = get("ultraep", slots=slots, floor=floor, fast_path=False)
    assert isinstance(policy, UltraEP)
    return policy


def test_u1_reaches_the_mean() -> None:
    plan = exact().plan(loads(M1)).validate(slots=1)
    assert exports_of(plan) == [(0, 2, 150), (0, 1, 50), (0, 3, 50)]
    assert plan.rows_EG.sum(0).tolist() == [250] * 4
    assert int(plan.rows_EG[0, 0]) == 150


def test_u1_by_the_fast_path() -> None:
    plan = get("ultraep", slots=1).plan(loads(M1)).validate(slots=1)
    assert exports_of(plan) == [(0, 2, 153), (0, 1, 53), (0, 3, 41)]
    assert plan.rows_EG.sum(0).tolist() == [253, 253, 253, 241]


@pytest.mark.parametrize(
    ("slots", "exports", "after"),
    [
        (1, [(0, 2, 300), (0, 3, 100)], [300, 300, 300, 100]),  # The slots bind.
        (2, [(0, 2, 250), (0, 3, 200), (2, 3, 50)], [250] * 4),
    ],
)
def test_u2_with_one_and_two_slots(slots: int, exports: list[tuple[int, int, int]], after: list[int]) -> None:
    plan = exact(slots).plan(loads(U2)).validate(slots=slots)
    assert exports_of(plan) == exports
    assert plan.rows_EG.sum(0).tolist() == after


def test_small_loads_do_not_pass_the_fixed_floor() -> None:
    assert exact(floor=1024).plan(loads(M1)).num_replicas == 0
    # At 299 two replicas would be needed, the second of 2 rows; at 300 one of 200 rows does.
    assert exports_of(exact(floor=100).plan(loads(M1))) == [(0, 2, 200)]


def test_the_fast_path_takes_a_second_try() -> None:
    # Mean 300. At 303 rank 0 has to pass on 297 rows at once, more than its hottest expert has beyond the row that
    # stays; six rows (a per cent of 600) later it has to pass on 291.
    plan = get("ultraep", slots=2).plan(loads([294, 153, 153, 0, 0, 0], ranks=2))
    assert exports_of(plan) == [(0, 1, 291)]
    assert plan.rows_EG.sum(0).tolist() == [309, 291]


def test_the_search_follows_where_the_fast_path_fails() -> None:
    # No expert has an even share of what has to move, so all three tries fail; the search needs no even shares.
    policy = get("ultraep", slots=2, floor=1)
    assert isinstance(policy, UltraEP)
    load = loads([150] * 4 + [0] * 4, ranks=2)
    assert policy.fast_exports(HomeLoads.of(load)) is None
    assert exports_of(policy.plan(load)) == [(0, 1, 149), (1, 1, 149)]


def test_a_floor_can_hide_the_least_threshold_from_the_search() -> None:
    # At 20 rows a rank one replica takes 20; at 21 it would take 19, below the floor, and so up to 40.
    home = HomeLoads.of(loads([0, 40], ranks=2))
    assert probe(home, 20, slots=1, floor=20) == [(1, 0, 20)]
    assert probe(home, 21, slots=1, floor=20) is None
    assert exact(floor=20).least_exports(home) == []


def test_capacity_below_the_mean_does_not_fit() -> None:
    with pytest.raises(BudgetExceeded, match=r"'ultraep' does not fit: rank \d needs 250 rows, the capacity is 200"):
        get("ultraep", slots=1, floor=1, capacity=200).plan(loads(M1))
    # At the mean only the search fits, the fast path aims above it.
    assert get("ultraep", slots=1, floor=1, capacity=250).plan(loads(M1)).rows_EG.sum(0).max() == 250


def test_the_drop_changes_quotas_only() -> None:
    plan = exact().plan(loads(M1), drop=0.2).validate(slots=1)
    assert torch.equal(plan.rows_EG, exact().plan(loads(M1)).rows_EG)
    assert plan.quota_EG.sum(0).tolist() == [200] * 4
    assert plan.quota_EG.sum(1).tolist() == [320, 80, 80, 80, 40, 40, 80, 80]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": -1}, "slots=-1 must be an integer >= 0"),
        ({"tolerance": -0.1}, r"tolerance=-0.1 must be in \[0, 1\]"),
        ({"floor": 0}, "floor=0 must be an integer >= 1"),
        ({"fast_path": 1}, "fast_path=1 must be True or False"),
        ({"capacity": -3}, "capacity=-3 must be a positive number"),
        ({"beta": 1.0}, "policy 'ultraep' has no option 'beta'; its options are slots, tolerance, floor"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get("ultraep", **options)


def plain_probe(load: list[int], ranks: int, threshold: int, slots: int, floor: int | None) -> object:
    """The same rules over dicts, with no order kept between steps."""
    homes = home_ranks(len(load), ranks)
    total = {r: sum(v for v, h in zip(load, homes, strict=True) if h == r) for r in range(ranks)}
    slack = {r: max(threshold - total[r], 0) for r in total}
    if sum(max(total[r] - threshold, 0) for r in total) > sum(slack.values()):
        return None
    used = dict.fromkeys(total, 0)
    exports: list[tuple[int, int, int]] = []
    for source in sorted(total, key=lambda r: (-total[r], r)):
        need = max(total[source] - threshold, 0)
        for expert in sorted((e for e, h in enumerate(homes) if h == source), key=lambda e: (-load[e], e)):
            left = load[expert] - 1
            while need > 0 and left > 0:
                hosting = {t for e, t, _ in exports if e == expert} | {source}
                targets = [t for t in total if slack[t] > 0 and used[t] < slots and t not in hosting]
                if not targets:
                    break
                best = min(targets, key=lambda t: (-slack[t], t))
                rows = min(need, slack[best], left)
                if rows < (math.ceil(need / len(targets)) if floor is None else floor):
                    break
                exports.append((expert, best, rows))
                need, left = need - rows, left - rows
                slack[best] -= rows
                used[best] += 1
        if need > 0:
            return None
    return exports


@settings(max_examples=300, deadline=None)
@given(LOADS, st.integers(1, 6), st.integers(0, 3), st.sampled_from([None, 1, 20]))
def test_probe_and_search_follow_the_plain_rules(load: list[int], ranks: int, slots: int, floor: int | None) -> None:
    ranks = min(ranks, len(load))
    home = HomeLoads.of(loads(load, ranks))
    wanted = {}
    for threshold in range(home.mean, max(home.most, home.mean) + 1, 1 if home.most < 60 else 13):
        wanted[threshold] = plain_probe(load, ranks, threshold, slots, floor)
        assert probe(home, threshold, slots=slots, floor=floor) == wanted[threshold]
    if floor is not None and home.most < 60:
        # Bisection ends at a threshold that works below which the next one does not.
        found = exact(slots, floor).least_exports(home)
        assert any(exports == found and wanted.get(t - 1) is None for t, exports in wanted.items())


@settings(max_examples=200, deadline=None)
@given(LOADS, st.integers(1, 6), st.integers(0, 3), st.booleans(), st.sampled_from([0.0, 0.3]), st.randoms())
def test_any_loads(load: list[int], ranks: int, slots: int, fast: bool, drop: float, random: object) -> None:
    ranks = min(ranks, len(load))
    lam_GE = scattered(load, ranks, random)
    policy = get("ultraep", slots=slots, floor=1, fast_path=fast)
    plan = policy.plan(lam_GE, drop=drop).validate(slots=slots)
    assert torch.equal(plan.alloc.sum(0), plan.rows_EG)
    assert torch.equal(plan.alloc.sum(2), lam_GE)
    assert int(plan.rows_EG.sum(0).max()) <= HomeLoads.of(lam_GE).most
    asked_E = get("fixed").plan(lam_GE, drop=drop).quota_EG.sum(1)
    assert torch.equal(plan.quota_EG.sum(1), torch.maximum(asked_E, (plan.rows_EG > 0).sum(1)))
    for expert, hosts in enumerate(plan.hosts):
        assert int(plan.rows_EG[expert, hosts[0]]) >= min(load[expert], 1)
        assert all(int(plan.rows_EG[expert, rank]) > 0 for rank in hosts[1:])
    again = policy.plan(lam_GE.to(torch.int32), drop=drop)
    assert again.hosts == plan.hosts
    assert torch.equal(again.quota_EG, plan.quota_EG)
    home = HomeLoads.of(lam_GE)
    if home.most <= home.mean:
        assert plan.num_replicas == 0
