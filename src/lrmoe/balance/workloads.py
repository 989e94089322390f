"""Synthetic loads: of a given skew, by Zipf's law, and of eight shapes that real runs show.

``lam_GE`` counts the pairs that source rank s routes to expert e. Synthetic loads are such as a top-k router makes: a
token chooses ``top_k`` different experts, so that no expert gets more pairs of a rank than that rank has tokens. What
is drawn comes from a generator of its own, by the seed alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.balance.plan import home_ranks
from lrmoe.balance.shapes import SHAPES
from lrmoe.config import require_count, require_number
from lrmoe.evenness import max_over_mean


def workload(
    name: str, steps: int, ranks: int, experts: int, tokens: int, top_k: int, seed: int = 0, *, noise: float = 0.1
) -> Tensor:
    """int64 (steps, G, E): loads of a run of one of the eight shapes of :func:`shaped_loads`, by its name.

    Every source's popularity of an expert is off by a log-normal factor of its own at every step, so that no two
    microbatches are alike and even ``balanced`` loads are as uneven as a balanced router's. More steps go on where
    fewer end.

    Args:
        name: one of :data:`SHAPES`.
        tokens: of each source rank.
        noise: standard deviation of the factor's logarithm; with 0 the shapes are bare, and the seed is of no effect.

    Raises:
        ValueError: if the name is not known or a number is out of range.
    """
    _require_shape("name", name)
    check_sizes(experts, ranks, tokens, top_k)
    noise = _require_noise(noise)
    generator = torch.Generator(device="cpu").manual_seed(require_count("seed", seed))
    matrices = []
    for step in range(require_count("steps", steps, least=1)):
        popularity_E, tokens_G = _shape(name, experts, ranks, tokens, step)
        matrices.append(_sources(popularity_E, tokens_G, top_k, noise, generator))
    return torch.stack(matrices)


def zipf(
    skew: float,
    steps: int,
    ranks: int,
    experts: int,
    tokens: int,
    top_k: int,
    seed: int = 0,
    *,
    noise: float = 0.1,
) -> Tensor:
    """int64 (steps, G, E): the i-th most popular expert has i^-a of the first's popularity, the seed says which it is.

    The exponent a is such that the rank with the most load has ``skew`` times the mean, to a per cent, before
    ``noise`` (see :func:`workload`). Where the drawn order of the experts cannot be that skewed others are drawn, and
    in the end the most popular lie side by side.

    Raises:
        ValueError: if a number is out of range, or this many experts and choices cannot be that skewed.
    """
    check_sizes(experts, ranks, tokens, top_k)
    skew = require_number("skew", skew)
    if not 1.0 <= skew <= ranks:
        raise ValueError(f"skew={skew!r} must be between 1 and the number of ranks, {ranks}: largest over mean")
    noise = _require_noise(noise)
    require_count("steps", steps, least=1)
    generator = torch.Generator(device="cpu").manual_seed(require_count("seed", seed))
    orders = [torch.randperm(experts, generator=generator, device="cpu") for _ in range(_ORDERS)]
    place_E = torch.arange(1, experts + 1, dtype=torch.float64, device="cpu")
    nearest = 1.0
    for order_E in (*orders, torch.arange(experts, device="cpu")):

        def popularity(power: float, order_E: Tensor = order_E) -> Tensor:
            return place_E[order_E] ** -power

        def reached(power: float, order_E: Tensor = order_E) -> float:
            return skew_of(_counts(popularity(power, order_E), tokens, top_k).expand(ranks, -1)) or 1.0

        low, high = 0.0, 1.0
        while reached(high) < skew and high < 32:
            high *= 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if reached(middle) < skew else (low, middle)
        found = reached(high)
        if abs(found / skew - 1) <= 0.01:
            popularity_E = popularity(high)
            drawn = [_sources(popularity_E, [tokens] * ranks, top_k, noise, generator) for _ in range(steps)]
            return torch.stack(drawn)
        nearest = min(nearest, found, key=lambda one: abs(one - skew))
    raise _impossible(skew, nearest, experts, ranks, tokens, top_k)


_ORDERS = 8
"""How many orders of the experts are tried before the sorted one."""


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
    generator = torch.Generator(device="cpu").manual_seed(require_count("seed", seed))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    home_E = torch.tensor(home_ranks(num_experts, num_ranks), device="cpu")
    log_E = 0.5 * normal(num_ranks)[home_E] + normal(num_experts)
    log_GE = log_E + 0.1 * normal(num_ranks, num_experts)
    rank_G = torch.zeros(num_ranks, dtype=torch.float64, device="cpu").index_add_(0, home_E, log_E.exp())
    is_hottest_E = (home_E == rank_G.argmax()).to(torch.float64)

    def loads(power: float) -> Tensor:
        logits_GE = power * log_GE + 4 * max(power - 2.0, 0.0) * is_hottest_E
        logits_GE = (logits_GE - logits_GE.amax(1, keepdim=True)).clamp(min=-80)
        return torch.stack([_counts(logits_E.exp(), tokens, top_k) for logits_E in logits_GE])

    def reached(power: float) -> float:
        # Without tokens nothing is skewed.
        return skew_of(loads(power)) or 1.0

    low, high = 0.0, 1.0
    while reached(high) < skew and high < 64:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < skew else (low, middle)
    # Even experts are the least skew there is, and the hottest rank's experts the most.
    if abs(reached(high) / skew - 1) > 0.01:
        raise _impossible(skew, reached(high), num_experts, num_ranks, tokens, top_k)
    return loads(high)


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
    _require_shape("shape", shape)
    check_sizes(num_experts, num_ranks, tokens, top_k)
    popularity_E, tokens_G = _shape(shape, num_experts, num_ranks, tokens, step)
    return torch.stack([_counts(popularity_E, count, top_k) for count in tokens_G])


def skew_of(lam_GE: Tensor) -> float | None:
    """Largest over mean rows of a rank, with every expert at home; None without rows."""
    num_ranks, num_experts = lam_GE.shape
    home_E = torch.tensor(home_ranks(num_experts, num_ranks), device="cpu")
    rows_G = torch.zeros(num_ranks, dtype=torch.int64, device="cpu").index_add_(0, home_E, lam_GE.sum(0))
    return max_over_mean(rows_G.tolist())


def check_sizes(num_experts: int, num_ranks: int, tokens: int, top_k: int) -> None:
    """ValueError naming the size that cannot be."""
    require_count("experts", num_experts, least=1)
    require_count("ranks", num_ranks, least=1)
    require_count("tokens", tokens)
    require_count("top_k", top_k, least=1)
    home_ranks(num_experts, num_ranks)
    if top_k > num_experts:
        raise ValueError(f"top_k={top_k} must be at most experts={num_experts}")


def _require_shape(field: str, shape: str) -> None:
    if shape not in SHAPES:
        raise ValueError(f"{field}={shape!r} is not known; choose one of {', '.join(SHAPES)}")


def _require_noise(noise: float) -> float:
    number = require_number("noise", noise)
    if not 0.0 <= number <= 3.0:
        raise ValueError(f"noise={noise!r} must be in [0, 3]: the standard deviation of a logarithm")
    return number


def _impossible(skew: float, nearest: float, experts: int, ranks: int, tokens: int, top_k: int) -> ValueError:
    return ValueError(
        f"skew={skew!r} cannot be had with num_experts={experts}, num_ranks={ranks}, top_k={top_k} and "
        f"tokens={tokens} (nearest: {nearest:.3f}); choose another skew, more tokens or experts"
    )


def _sources(popularity_E: Tensor, tokens_G: list[int], top_k: int, noise: float, generator: torch.Generator) -> Tensor:
    """int64 (G, E): each source with its own noise, and its own choice of the experts that get a fraction of a pair.

    Sources that all rounded alike would send their few tokens to the same experts, however balanced.
    """
    sizes = (len(tokens_G), len(popularity_E))
    factor_GE = (noise * torch.randn(sizes, generator=generator, dtype=torch.float64, device="cpu")).exp()
    phase_G = 0.01 + 0.98 * torch.rand(len(tokens_G), generator=generator, dtype=torch.float64, device="cpu")
    phases = phase_G.tolist() if noise else [0.5] * len(tokens_G)
    return torch.stack(
        [
            _counts(popularity_E * factor_E, tokens, top_k, phase)
            for factor_E, tokens, phase in zip(factor_GE, tokens_G, phases, strict=True)
        ]
    )


def _shape(shape: str, num_experts: int, num_ranks: int, tokens: int, step: int) -> tuple[Tensor, list[int]]:
    """Popularity of each expert, and tokens of each source."""
    homes = home_ranks(num_experts, num_ranks)
    popularity_E = torch.ones(num_experts, dtype=torch.float64, device="cpu")
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
    return popularity_E, tokens_G


def _counts(popularity_E: Tensor, tokens: int, top_k: int, phase: float = 0.5) -> Tensor:
    """int64 (E,): ``tokens * top_k`` pairs over the experts, in proportion to popularity but at most one a token.

    ``phase``, in (0, 1), says which experts are rounded up.
    """
    loaded = int((popularity_E > 0).sum())
    if loaded < top_k:
        raise ValueError(f"top_k={top_k} needs as many experts with load; {loaded} have any")
    shares = [0.0] * len(popularity_E)
    order = popularity_E.argsort(descending=True, stable=True)
    ordered_E = popularity_E[order]
    # Added up from the smallest, which would otherwise vanish beside the largest.
    rest_E = ordered_E.flip(0).cumsum(0).flip(0).tolist()
    left = float(top_k)
    for expert, popularity, rest in zip(order.tolist(), ordered_E.tolist(), rest_E, strict=True):
        share = min(1.0, left * popularity / rest) if rest > 0 else 0.0
        shares[expert] = share
        left = max(left - share, 0.0)
    # In fixed point, where a share of one gives exactly ``tokens``.
    share_E = torch.tensor(shares, dtype=torch.float64, device="cpu")
    upto_E = ((share_E * 2**32).round().to(torch.int64).cumsum(0) * tokens + int(phase * 2**32)) >> 32
    return upto_E.diff(prepend=torch.zeros(1, dtype=torch.int64, device="cpu"))
