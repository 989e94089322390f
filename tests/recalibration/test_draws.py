"""The keyed draws: known answers, uniformity, independence of streams, and of everything else a program does."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.recalibration import draws

CPU = torch.device("cpu")
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
PINNED_KEYS = [7254183875039779625, -627014053326172824, -8877249144437434448]
PINNED_UNIFORM = [0.5727348081673572, 0.6713634617384653, 0.24623535207226555]
PINNED_ZERO = [-3421937717981279856]


def split_mix(z: int) -> int:
    """SplitMix64's output function in Python's integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def test_known_answers_of_the_generator() -> None:
    # The first outputs of SplitMix64 from state 0, as published with it.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    states = torch.tensor([signed((i + 1) * GOLDEN & MASK) for i in range(5)])
    assert draws.mix(states).tolist() == [signed(value) for value in published]
    drawn = draws.uniform(torch.tensor(0), torch.arange(5))
    assert drawn.tolist() == [(value >> 11) / 2**53 for value in published]


@settings(max_examples=200, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1))
def test_mix_is_split_mix_on_all_of_int64(value: int) -> None:
    assert draws.mix(torch.tensor([value])).item() == signed(split_mix(value & MASK))


def test_draws_are_pinned() -> None:
    """A run that is resumed with a later version must draw what it would have drawn: these numbers may not change."""
    keys = draws.Source.of_all((1234, 5, 6, 7), 3, CPU).keys(draws.PERMUTATION)
    assert keys.tolist() == PINNED_KEYS
    assert draws.uniform(keys, torch.tensor([0, 1, 2])).tolist() == PINNED_UNIFORM
    assert draws.Source.of_all((0, 0, 0, 0), 1, CPU).keys(draws.OFFSET).tolist() == PINNED_ZERO


def test_a_key_depends_on_every_part_of_the_position_and_on_the_purpose() -> None:
    positions = list(itertools.product((0, 1, 2**62), repeat=4))
    keys = [
        key
        for position in positions
        for stream in (draws.PERMUTATION, draws.OFFSET, draws.SCORE)
        for key in draws.Source.of_all(position, 4, CPU).keys(stream).tolist()
    ]
    assert len(set(keys)) == len(positions) * 3 * 4


def test_order_and_surroundings_do_not_matter() -> None:
    keys = draws.Source.of_all((3, 1, 2, 0), 8, CPU).keys(draws.SCORE)
    counters = torch.randperm(1000)
    torch.rand(10)
    together = draws.uniform(keys.unsqueeze(1), counters)
    for i in (0, 5, 999):
        assert torch.equal(draws.uniform(keys, counters[i]), together[:, i])
    # The first experts' keys do not depend on how many there are: an expert draws the same wherever it lives.
    assert torch.equal(draws.Source.of_all((3, 1, 2, 0), 3, CPU).keys(draws.SCORE), keys[:3])


def test_uniform_range_and_resolution() -> None:
    values = draws.uniform(
        draws.Source.of_all((0, 0, 0, 0), 64, CPU).keys(draws.SCORE).unsqueeze(1), torch.arange(10_000)
    )
    assert values.dtype == torch.float64
    assert values.min() >= 0
    assert values.max() < 1
    assert values.unique().numel() == values.numel()
    assert torch.equal(values * 2**53, (values * 2**53).floor())


def chi_square(values: torch.Tensor, bins: int) -> float:
    counts = torch.bincount((values * bins).long().flatten(), minlength=bins).double()
    expected = values.numel() / bins
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("along", ["counter", "expert", "step", "seed", "layer", "microbatch"])
def test_uniformity_along_every_axis(along: str) -> None:
    """Chi-square with 63 degrees of freedom: beyond 127 with probability 3e-6."""
    n = 6400
    if along == "counter":
        values = draws.uniform(draws.Source.of_all((0, 0, 0, 0), 1, CPU).keys(draws.SCORE), torch.arange(n))
    elif along == "expert":
        values = draws.uniform(draws.Source.of_all((0, 0, 0, 0), n, CPU).keys(draws.SCORE), torch.tensor(0))
    else:
        place = ("seed", "step", "layer", "microbatch").index(along)
        keys = []
        for i in range(n):
            position = [0, 0, 0, 0]
            position[place] = i
            keys.append(draws.Source.of_all((*position,), 1, CPU).keys(draws.SCORE))  # type: ignore[arg-type]
        values = draws.uniform(torch.cat(keys), torch.tensor(0))
    assert chi_square(values, 64) < 127
    # Neighbours are independent: pairs fill the unit square evenly.
    assert chi_square((values[:-1] * 8).floor() / 8 + values[1:] / 8, 64) < 127


def test_streams_experts_and_steps_are_uncorrelated() -> None:
    """Correlations of 4000 pairs of draws: beyond 5/sqrt(4000) with probability 6e-7 each."""
    n = 4000
    rows = [
        draws.uniform(draws.Source.of_all((0, step, 0, 0), 2, CPU).keys(stream)[expert], torch.arange(n))
        for step in (0, 1)
        for stream in (draws.PERMUTATION, draws.OFFSET, draws.SCORE)
        for expert in (0, 1)
    ]
    correlation = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows), dtype=torch.float64)
    assert correlation.abs().max() < 5 / n**0.5
