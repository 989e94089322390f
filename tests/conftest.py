"""One thread and one seed for every test, so that a result repeats bit for bit."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch's generator before each test; tests that need another seed derive it from this one."""
    torch.manual_seed(0)
    return 0
