"""What can be told of loads, and of what is planned for them, before they are read, which needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from lrmoe.config import Quota, require_count, require_number
from lrmoe.problems import Problems


def check_one_source(**sources: Any) -> None:
    """Raises ValueError if more than one of the sources, by field, is not None."""
    given = [f"{name}={value!r}" for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: each says what the loads are; give one")


def check_files(*, loads: str | None = None, trace: str | None = None) -> None:
    """Raises ValueError if there is nothing where the loads are said to be."""
    if loads is not None and not Path(loads).exists():
        raise ValueError(f"loads={loads!r} is missing; give a JSON file with loads, e.g. [[3, 1], [2, 2]]")
    if trace is not None and not Path(trace).exists():
        raise ValueError(
            f"trace={trace!r} is missing; give what lrmoe train --trace wrote: a run folder, its trace/ or a part"
        )


def check_planning(*, drop: float, quota: str, slots: int, capacity: float | None, floor: int) -> None:
    """Checks what the policies are told.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """
    problems = Problems()
    with problems:
        if not 0.0 <= require_number("drop", drop) < 1.0:
            raise ValueError(f"drop={drop!r} must be in [0, 1): the fraction of pairs the backward may leave out")
    with problems:
        if quota not in get_args(Quota):
            raise ValueError(f"quota={quota!r} is not known; choose one of {', '.join(get_args(Quota))}")
    with problems:
        require_count("slots", slots)
    with problems:
        if capacity is not None and not require_number("capacity", capacity) > 0:
            raise ValueError(f"capacity={capacity!r} must be a positive number")
    with problems:
        require_count("floor", floor, least=1)
    problems.tell()


def check_sizes(**sizes: int | None) -> None:
    """Checks counts that may be left to defaults.

    Args:
        sizes: ``tokens`` and ``seed``, which may be 0, and others, which may not; None for what is not given.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """
    problems = Problems()
    for name, size in sizes.items():
        with problems:
            if size is not None:
                require_count(name, size, least=0 if name in ("tokens", "seed") else 1)
    problems.tell()
