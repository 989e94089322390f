"""Bytes and times of plans, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from lrmoe.balance import Plan, get
from lrmoe.balance.fixed import home_plan
from lrmoe.balance.ownership import Move
from lrmoe.balance.plan import build_plan, home_ranks
from lrmoe.balance.quotas import split_quotas
from lrmoe.evenness import max_over_mean
from lrmoe.studies.costs import (
    Transfer,
    all_reduce,
    broadcast,
    from_home,
    moves,
    reduce,
    relayed,
    to_home,
    token_transfers,
)
from lrmoe.studies.expert import Expert
from lrmoe.studies.systems import SYSTEMS, Peaks, Sizes

# P = 24 parameters: W = 48, Gr = 96, O = 288 bytes; a row takes 48 operations forward.
EXPERT = Expert(dim=4, expert_dim=2, flops=48.0, bandwidth=10.0)
W, GR, OPT = 48, 96, 288
SIZES = Sizes(experts=4, ranks=2, layers=3, expert=EXPERT)
HOSTS = ((0, 1), (0,), (1, 0), (1,))


def sent_and_received(transfer: Transfer) -> tuple[list[float], list[float]]:
    return transfer.sent_G.tolist(), transfer.received_G.tolist()


def plan_of(lam_GE: torch.Tensor, exports: list[tuple[int, int, int]], quota_E: list[int] | None = None) -> Plan:
    hosts, rows_EG = build_plan(lam_GE, home_ranks(lam_GE.shape[1], len(lam_GE)), exports)
    quota = lam_GE.sum(0) if quota_E is None else torch.tensor(quota_E)
    return Plan(hosts, rows_EG, split_quotas(quota, rows_EG, hosts), lam_GE)


LAM = torch.tensor([[6, 1, 1, 0], [4, 1, 1, 2]])


def test_sizes_of_an_expert() -> None:
    assert (EXPERT.parameters, EXPERT.weights, EXPERT.gradients, EXPERT.optimizer) == (24, W, GR, OPT)
    assert EXPERT.row_seconds == 1.0


def test_transfers_between_hosts() -> None:
    three = ((0, 1, 2), (1,), (2, 0))
    assert sent_and_received(from_home(three, 3, 10, "weights")) == ([20, 0, 10], [10, 10, 10])
    assert sent_and_received(to_home(three, 3, 10, "gradients")) == ([10, 10, 10], [20, 0, 10])
    # Along a chain the home sends once, however many follow.
    assert sent_and_received(broadcast(three, 3, 10, "weights")) == ([10, 10, 10], [10, 10, 10])
    assert sent_and_received(reduce(three, 3, 10, "weights")) == ([10, 10, 10], [10, 10, 10])
    # 2 (3 - 1) / 3 and 2 (2 - 1) / 2 of 12 bytes.
    assert sent_and_received(all_reduce(three, 3, 12, "gradients")) == ([28, 16, 28], [28, 16, 28])
    # Nine copies: three relays that pass two each on; of four, two that pass one each on; three go directly.
    for copies, sent in ((9, [3, 2, 2, 2]), (4, [2, 1, 1]), (3, [3])):
        relays = relayed([range(copies + 1)], 10, 1, "weights")
        assert sent_and_received(relays) == (sent + [0] * (10 - len(sent)), [0] + [1] * copies + [0] * (9 - copies))
    moved = [Move(0, 0, 0, 0, 1, 0), Move(0, 1, 1, 0, 1, 1), Move(1, 2, 0, 1, 2, 0)]
    assert sent_and_received(moves(moved, 3, 7, "optimizer")) == ([14, 0, 0], [0, 7, 7])
    assert moves(moved, 3, 7, "optimizer").seconds(7.0) == 2.0


def test_rows_travel_twice_forward_and_the_kept_ones_twice_backward() -> None:
    home = home_plan(LAM, LAM.sum(0))
    forward, backward = token_transfers(home, EXPERT)
    # Rank 0 sends one pair away (expert 2), rank 1 sends five; a row has 8 bytes.
    assert [sent_and_received(transfer) for transfer in forward] == [([8, 40], [40, 8]), ([40, 8], [8, 40])]
    assert [sent_and_received(transfer) for transfer in backward] == [([8, 40], [40, 8]), ([40, 8], [8, 40])]
    assert {transfer.kind for transfer in (*forward, *backward)} == {"tokens"}
    half = home_plan(LAM, torch.tensor([5, 1, 1, 1]))
    forward, (scores, out, back) = token_transfers(half, EXPERT)
    assert sent_and_received(scores) == ([5, 25], [25, 5])
    assert sent_and_received(out) == ([4, 20], [20, 4])
    assert sent_and_received(back) == ([20, 4], [4, 20])
    # A replica that serves its own rank's pairs saves their way.
    assert token_transfers(plan_of(LAM, [(0, 1, 4)]), EXPERT)[0][0].total == 8 * 2


def test_max_over_mean() -> None:
    assert max_over_mean([3, 1]) == 1.5
    assert max_over_mean([2, 2, 2]) == max_over_mean([5]) == 1.0
    assert max_over_mean([0, 0]) is None


@pytest.mark.parametrize(
    ("name", "forward", "backward", "step"),
    [
        ("fixed", {}, {}, {}),
        # Two replicas: W, W and Gr each, around the layer.
        ("ultraep", {"weights": 2 * W}, {"weights": 2 * W, "gradients": 2 * GR}, {}),
        ("lrmoe", {"weights": 2 * W}, {"weights": 2 * W, "gradients": 2 * GR}, {}),
        # Two experts on both ranks: all-reduce 2 (2 - 1) / 2 Gr out of each of two ranks; the other two are fetched by
        # the rank that lacks them, half an expert each. Half of each of 2 x 3 slots comes from the other rank.
        ("symi", {}, {}, {"weights": 6 * W / 2, "gradients": 2 * 2 * GR + 2 * GR / 2}),
        ("laer", {"weights": 6 * W / 2}, {"weights": 6 * W / 2, "gradients": 6 * GR / 2}, {}),
        ("flexmoe", {}, {}, {"gradients": 2 * 2 * GR, "weights": W, "optimizer": OPT}),
        ("smartmoe", {}, {}, {"weights": W, "optimizer": OPT}),
        ("fastermoe", {"weights": 2 * W}, {"gradients": 2 * GR}, {}),
        ("eplb", {}, {}, {"weights": 2 * W, "gradients": 2 * GR}),
    ],
)
def test_what_each_system_sends(
    name: str, forward: dict[str, float], backward: dict[str, float], step: dict[str, float]
) -> None:
    policy = get(name, slots=3) if name in ("symi", "laer", "flexmoe") else get(name)
    plan = Plan(HOSTS, LAM.sum(0).unsqueeze(1) * torch.tensor([1, 0]), LAM.sum(0).unsqueeze(1) * 0, LAM)
    system = SYSTEMS[name](SIZES, policy)
    moved = [Move(0, 1, 0, 1, 1, 1), Move(0, 2, 0, 0, 0, 1)]  # One to another rank, one within its own.
    for transfers, expected in (
        (system.forward(plan), forward),
        (system.backward(plan), backward),
        (system.step({0: plan}, moved), step),
    ):
        found: dict[str, float] = {}
        for transfer in transfers:
            assert transfer.sent_G.sum() == pytest.approx(transfer.received_G.sum())
            found[transfer.kind] = found.get(transfer.kind, 0.0) + transfer.total
        assert {kind: total for kind, total in found.items() if total} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "weights", "gradients", "optimizer"),
    [
        ("fixed", 6, 6, 6),
        # One slot for all layers.
        ("ultraep", 7, 7, 6),
        ("lrmoe", 7, 7, 6),
        # Three slots in each of three layers, half of four experts' state in each.
        ("symi", 9, 9, 6),
        # Half of everything; three slots, twice for the weights.
        ("laer", 12, 9, 6),
        # Three slots with their state, and one that is on its way.
        ("flexmoe", 10, 9, 10),
        ("smartmoe", 7, 6, 7),
        # Five shadows at once, at most two in one layer.
        ("fastermoe", 11, 8, 6),
        # Three copies (two of its own share, one redundant) in each layer, beside its own experts.
        ("eplb", 15, 15, 6),
    ],
)
def test_what_each_system_holds(name: str, weights: float, gradients: float, optimizer: float) -> None:
    policy = get(name, slots=3) if name in ("symi", "laer", "flexmoe") else get(name)
    policy.prepare(4, 2)  # type: ignore[attr-defined]
    held = SYSTEMS[name](SIZES, policy).memory(Peaks(replicas=5, layer_replicas=2, incoming=1))
    assert (held.weights / W, held.gradients / GR, held.optimizer / OPT) == (weights, gradients, optimizer)
    assert held.total == held.weights + held.gradients + held.optimizer
