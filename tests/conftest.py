"""One thread and one seed for every test, so that a result repeats bit for bit; other arithmetic where asked for."""

from __future__ import annotations

import pytest
import rounding
import torch


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
