"""LAER-MoE: the worked examples with their costs, routing within nodes, and the window of loads."""

from __future__ import annotations

import pytest
import torch
from balance.problem import loads
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.balance.baselines.laer import LAER, lite_route, place, replicas_by_load
from lrmoe.balance.ownership import slot_counts

L1 = [400, 100, 100, 100]
L2 = [600, 200, 100, 100]


def toy(slots: int, node_size: int, **options: float) -> LAER:
    """Of the examples: two bytes a row, 10 ms a row, 200 and 100 bytes a second."""
    return LAER(slots=slots, node_size=node_size, token_bytes=2, token_ms=10, intra=200, inter=100, **options)


@pytest.mark.parametrize(
    ("load", "slots", "node_size", "counts", "placement", "rows", "cost"),
    [
        (L1, 2, 4, [5, 1, 1, 1], ((1, 0), (2, 0), (3, 0), (0, 0)), [180, 180, 180, 160], 28.20),
        # Of 25 rows a source two slots get 13 and 12: 252 rows of the ideal 250.
        (L1, 2, 4, [2, 2, 2, 2], ((0, 3), (0, 3), (1, 2), (1, 2)), [252, 248, 104, 96], 31.08),
        (L2, 3, 2, [6, 2, 2, 2], ((0, 0, 2), (0, 1, 3), (0, 0, 2), (0, 1, 3)), [250] * 4, 30.0),
        (L2, 3, 2, [3, 3, 3, 3], ((0, 1, 3), (0, 2, 3), (0, 2, 3), (1, 1, 2)), [276, 224, 376, 124], 35.04),
    ],
)
def test_l1_l2(
    load: list[int],
    slots: int,
    node_size: int,
    counts: list[int],
    placement: tuple[tuple[int, ...], ...],
    rows: list[int],
    cost: float,
) -> None:
    policy = toy(slots, node_size)
    by_load = replicas_by_load(load, 4 * slots, nodes=4 // node_size)
    assert counts in (by_load, [slots] * 4)
    found = place(load, counts, 4, slots, node_size)
    assert found == placement
    assert lite_route(loads(load), slot_counts(found, 4), node_size).sum((0, 1)).tolist() == rows
    assert policy.cost(loads(load), found) == pytest.approx(cost, abs=1e-9)


@pytest.mark.parametrize(("load", "slots", "node_size"), [(L1, 2, 4), (L2, 3, 2)])
def test_l1_l2_the_queue_wins(load: list[int], slots: int, node_size: int) -> None:
    policy = toy(slots, node_size)
    policy.observe(loads(load), layer=0)
    policy.step()
    counts = slot_counts(policy.placement(0), 4).sum(1).tolist()
    assert counts == replicas_by_load(load, 4 * slots, nodes=4 // node_size)
    plan = policy.plan(loads(load)).validate(slots, ownership="sharded")
    assert int(plan.rows_EG.sum(0).max()) == (180 if load is L1 else 250)


def test_even_counts_win_where_they_are_cheaper() -> None:
    # By the queue one rank holds copies of both hot experts, whose shares of a third and a third are 1684 of 5150 rows.
    lam_GE = loads([2030, 3020, 50, 50])
    policy = LAER(slots=2, token_ms=1.0)
    layout = policy.layout(lam_GE)
    assert slot_counts(layout, 4).sum(1).tolist() == [2, 2, 2, 2]
    by_load = replicas_by_load([2030, 3020, 50, 50], 8, 1)
    assert by_load == [3, 3, 1, 1]
    assert policy.cost(lam_GE, layout) < policy.cost(lam_GE, place([2030, 3020, 50, 50], by_load, 4, 2, 8))


def test_rows_between_nodes_cost_more() -> None:
    # Each rank sends 10 rows to the neighbour, 4 to the other node, and computes 24: 20 bytes at 200, 8 at 100.
    lam_GE = torch.tensor([[10, 10, 4, 0], [10, 10, 0, 4], [4, 0, 10, 10], [0, 4, 10, 10]])
    cost = toy(1, 2).cost(lam_GE, ((0,), (1,), (2,), (3,)))
    assert cost == pytest.approx(4 * 4 * (20 / 200 + 8 / 100) + 4 * 24 * 0.01)


def test_without_recomputation_a_row_is_worked_on_three_times() -> None:
    # 28.20 of the example, less once 180 rows at 10 ms.
    policy = toy(2, 4, recompute=False)
    assert policy.cost(loads(L1), ((1, 0), (2, 0), (3, 0), (0, 0))) == pytest.approx(26.40)


@pytest.mark.parametrize(
    ("placement", "node_size", "rows"),
    [
        # The source is rank 0. Two slots on its node, ranks 0 and 1; the one on rank 2 gets nothing.
        (((0,), (0,), (0,), (1,)), 2, [4, 3, 0, 0]),
        # None on its node, three elsewhere.
        (((1, 1), (1, 1), (0, 0), (1, 0)), 2, [0, 0, 5, 2]),
        (((1,), (0,), (0,), (0,)), 1, [0, 3, 2, 2]),
    ],
)
def test_l4(placement: tuple[tuple[int, ...], ...], node_size: int, rows: list[int]) -> None:
    lam_GE = torch.zeros(4, 2, dtype=torch.int64)
    lam_GE[0, 0] = 7
    assert lite_route(lam_GE, slot_counts(placement, 2), node_size)[0, 0].tolist() == rows


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lite_routing_stays_on_the_node_and_is_even(data: st.DataObject) -> None:
    nodes, node_size, experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    ranks = nodes * node_size
    cells = st.lists(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks), min_size=experts, max_size=experts)
    slots_EG = torch.tensor(data.draw(cells))
    slots_EG[:, 0] += slots_EG.sum(1) == 0
    counts = st.lists(st.lists(st.integers(0, 9), min_size=experts, max_size=experts), min_size=ranks, max_size=ranks)
    lam_GE = torch.tensor(data.draw(counts))
    routed_GEG = lite_route(lam_GE, slots_EG, node_size)
    assert torch.equal(routed_GEG.sum(2), lam_GE)
    for source in range(ranks):
        near = [r for r in range(ranks) if r // node_size == source // node_size]
        for expert in range(experts):
            ranks_open = near if any(slots_EG[expert, r] for r in near) else list(range(ranks))
            line = [r for r in ranks_open for _ in range(int(slots_EG[expert, r]))]
            expected = [0] * ranks
            for i in range(int(lam_GE[source, expert])):
                expected[line[i % len(line)]] += 1
            assert routed_GEG[source, expert].tolist() == expected


def test_the_window_holds_five_microbatches() -> None:
    policy = LAER(slots=2, token_ms=1.0)
    old, new = loads([40000, 100, 100, 100]), loads([100, 500, 100, 100])
    for lam_GE in (old, old, old, old, new, new, new, new):
        policy.observe(lam_GE, layer=0)
    policy.step()
    assert slot_counts(policy.placement(0), 4).sum(1).tolist() == [5, 1, 1, 1]  # One of the old ones is left.
    policy.observe(new, layer=0)
    policy.step()
    assert slot_counts(policy.placement(0), 4).sum(1).tolist() == [1, 5, 1, 1]


def test_the_queue_fills_all_slots() -> None:
    # More experts than nodes can double at first: one copy each, then one more until there are as many as nodes.
    assert replicas_by_load([40, 30, 20, 10], 6, nodes=2) == [2, 2, 1, 1]
    assert replicas_by_load([900, 30, 20, 10], 8, nodes=3) == [3, 2, 2, 1]
    assert replicas_by_load([0, 0], 6, nodes=1) == [5, 1]


def test_settings_that_cannot_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"slots=2 on 4 ranks has 8 slots for 9 experts.*set slots to at least 3"):
        LAER(slots=2).prepare(9, 4)
    with pytest.raises(ValueError, match="12 ranks do not fill nodes of node_size=8"):
        LAER(slots=2).prepare(12, 12)
    with pytest.raises(ValueError, match="intra=0 must be positive and finite"):
        LAER(intra=0)
    with pytest.raises(ValueError, match="recompute=1 must be True or False"):
        LAER(recompute=1)  # type: ignore[arg-type]
