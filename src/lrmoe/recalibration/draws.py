"""Random numbers that are a function of their key and counter alone.

Recompute, resume and every rank that holds the same expert draw the same numbers, whatever else the program draws.
The generator is the SplitMix64 output function (Steele, Lea, Flood, OOPSLA 2014) used as a counter-based hash.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

# One stream per purpose, so that no two uses share a number.
PERMUTATION, OFFSET, SCORE = range(3)


@dataclass(frozen=True, slots=True)
class Source:
    """Whose draws these are. S segments, each the pairs of one expert, or a part of them.

    ``position`` is (seed, step, layer, microbatch); ``expert_S`` int64 the expert's id; ``first_S`` int64 the place of
    the segment's first row among all pairs of its expert, 0 unless several ranks share the expert. What a row draws
    depends on nothing else: not on the other experts of its rank, and not on the number of ranks.
    """

    position: tuple[int, int, int, int]
    expert_S: Tensor
    first_S: Tensor

    @classmethod
    def of_all(cls, position: tuple[int, int, int, int], num_experts: int, device: torch.device) -> Source:
        """Every expert whole, in order."""
        expert_E = torch.arange(num_experts, dtype=torch.int64, device=device)
        return cls(position, expert_E, torch.zeros_like(expert_E))

    def keys(self, stream: int) -> Tensor:
        """One int64 key per segment, (S,), for one purpose of the draws."""
        key = 0
        for part in (*self.position, stream):
            key = _mix_int((key ^ (part & _MASK)) + _GOLDEN & _MASK)
        return mix(self.expert_S * _signed(_GOLDEN) + _signed(key))


def uniform(key: Tensor, counter: Tensor) -> Tensor:
    """fp64 in [0, 1), 53 random bits, for each int64 (key, counter); the two broadcast."""
    return (integer(key, counter) >> 10).to(torch.float64) * 2.0**-53


def integer(key: Tensor, counter: Tensor) -> Tensor:
    """int64 in [0, 2^63), for each int64 (key, counter); the two broadcast."""
    return _shift_right(mix(key + (counter + 1) * _signed(_GOLDEN)), 1)


def mix(z: Tensor) -> Tensor:
    """A bijection on int64 in which every input bit moves about half of the output bits."""
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    return z ^ _shift_right(z, 31)


def _mix_int(z: int) -> int:
    z = (z ^ z >> 30) * _MIX_1 & _MASK
    z = (z ^ z >> 27) * _MIX_2 & _MASK
    return z ^ z >> 31


def _shift_right(z: Tensor, bits: int) -> Tensor:
    # Torch shifts int64 arithmetically; the mask drops the copies of the sign bit.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
