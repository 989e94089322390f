"""Load metrics over mixed parallel dimensions, and FSDP2 over experts that are fewer than its shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.plans import RandomPlans
from distributed.world import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.parallel import ExpertParallel, global_metrics, mark_experts, parallelize

STEPS = 3


def model_of(num_experts: int, layers: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    moe = [lrmoe.MoE(dim=8, expert_dim=12, num_experts=num_experts, top_k=2) for _ in range(layers)]
    return nn.Sequential(*moe).double()


def tokens(share: int, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(share, 8, generator=generator, dtype=torch.float64)


def count(group: dist.ProcessGroup, ep_size: int, shares: list[int], drop: float, policy: Any) -> Any:
    """Trains three steps; the layers' loads on this rank, those of all ranks, and what the engine planned."""
    mesh = init_device_mesh("cpu", (group.size() // ep_size, ep_size), mesh_dim_names=("copies", "ep"))
    engine = ExpertParallel(mesh.get_group("ep"), num_experts=6, policy=policy)
    model = parallelize(model_of(6, layers=3), engine)
    recal = lrmoe.attach(model, LRMoEConfig(drop=drop))
    share = shares[group.rank()]
    for step in range(STEPS):
        mask_T = torch.arange(share) % 4 != 3 if step == 1 else None
        # The last layer is on no way from input to output: it counts nothing.
        h_TD = tokens(share, group.rank(), step)
        for layer in model[:2]:
            h_TD = h_TD + layer(h_TD, token_mask=mask_T)
        h_TD.square().sum().backward()
        recal.step()
    own = recal.metrics(reset=False)["layers"]
    return own, global_metrics(recal, group), engine.metrics()


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize(("ep_size", "shares"), [(2, [11, 5]), (1, [11, 5]), (2, [9, 0, 4, 8]), (4, [9, 0, 4, 8])])
def test_case_58_loads_of_all_ranks_add_up_to_every_pair_exactly(ep_size: int, shares: list[int], drop: float) -> None:
    """A rank's partial counts, taken for everybody's, or everybody's added up once for each rank, make load metrics
    and balancing wrong by a factor that depends on the parallel layout."""
    pairs = sum(2 * (share * (STEPS - 1) + share - share // 4) for share in shares)
    for policy in ("fixed", RandomPlans(2)):
        told = run_world(len(shares), count, ep_size, shares, drop, policy)
        computed = [sum(sum(layer["load"]) for layer in own.values()) for own, *_ in told]
        for rank, (_, everybody, planned) in enumerate(told):
            assert everybody == told[0][1]
            assert len(everybody["layers"]) == 2, "a layer that did not run reports nothing"
            for layer in everybody["layers"].values():
                assert sum(layer["load"]) == pairs
                assert sum(layer["kept"]) <= pairs
            # Every rank of a group knows what was routed in it: what its ranks have computed together.
            first = rank - rank % ep_size
            assert planned["plans"] == 2 * STEPS
            assert round(planned["rows"] * planned["plans"]) == sum(computed[first : first + ep_size])
        for name in told[0][1]["layers"]:
            summed = [sum(counts) for counts in zip(*(own[name]["load"] for own, *_ in told), strict=True)]
            assert summed == told[0][1]["layers"][name]["load"]
        if drop == 0:
            assert all(layer["kept"] == layer["load"] for layer in told[0][1]["layers"].values())


def one_process(num_experts: int, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    model = model_of(num_experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.0))
    for step in range(STEPS):
        x_TD = torch.cat([tokens(8, rank, step) for rank in range(ranks)])
        loss = model(x_TD).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recal.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def shard_few(group: dist.ProcessGroup, num_experts: int, ep_size: int) -> Any:
    """FSDP2 over everything: over the ranks with the same experts for these, over all ranks for the rest."""
    mesh = init_device_mesh("cpu", (group.size() // ep_size, ep_size), mesh_dim_names=("copies", "ep"))
    whole = init_device_mesh("cpu", (group.size(),))
    model = model_of(num_experts)
    if ep_size > 1:
        parallelize(model, ExpertParallel(mesh.get_group("ep"), num_experts=num_experts, gradient_divisor=ep_size))
    for layer in model:
        fully_shard(layer.experts, mesh=mesh["copies"])
        mark_experts(*layer.experts.parameters())
        fully_shard(layer, mesh=whole)
    fully_shard(model, mesh=whole)
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.0))
    shards = [tuple(p.to_local().shape) for p in model[0].experts.parameters() if isinstance(p, DTensor)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(STEPS):
        loss = model(tokens(8, group.rank(), step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recal.step()
        losses.append(loss.item())
    own = recal.metrics(reset=False)
    assert all(type(value) is int for layer in own["layers"].values() for value in layer["load"])
    assert not any(isinstance(value, DTensor) for value in vars(model[0].control).values())
    everybody = global_metrics(recal, group)
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
    return losses, copy.deepcopy(state), shards, everybody


@pytest.mark.parametrize("ep_size", [1, 2])
def test_case_65_fsdp_shards_fewer_experts_than_it_has_ranks(ep_size: int) -> None:
    """FSDP2 cuts stacked experts along the first dimension, here two of them into four pieces, or one into two: some
    ranks hold none. Counters that become DTensors, and hooks that miss the unsharded weights, break there."""
    losses, weights = one_process(2, 4)
    told = run_world(4, shard_few, 2, ep_size, timeout=60)
    assert [shards[0][0] for _, _, shards, _ in told] == [1, 1, 0, 0]
    mean = [sum(step) / 4 for step in zip(*(own for own, *_ in told), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-9)
    for name, weight in weights.items():
        found = [state[name] for _, state, *_ in told]
        if ".experts." in name and ep_size > 1:
            assert torch.equal(found[0], found[2])
            torch.testing.assert_close(torch.cat(found[:2]), weight, rtol=1e-9, atol=1e-12)
        else:
            assert all(torch.equal(found[0], other) for other in found)
            torch.testing.assert_close(found[0], weight, rtol=1e-9, atol=1e-12)
    for _, _, _, everybody in told:
        assert all(sum(layer["load"]) == STEPS * 4 * 8 * 2 for layer in everybody["layers"].values())
