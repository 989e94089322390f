"""One thread and one seed for every test, and the helpers of the package's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HELPERS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(HELPERS), str(HELPERS / "report")]


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch's generator before each test."""
    torch.manual_seed(0)
    return 0
