"""lrmoe.MoE layers spread over ranks beside DistributedDataParallel, against one process on all tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.world import run_world
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.parallel import ExpertParallel, global_metrics, is_expert, parallelize

STEPS = 20
TOKENS = 32


def make_model() -> nn.Module:
    torch.manual_seed(3)
    layers = [
        lrmoe.MoE(
            dim=8,
            expert_dim=16,
            num_experts=6,
            top_k=2,
            shared_expert_dim=8,
            selection_bias=True,
            balance_loss_weight=b,
        )
        for b in (0.0, 0.0)
    ]
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 4)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(TOKENS, 4, generator=generator, dtype=torch.float64),
            torch.randn(TOKENS, 4, generator=generator, dtype=torch.float64),
        )
        for _ in range(STEPS)
    ]


def train(model: nn.Module, recal: Any, mine: slice, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x_TD, y_TD in batches():
        loss = nn.functional.mse_loss(model(x_TD[mine]), y_TD[mine])
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        recal.step()
        losses.append(loss.item())
    return losses


def one_process(config: LRMoEConfig) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    model = make_model()
    recal = lrmoe.attach(model, config)
    losses = train(model, recal, slice(None), torch.optim.AdamW(model.parameters(), lr=1e-2))
    return losses, model.state_dict(), recal.metrics()


def one_rank(
    group: dist.ProcessGroup, config: LRMoEConfig, policy: str
) -> tuple[list[float], dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    ep = ExpertParallel(group, num_experts=6, policy=policy, slots=1, gradient_divisor=group.size())
    model = parallelize(make_model(), ep)
    wrapped = DistributedDataParallel(model)
    recal = lrmoe.attach(wrapped, config)
    share = TOKENS // group.size()
    mine = slice(group.rank() * share, (group.rank() + 1) * share)
    losses = train(wrapped, recal, mine, torch.optim.AdamW(wrapped.parameters(), lr=1e-2))
    metrics = global_metrics(recal, group)
    assert sum(is_expert(parameter) for parameter in model.parameters()) == 4
    return losses, model.state_dict(), metrics, ep.metrics()


@pytest.mark.parametrize("policy", ["fixed", "lrmoe"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_training_equals_one_process(ranks: int, policy: str, drop: float) -> None:
    config = LRMoEConfig(drop=drop)
    losses, weights, metrics = one_process(config)
    told = run_world(ranks, one_rank, config, policy)
    split = any(planned["replicas"] for *_, planned in told)
    # A split expert keeps other pairs; the loss is then of the same size and no more.
    tolerance = 1e-9 if drop == 0 or not split else 0.2
    mean = [sum(step) / ranks for step in zip(*(own for own, *_ in told), strict=True)]
    assert mean == pytest.approx(losses, rel=tolerance)
    for name, weight in weights.items():
        own = [state[name] for _, state, *_ in told]
        if ".experts." in name:
            if not split or drop == 0:
                torch.testing.assert_close(torch.cat(own), weight, rtol=1e-6, atol=1e-8)
        else:
            # Dense parameters, routers and their selection bias: the same on all ranks, bit for bit.
            assert all(torch.equal(own[0], other) for other in own), name
            if not split or drop == 0:
                torch.testing.assert_close(own[0], weight, rtol=1e-6, atol=1e-8)
    for _, _, merged, _ in told:
        for name, layer in merged["layers"].items():
            single = metrics["layers"][name.removeprefix("module.")]
            assert sum(layer["load"]) == STEPS * TOKENS * 2
            if not split or drop == 0:
                assert layer["load"] == single["load"]
                assert layer["kept"] == single["kept"]
            if drop and not split:
                assert layer["kept_importance_share"] == pytest.approx(single["kept_importance_share"], rel=1e-6)


def twice(group: dist.ProcessGroup) -> bool:
    first, second = (one_rank(group, LRMoEConfig(drop=0.3), "lrmoe") for _ in range(2))
    return first[0] == second[0] and all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@pytest.mark.slow
def test_the_same_run_twice_is_the_same_bit_for_bit() -> None:
    assert run_world(4, twice) == [True] * 4


def refusals(group: dist.ProcessGroup) -> list[str]:
    found = []
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    for ep, victim in (
        (ExpertParallel(group, num_experts=8), model),
        (ExpertParallel(group, num_experts=6), nn.Linear(2, 2)),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            parallelize(victim, ep)
        found.append(str(caught.value))
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    ep = ExpertParallel(group, num_experts=6)
    parallelize(model, ep)
    with pytest.raises(ValueError, match="parallelized already"):
        parallelize(model, ep)
    return found


def test_what_does_not_fit_is_refused() -> None:
    for wrong_count, no_layer in run_world(2, refusals):
        assert "has 6 experts, ep is for 8" in wrong_count
        assert "no lrmoe.MoE layer in Linear" in no_layer
