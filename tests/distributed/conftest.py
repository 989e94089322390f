"""Ends the processes of the pool with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import world


@pytest.fixture(scope="session", autouse=True)
def pool() -> Iterator[None]:
    yield
    world.close()
