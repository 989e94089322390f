"""Experts that are spread over ranks and, in their data-parallel group, sharded by FSDP2; the rest under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.test_parallelize import TOKENS, make_model, one_process, train
from distributed.world import run_world
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.parallel import ExpertParallel, mark_experts, parallelize


def one_rank(
    group: dist.ProcessGroup, config: LRMoEConfig, reshard: bool
) -> tuple[list[float], dict[str, Tensor], dict[str, tuple[int, ...]]]:
    # Ranks 0 1 | 2 3 each hold all experts; ranks 0 2 and 1 3 hold the same ones.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    # FSDP averages over the two ranks with the same experts; the two of a group are summed.
    ep = ExpertParallel(mesh.get_group("ep"), num_experts=6, policy="lrmoe", gradient_divisor=2)
    model = parallelize(make_model(), ep)
    for layer in model:
        if isinstance(layer, lrmoe.MoE):
            fully_shard(layer.experts, mesh=mesh["edp"], reshard_after_forward=reshard)
            mark_experts(*layer.experts.parameters())
    wrapped = DistributedDataParallel(model)
    recal = lrmoe.attach(wrapped, config, load_group=mesh.get_group("edp"))
    share = TOKENS // group.size()
    mine = slice(group.rank() * share, (group.rank() + 1) * share)
    # FSDP's parameters and plain ones do not mix in the fused forms of an optimizer.
    losses = train(wrapped, recal, mine, torch.optim.AdamW(wrapped.parameters(), lr=1e-2, foreach=False))
    shapes: dict[str, tuple[int, ...]] = {}
    state: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            shapes[name] = tuple(value.to_local().shape)
            value = value.full_tensor()
        state[name] = value
    return losses, state, shapes


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_over_the_experts_data_parallel_group(reshard: bool) -> None:
    losses, weights, _ = one_process(LRMoEConfig(drop=0.0))
    told = run_world(4, one_rank, LRMoEConfig(drop=0.0), reshard)
    mean = [sum(step) / 4 for step in zip(*(own for own, *_ in told), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-9)
    for name, weight in weights.items():
        own = [state[name] for _, state, _ in told]
        if ".experts." in name:
            assert told[0][2][name][0] == 2, "three experts a rank, sharded over two"
            torch.testing.assert_close(torch.cat(own[:2]), weight, rtol=1e-6, atol=1e-8)
            assert torch.equal(own[0], own[2])
        else:
            assert all(torch.equal(own[0], other) for other in own), name
            torch.testing.assert_close(own[0], weight, rtol=1e-6, atol=1e-8)
