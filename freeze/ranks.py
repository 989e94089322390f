"""Training over 2 and 3 processes of one machine, through what users call.

T tokens of a rank, D model width, F expert width, E experts, K choices.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import lrmoe
from freeze import records
from freeze.one_rank import told, without_times
from lrmoe import LRMoEConfig
from lrmoe.balance import get
from lrmoe.parallel import ExpertParallel, clip_grad_norm_, global_metrics, parallelize

T, D, F, E, K = 24, 16, 24, 6, 2
POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "ultraep": {"slots": 2},
    "lrmoe": {"slots": 2},
    "symi": {"slots": 3},
    "laer": {"slots": 3},
    "flexmoe": {"slots": 3, "threshold": 1.05, "sync_cost": 0.0},
    "smartmoe": {"interval": 1},
    "fastermoe": {"dim": D, "ratio": 2.0, "flops": 1e12, "bandwidth": 1e12},
    "eplb": {"slots": 3},
}
CASES: list[dict[str, Any]] = [
    *({"policy": p, "storage": s, "drop": d} for p in POLICIES for s in ("policy", "home") for d in (0.0, 0.3)),
    *({"policy": p, "selector": s, "save": v, "router_grad": r, "drop": 0.3} for p in ("fixed", "ultraep", "lrmoe")
      for s in ("topq", "pps") for v in ("preactivation", "input") for r in ("exact", "sum_rule", "kept")),
    *({"policy": "lrmoe", "selector": "auto", "quota": q, "remainder": r, "drop": 0.4}
      for q in ("expert", "level", "pooled") for r in ("none", "mean")),
    *({"policy": "lrmoe", "metric": m, "drop": 0.4} for m in ("grad_norm", "forward", "random")),
    {"policy": "ultraep", "drop": 0.5, "error_budget": 0.1},
]  # fmt: skip


def save(folder: Path) -> None:
    """All cases of a world in one start of its processes; those that the folder has are passed over."""
    for ranks in (2, 3):
        mine = [case for case in CASES if not (folder / f"{_name(ranks, case)}.pt").exists()]
        if mine:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            spawn(_rank, args=(ranks, port, mine, folder), nprocs=ranks)  # type: ignore[no-untyped-call]


def _name(ranks: int, case: dict[str, Any]) -> str:
    return "_".join([str(ranks), *(str(value) for value in case.values())])


def _rank(rank: int, ranks: int, port: int, cases: list[dict[str, Any]], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks)
    # The first messages of a process are shorter than the later ones, whichever case is the first to be recorded.
    _train(rank, ranks, {"policy": "fixed", "drop": 0.0})
    for case in cases:
        told_of_ranks: list[Any] = [None] * ranks
        dist.all_gather_object(told_of_ranks, _train(rank, ranks, dict(case)))
        if rank == 0:
            records.write(folder, _name(ranks, case), lambda: told_of_ranks)  # noqa: B023
    dist.destroy_process_group()


def _train(rank: int, ranks: int, case: dict[str, Any]) -> Any:
    """Three steps of two layers in two microbatches, most tokens on experts that move from step to step; rank 1 has
    fewer tokens than the others, and none in the last microbatch."""
    policy, storage = case.pop("policy"), case.pop("storage", "policy")
    torch.manual_seed(4)
    layers = [lrmoe.MoE(dim=D, expert_dim=F, num_experts=E, top_k=K, bias=bool(index)) for index in range(2)]
    model: nn.Module = nn.Sequential(nn.Linear(D, D), *layers)
    hot = [0]
    for layer in layers:
        layer.router.register_forward_hook(lambda module, given, routing: _reroute(routing, hot[0]))
    ep = ExpertParallel(
        num_experts=E, policy=get(policy, **POLICIES[policy]), storage=storage, gradient_divisor=ranks
    )  # fmt: skip
    parallelize(model, ep)
    recal = lrmoe.attach(model, LRMoEConfig(guard_variance=None, **case))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps: list[Any] = []
    for step in range(3):
        hot[0] = step
        optimizer.zero_grad()
        losses = []
        with lrmoe.recording() as calls:
            for microbatch in range(2):
                tokens = T if rank != 1 else 0 if (step, microbatch) == (2, 1) else T // 2
                generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
                x_TD = torch.randn(tokens, D, generator=generator)
                loss = (wrapped(x_TD) - x_TD).square().sum() / T
                loss.backward()
                losses.append(loss.detach())
        grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        norm = clip_grad_norm_(model, 1.0)
        record = {"losses": losses, "grads": grads, "norm": norm, "global": without_times(global_metrics(recal))}
        optimizer.step()
        recal.step()
        ep.step(optimizer)
        record |= {"engine": without_times(ep.metrics()), "calls": [told(call) for call in calls]}
        steps.append(record)
    return {"steps": steps, "parameters": {name: weight.detach().clone() for name, weight in model.named_parameters()}}


def _reroute(routing: lrmoe.Routing, step: int) -> lrmoe.Routing:
    ids_TK = routing.topk_ids_TK
    hot_K = torch.tensor([2 * step % E, (2 * step + 1) % E], device=ids_TK.device)
    is_hot_T1 = ids_TK.sum(1, keepdim=True) % 3 > 0
    return routing._replace(topk_ids_TK=torch.where(is_hot_T1, hot_K, ids_TK))
