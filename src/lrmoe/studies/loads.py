"""Loads to plan for: synthetic ones of a given skew or shape, and those of a file.

``lam_GE`` counts the pairs that source rank s routes to expert e. Synthetic loads are such as a top-k router makes: a
token chooses ``top_k`` different experts, so that no expert gets more pairs of a rank than that rank has tokens.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrmoe.balance.plan import home_ranks
from lrmoe.balance.policy import require_loads
from lrmoe.config import require_count, require_number

SHAPES = ("balanced", "hot_experts", "hot_rank", "spread", "ragged", "empty", "rotating", "burst")


def skewed_loads(
    skew: float, *, num_experts: int = 128, num_ranks: int = 8, tokens: int = 4096, top_k: int = 8, seed: int = 0
) -> Tensor:
    """int64 (G, E) in which the busiest rank has ``skew`` times the mean, to a per cent.

    The popularity of an expert is log-normal, with a part that its whole rank shares; the sources differ by a tenth of
    that. A power of it is taken that gives the skew; beyond the second power the hottest rank is favoured on top.

    Args:
        skew: largest over mean rows of a rank, at least 1.
        tokens: of each source rank.

    Raises:
        ValueError: if an argument is out of range, or this many experts and choices cannot be that skewed.
    """
    check_sizes(num_experts, num_ranks, tokens, top_k)
    skew = require_number("skew", skew)
    if not 1.0 <= skew <= num_ranks:
        raise ValueError(f"skew={skew!r} must be between 1 and the number of ranks, {num_ranks}: largest over mean")
    generator = torch.Generator().manual_seed(require_count("seed", seed))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    home_E = torch.tensor(home_ranks(num_experts, num_ranks))
    log_E = 0.5 * normal(num_ranks)[home_E] + normal(num_experts)
    log_GE = log_E + 0.1 * normal(num_ranks, num_experts)
    rank_G = torch.zeros(num_ranks, dtype=torch.float64).index_add_(0, home_E, log_E.exp())
    is_hottest_E = (home_E == rank_G.argmax()).to(torch.float64)

    def loads(power: float) -> Tensor:
        logits_GE = power * log_GE + 4 * max(power - 2.0, 0.0) * is_hottest_E
        logits_GE = (logits_GE - logits_GE.amax(1, keepdim=True)).clamp(min=-80)
        return torch.stack([_counts(logits_E.exp(), tokens, top_k) for logits_E in logits_GE])

    low, high = 0.0, 1.0
    while skew_of(loads(high)) < skew and high < 64:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if skew_of(loads(middle)) < skew else (low, middle)
    found = loads(high)
    # Even experts are the least skew there is, and the hottest rank's experts the most.
    if abs(skew_of(found) / skew - 1) > 0.01:
        raise ValueError(
            f"skew={skew!r} cannot be had with num_experts={num_experts}, num_ranks={num_ranks}, top_k={top_k} and "
            f"tokens={tokens} (nearest: {skew_of(found):.3f}); choose another skew, more tokens or experts"
        )
    return found


def shaped_loads(
    shape: str, *, num_experts: int = 16, num_ranks: int = 4, tokens: int = 512, top_k: int = 2, step: int = 0
) -> Tensor:
    """int64 (G, E) of one of eight routing shapes.

    ``balanced``; ``hot_experts``: three experts, two of one rank, eight times as popular; ``hot_rank``: all of rank 0's
    four times; ``spread``: as many as hot, one on each rank in turn; ``ragged``: sources with all, half, a quarter ...
    of the tokens and the last with none; ``empty``: the last rank's experts and every other one of rank 0's get
    nothing; ``rotating``: the hot rank changes with ``step``; ``burst``: one expert eight times as popular at every
    fourth step, from step 3.

    Raises:
        ValueError: if the shape is not known or a size is out of range.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape={shape!r} is not known; choose one of {', '.join(SHAPES)}")
    check_sizes(num_experts, num_ranks, tokens, top_k)
    homes = home_ranks(num_experts, num_ranks)
    popularity_E = torch.ones(num_experts, dtype=torch.float64)
    tokens_G = [tokens] * num_ranks
    if shape == "hot_experts":
        popularity_E[[0, 1 % num_experts, homes.index(min(1, num_ranks - 1))]] = 8.0
    elif shape in ("hot_rank", "rotating"):
        hot = step % num_ranks if shape == "rotating" else 0
        popularity_E[[e for e, home in enumerate(homes) if home == hot]] = 4.0
    elif shape == "spread":
        firsts = [homes.index(rank) for rank in range(num_ranks)]
        popularity_E[[firsts[i % num_ranks] + i // num_ranks for i in range(homes.count(0))]] = 4.0
    elif shape == "ragged":
        tokens_G = [0 if s == num_ranks - 1 > 0 else tokens >> s for s in range(num_ranks)]
    elif shape == "empty":
        quiet = [e for e, home in enumerate(homes) if home == num_ranks - 1 > 0 or (home == 0 and e % 2)]
        popularity_E[quiet] = 0.0
    elif shape == "burst" and step % 4 == 3:
        popularity_E[0] = 8.0
    return torch.stack([_counts(popularity_E, count, top_k) for count in tokens_G])


def scaled_loads(lam_GE: Tensor, tokens: int, top_k: int) -> Tensor:
    """Loads in the same proportions for a mean of ``tokens`` tokens a rank. Rounded, each source's sum exactly."""
    factor = tokens * top_k * lam_GE.shape[0] / max(int(lam_GE.sum()), 1)
    upto_GE = (lam_GE.to(torch.float64).cumsum(1) * factor + 0.5).floor().to(torch.int64)
    return upto_GE.diff(dim=1, prepend=torch.zeros(len(lam_GE), 1, dtype=torch.int64))


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
        matrices = [torch.tensor(matrix, dtype=torch.int64) for matrix in (value if depth == 3 else [value])]
        for matrix in matrices:
            require_loads(matrix)
            if matrix.shape != matrices[0].shape:
                raise ValueError(f"matrices differ in shape: {tuple(matrices[0].shape)} and {tuple(matrix.shape)}")
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if num_ranks is not None and num_ranks != len(matrices[0]):
        raise ValueError(f"{path} holds loads of {len(matrices[0])} ranks, but ranks={num_ranks}; leave out ranks")
    return matrices


def skew_of(lam_GE: Tensor) -> float:
    """Largest over mean rows of a rank, with every expert at home; 1 without rows."""
    num_ranks, num_experts = lam_GE.shape
    home_E = torch.tensor(home_ranks(num_experts, num_ranks))
    rows_G = torch.zeros(num_ranks, dtype=torch.int64).index_add_(0, home_E, lam_GE.sum(0))
    return float(rows_G.max() * num_ranks / rows_G.sum()) if rows_G.any() else 1.0


def check_sizes(num_experts: int, num_ranks: int, tokens: int, top_k: int) -> None:
    """ValueError naming the size that cannot be."""
    require_count("experts", num_experts, least=1)
    require_count("ranks", num_ranks, least=1)
    require_count("tokens", tokens)
    require_count("top_k", top_k, least=1)
    home_ranks(num_experts, num_ranks)
    if top_k > num_experts:
        raise ValueError(f"top_k={top_k} must be at most experts={num_experts}")


def _counts(popularity_E: Tensor, tokens: int, top_k: int) -> Tensor:
    """int64 (E,): ``tokens * top_k`` pairs over the experts, in proportion to popularity but at most one a token."""
    loaded = int((popularity_E > 0).sum())
    if loaded < top_k:
        raise ValueError(f"top_k={top_k} needs as many experts with load; {loaded} have any")
    share_E = torch.zeros_like(popularity_E)
    order = popularity_E.argsort(descending=True, stable=True)
    ordered_E = popularity_E[order]
    # Added up from the smallest, which would otherwise vanish beside the largest.
    rest_E = ordered_E.flip(0).cumsum(0).flip(0).tolist()
    left = float(top_k)
    for expert, popularity, rest in zip(order.tolist(), ordered_E.tolist(), rest_E, strict=True):
        share = min(1.0, left * popularity / rest) if rest > 0 else 0.0
        share_E[expert] = share
        left = max(left - share, 0.0)
    # In fixed point, where a share of one gives exactly ``tokens``.
    upto_E = ((share_E * 2**32).round().to(torch.int64).cumsum(0) * tokens + 2**31) >> 32
    return upto_E.diff(prepend=torch.zeros(1, dtype=torch.int64))


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
