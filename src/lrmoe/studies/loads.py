"""Loads to plan for: those of a file, and synthetic ones, see :mod:`lrmoe.balance.workloads`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrmoe.balance.policy import require_loads
from lrmoe.balance.workloads import check_sizes, shaped_loads, skew_of, skewed_loads
from lrmoe.config import require_count

__all__ = ["check_sizes", "mean", "read_loads", "scaled_loads", "shaped_loads", "skew_of", "skewed_loads"]


def scaled_loads(lam_GE: Tensor, tokens: int, top_k: int) -> Tensor:
    """Loads in the same proportions for a mean of ``tokens`` tokens a rank. Rounded, each source's sum exactly."""
    factor = tokens * top_k * lam_GE.shape[0] / max(int(lam_GE.sum()), 1)
    upto_GE = (lam_GE.to(torch.float64).cumsum(1) * factor + 0.5).floor().to(torch.int64)
    return upto_GE.diff(dim=1, prepend=torch.zeros(len(lam_GE), 1, dtype=torch.int64, device="cpu"))


def read_loads(path: Path, num_ranks: int | None) -> list[Tensor]:
    """The loads in a JSON file: one matrix (ranks, experts), several, or a vector of the experts' loads.

    A vector is shared out evenly over ``num_ranks`` sources.

    Raises:
        ValueError: if the file cannot be read, its lists are ragged or hold anything but counts, or ``num_ranks``
            is missing for a vector or contradicts a matrix.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give a JSON file with loads, e.g. [[3, 1], [2, 2]]") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    try:
        depth = _depth(value)
        if depth == 1:
            if num_ranks is None:
                raise ValueError("it holds one load an expert; say over how many ranks they are, e.g. ranks=8")
            if not all(load >= 0 for load in value):
                raise ValueError(f"load {min(value)} is negative")
            require_count("ranks", num_ranks, least=1)
            value = [[(load + s) // num_ranks for load in value] for s in range(num_ranks)]
        matrices = [
            torch.tensor(matrix, dtype=torch.int64, device="cpu") for matrix in (value if depth == 3 else [value])
        ]
        for matrix in matrices:
            require_loads(matrix)
            if matrix.shape != matrices[0].shape:
                raise ValueError(f"matrices differ in shape: {tuple(matrices[0].shape)} and {tuple(matrix.shape)}")
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if num_ranks is not None and num_ranks != len(matrices[0]):
        raise ValueError(f"{path} holds loads of {len(matrices[0])} ranks, but ranks={num_ranks}; leave out ranks")
    return matrices


def _depth(value: Any) -> int:
    """1 for a vector of counts, 2 for a matrix, 3 for several; ValueError for anything else."""
    if not isinstance(value, list) or not value:
        raise ValueError("it must hold lists of counts, e.g. [[3, 1], [2, 2]]")
    if isinstance(value[0], list):
        depths = {_depth(part) for part in value}
        if len(depths) > 1 or len({len(part) for part in value}) > 1:
            raise ValueError("its lists differ in length or depth")
        depth = depths.pop() + 1
        if depth > 3:
            raise ValueError("its lists are nested deeper than several matrices")
        return depth
    for entry in value:
        if type(entry) is not int or not -(2**53) < entry < 2**53:
            raise ValueError(f"entry {entry!r} is not a count of pairs")
    return 1


def mean(values: list[float]) -> float:
    """The mean of finite values; NaN of none."""
    return math.fsum(values) / len(values) if values else math.nan
