"""One thread and one seed for every test, so that a result repeats bit for bit; other arithmetic where asked for."""

from __future__ import annotations

import hypothesis
import pytest
import rounding
import torch

from lrmoe.experts import custom_ops
from lrmoe.recalibration.quota import level

# The same examples each time, however long they take, so that what passed here passes there;
# `--hypothesis-profile=default` looks for others.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("arithmetic", "how the machine computes (`make test-portable`)")
    group.addoption("--threads", type=int, default=1, help="threads of torch, in the tests' own ranks too")
    group.addoption("--round-by-shape", action="store_true", help="products round by their shape: tests/rounding.py")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(config.getoption("--threads"))
    if config.getoption("--round-by-shape"):
        rounding.by_shape()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch's generator before each test; tests that need another seed derive it from this one."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def starving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotas add up to the rounded share and no more, though experts with load then keep nothing: no quota of ours does
    that, but a plan of somebody's own may, and the backward has to bear it."""

    def starved(_: str, load_E: torch.Tensor, drop: float) -> torch.Tensor:
        target = torch.floor((1.0 - drop) * load_E.sum().to(torch.float64) + 0.5).to(torch.int64)
        return level(load_E, target)

    monkeypatch.setattr(custom_ops, "quotas", starved)
