"""Faults that only several ranks can show: what goes wrong is told as what it is, on every rank, and nobody hangs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from distributed.world import run_world
from torch import Tensor

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.parallel import ExpertParallel, clip_grad_norm_, global_metrics, parallelize


def engine_step(group: dist.ProcessGroup, default: AbstractContextManager[Any]) -> list[Any]:
    """The engine of each kind through two steps, with what is asked of it around them."""
    told: list[Any] = []
    policies: list[tuple[Any, dict[str, Any]]] = [
        *((name, {}) for name in ("lrmoe", "ultraep", "symi", "laer", "eplb")),
        ("eplb", {"storage": "home"}),
    ]
    for policy, options in policies:
        config = LRMoEConfig(drop=0.4, remainder="mean")
        torch.manual_seed(0)
        model = lrmoe.MoE(dim=8, expert_dim=6, num_experts=4, top_k=2, selection_bias=True)
        x_TD = torch.randn(20 + group.rank(), 8) + 1.0
        mask_T = torch.arange(20 + group.rank()) < 18
        with default:
            ep = ExpertParallel(group, num_experts=4, policy=policy, config=config, gradient_divisor=2, **options)
            parallelize(model, ep)
            recal = lrmoe.attach(model, config)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
            for _ in range(2):
                optimizer.zero_grad()
                model(x_TD, mask_T).square().mean().backward()
                for parameter in model.router.parameters():
                    parameter.grad = ep.add_up(parameter.grad, what="router")
                norm = clip_grad_norm_(model, 1.0, group=group)
                optimizer.step()
                recal.step()
                ep.step(optimizer)
            metrics = global_metrics(recal, group)
            ep.load_state_dict(ep.state_dict())
            balance = ep.metrics()
        told.append([float(norm), metrics["kept_share"], balance, *(p.detach() for p in model.parameters())])
    return told


def engine_in_both(group: dist.ProcessGroup) -> None:
    wanted = engine_step(group, nullcontext())
    found = engine_step(group, torch.device("meta"))
    for before, after in zip(wanted, found, strict=True):
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_l5_the_engine_over_ranks() -> None:
    run_world(2, engine_in_both)
