"""Experts that one rank uses and another does not, under DistributedDataParallel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distributed.world import run_world
from experts.problem import error
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.experts import custom_ops
from lrmoe.recalibration.quota import level

WORLD, EXPERTS, DIM, WIDTH, TOKENS, STEPS = 2, 4, 8, 12, 12, 3
# Small enough that three steps of a summed loss stay where rounding is rounding: at 0.1 the parameters reach 1e7.
RATE = 1e-3
FORMS = ("stacked", "per expert", "low rank", "no quota on one rank")


class Experts(nn.Module):
    """Routed experts with their weights in one of several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return 0.3 * torch.randn(*shape, generator=generator)

        self.router = nn.Parameter(draw(EXPERTS, DIM))
        gate_up, down = draw(EXPERTS, 2 * WIDTH, DIM), draw(EXPERTS, DIM, WIDTH)
        if form == "per expert":
            self.gate_up = nn.ParameterList([nn.Parameter(w) for w in gate_up])
            self.down = nn.ParameterList([nn.Parameter(w) for w in down])
        elif form == "low rank":
            self.register_buffer("gate_up", gate_up)
            self.register_buffer("down", down)
            self.a = nn.ParameterList([nn.Parameter(draw(2, DIM)) for _ in range(EXPERTS)])
            self.b = nn.ParameterList([nn.Parameter(draw(2 * WIDTH, 2)) for _ in range(EXPERTS)])
        else:
            self.gate_up, self.down = nn.Parameter(gate_up), nn.Parameter(down)
        self.config = LRMoEConfig(drop=0.8 if form == "no quota on one rank" else 0.5, router_grad="exact")

    def forward(self, x_TD: Tensor, ids_TK: Tensor, step: int) -> Tensor:
        gate_up, down = self.gate_up, self.down
        if self.form == "per expert":
            gate_up, down = torch.stack(list(gate_up)), torch.stack(list(down))
        elif self.form == "low rank":
            gate_up = gate_up + torch.stack([b @ a for a, b in zip(self.a, self.b, strict=True)])
        alpha_TK = (x_TD @ self.router.T).gather(1, ids_TK.clamp(min=0)).softmax(-1)
        # No quota of ours starves an expert with load; a plan of somebody's own may.
        starve = nullcontext() if self.form != "no quota on one rank" else patch.object(custom_ops, "quotas", starved)
        with starve:
            return lrmoe.routed_experts(x_TD, ids_TK, alpha_TK, gate_up, down, config=self.config, step=step)


def starved(_: str, load_E: Tensor, drop: float) -> Tensor:
    return level(load_E, torch.floor((1.0 - drop) * load_E.sum().to(torch.float64) + 0.5).to(torch.int64))


def data(form: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Rank 0 visits experts 0 and 1, rank 1 expert 2 alone; nobody expert 3. In the last form all are visited, on rank
    1 by so few pairs that a quota without a floor leaves only one of them."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x_TD = torch.randn(TOKENS, DIM, generator=generator)
    if form == "no quota on one rank":
        ids = [[0, 1], [2, 3]] * 6 if rank == 0 else [[0, 1], [2, 3]] + [[-1, -1]] * 10
    else:
        ids = [[0, 1]] * TOKENS if rank == 0 else [[2, 2]] * TOKENS
    return x_TD, torch.tensor(ids)


def train(group: dist.ProcessGroup, form: str) -> tuple[dict[str, Tensor], list[list[int]]]:
    """What one rank ends with, and its quotas step by step."""
    model = DistributedDataParallel(Experts(form), find_unused_parameters=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with lrmoe.recording() as calls:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(*data(form, group.rank(), step), step).square().sum().backward()
            optimizer.step()
    parameters = {name: p.detach() for name, p in model.module.named_parameters()}
    return parameters, [call.quota_E.tolist() for call in calls]


@pytest.mark.parametrize("form", FORMS)
def test_case_06_experts_unused_on_a_rank(form: str) -> None:
    """find_unused_parameters=False, three steps, rank 0 on experts 0 and 1, rank 1 on expert 2 alone: stacked weights,
    one parameter per expert, low-rank factors per expert, and experts whose quota is 0 on one rank only. Every
    parameter gets a gradient on every rank, so nothing waits; both ranks end with the weights of one process that
    averages the two gradients. (FSDP and ZeRO-3 add collectives, not other gradients.)"""
    (first, first_quotas), (second, second_quotas) = run_world(WORLD, train, form)
    model = Experts(form)
    before: dict[str, Any] = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            (model(*data(form, rank, step), step).square().sum() / WORLD).backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(first[name], second[name]), name
        assert error(first[name] - before[name], (parameter.detach() - before[name]).double()) < 1e-4, name
    if form == "no quota on one rank":
        assert all(min(quota) > 0 for quota in first_quotas)
        assert all(quota == [1, 0, 0, 0] for quota in second_quotas)
    else:
        assert all((quota[0] > 0, quota[2] > 0) == (True, False) for quota in first_quotas)
        assert all((quota[0] > 0, quota[2] > 0) == (False, True) for quota in second_quotas)
