"""A tiny training run over ranks: two MoE layers with hot experts and their replicas, recalibration, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.parallel import ExpertParallel, is_expert, parallelize
from lrmoe.parallel.checkpoint import load, newest, save
from lrmoe.parallel.collectives import all_reduce
from lrmoe.parallel.gradients import clip_grad_norm_
from lrmoe.parallel.phase_timer import PhaseTimer

DIM, WIDTH, EXPERTS, TOKENS = 6, 4, 5, 16


class TinyRun:
    """Everything that a checkpoint has to bring back."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        policy: str = "ultraep",
        drop: float = 0.4,
        timeout_s: float | None = None,
        clock: PhaseTimer | None = None,
    ) -> None:
        torch.manual_seed(0)
        config = LRMoEConfig(drop=drop, seed=3, warmup_steps=1, ramp_steps=2)
        layers = [lrmoe.MoE(dim=DIM, expert_dim=WIDTH, num_experts=EXPERTS, top_k=2, config=config) for _ in range(2)]
        self.model = nn.Sequential(nn.Linear(DIM, DIM), *layers)
        options = {"floor": 1} if policy == "ultraep" else {}
        chosen = lrmoe.balance.get(policy, slots=1, **options)
        self.ep = ExpertParallel(
            group, num_experts=EXPERTS, policy=chosen, config=config, timeout_s=timeout_s, clock=clock
        )
        parallelize(self.model, self.ep)
        self.recal = lrmoe.attach(self.model, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.step = 0
        self.group = group
        self.timeout_s = timeout_s

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "recalibrator": self.recal,
            "policy": self.ep.policy,
            "group": self.group,
        }

    def backward(self) -> float:
        """One forward and backward, dense gradients summed; the loss of all ranks."""
        generator = torch.Generator().manual_seed(100 * self.step + self.group.rank())
        # Tokens that are much alike: some experts get most of them.
        x_TD = torch.randn(TOKENS, DIM, generator=generator) + 2.0
        loss = self.model(x_TD).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            if not is_expert(parameter):
                assert parameter.grad is not None
                all_reduce(parameter.grad, self.group, what="dense gradients", timeout_s=self.timeout_s)
        return float(all_reduce(loss.detach().double(), self.group, what="loss", timeout_s=self.timeout_s))

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(self.backward())
            clip_grad_norm_(self.model, 1.0, group=self.group, timeout_s=self.timeout_s)
            self.optimizer.step()
            self.recal.step()
            self.ep.step()
            self.step += 1
        return losses

    def train_to(self, last: int, folder: str, every: int, report: Callable[[int, float], None]) -> None:
        """Goes on from the newest checkpoint of ``folder``, and saves one after each ``every`` steps."""
        found = newest(folder)
        if found is not None:
            self.step = load(found, timeout_s=self.timeout_s, **self.state()).step
        while self.step < last:
            (loss,) = self.train(1)
            report(self.step, loss)
            if self.step % every == 0:
                save(folder, step=self.step, timeout_s=self.timeout_s, **self.state())


def start_group(rank: int, size: int, port: int, timeout_s: float) -> dist.ProcessGroup:
    """A default group as torchrun would make it on one machine, the store in rank 0's process."""
    from datetime import timedelta

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    group = dist.group.WORLD
    assert group is not None
    return group
