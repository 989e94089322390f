"""Experts that one rank uses and another does not, under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from cases import ddp_worker
from cases.ddp_worker import FORMS, STEPS, Experts, data, run_rank
from experts.problem import error

WORLD = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two gloo ranks ended with; a rank that waits for another in vain fails after two minutes."""
    folder: Path = tmp_path_factory.mktemp("ddp")
    mp.start_processes(run_rank, args=(WORLD, str(folder)), nprocs=WORLD, start_method="spawn")  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("form", FORMS)
def test_case_06_experts_unused_on_a_rank(ranks: list[dict[str, Any]], form: str) -> None:
    """find_unused_parameters=False, three steps, rank 0 on experts 0 and 1, rank 1 on expert 2 alone: stacked weights,
    one parameter per expert, low-rank factors per expert, and experts whose quota is 0 on one rank only. Every
    parameter gets a gradient on every rank, so nothing waits; both ranks end with the weights of one process that
    averages the two gradients. (FSDP and ZeRO-3 add collectives, not other gradients.)"""
    first, second = (rank[form] for rank in ranks)
    model = Experts(form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            (model(*data(form, rank, step), step).square().sum() / WORLD).backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(first["parameters"][name], second["parameters"][name]), name
        assert error(first["parameters"][name], parameter.detach().double()) < 1e-5, name
    if form == "no quota on one rank":
        assert all(min(quota) > 0 for quota in first["quotas"])
        assert all(quota == [1, 0, 0, 0] for quota in second["quotas"])
    else:
        assert all((quota[0] > 0, quota[2] > 0) == (True, False) for quota in first["quotas"])
        assert all((quota[0] > 0, quota[2] > 0) == (False, True) for quota in second["quotas"])
    assert ddp_worker.EXPERTS == 4
