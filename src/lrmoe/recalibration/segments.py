"""Rows in contiguous segments, one per expert, and what is computed inside each: orders, sums, running sums.

N rows, E experts. Rows past the last expert's belong to nobody (a pair without an expert, a masked token); they form
segment E, which every sum here leaves out or which is given a quota of 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """``count_S`` rows in each of S = E + 1 segments, ``start_S`` their first rows, ``of_N`` the segment of a row,
    ``position_N`` its place inside it; all int64."""

    count_S: Tensor
    start_S: Tensor
    of_N: Tensor
    position_N: Tensor

    @classmethod
    def from_loads(cls, load_E: Tensor, num_rows: int) -> Segments:
        """``load_E`` int64 with sum <= ``num_rows``; the rest is segment E. Does not synchronise."""
        rest = num_rows - load_E.sum(dim=0, keepdim=True)
        count_S = torch.cat([load_E, rest])
        start_S = count_S.cumsum(0) - count_S
        of_N = torch.repeat_interleave(count_S, output_size=num_rows)
        position_N = torch.arange(num_rows, device=load_E.device) - start_S.index_select(0, of_N)
        return cls(count_S, start_S, of_N, position_N)

    @property
    def live_N(self) -> Tensor:
        """bool: the row belongs to an expert."""
        return self.of_N < self.count_S.numel() - 1

    def total(self, values_N: Tensor) -> Tensor:
        """Sum of each expert's rows, (E,)."""
        return torch.zeros_like(self.count_S, dtype=values_N.dtype).index_add_(0, self.of_N, values_N)[:-1]

    def largest(self, values_N: Tensor) -> Tensor:
        """Largest of each expert's rows, (E,); 0 for an expert without rows. Values must be >= 0."""
        zeros_S = torch.zeros_like(self.count_S, dtype=values_N.dtype)
        return zeros_S.scatter_reduce_(0, self.of_N, values_N, "amax")[:-1]

    def spread(self, values_E: Tensor) -> Tensor:
        """The expert's value at each of its rows, (N,); 0 for rows of nobody."""
        return torch.cat([values_E, values_E.new_zeros(1)]).index_select(0, self.of_N)

    def ascending(self, key_N: Tensor) -> Tensor:
        """Row indices, segment by segment, smallest int64 key (>= 0) first, ties by lower row. Segments keep their
        place.

        One sort does it: the segment goes above the key, whose lowest bits, as many as the segment needs, fall away.
        """
        segment_bits = self.count_S.numel().bit_length()
        return torch.argsort((self.of_N << (63 - segment_bits)) | (key_N >> segment_bits), stable=True)

    def descending(self, values_N: Tensor) -> Tensor:
        """Row indices, segment by segment, largest value first, ties by lower row. Segments keep their place.

        ``values_N`` fp64, >= 0 and not NaN: as integers their bits have the same order. Values that agree in all but
        the last bits (relative difference 2^-40 for 2000 experts) count as tied.
        """
        infinity = 0x7FF << 52
        return self.ascending(infinity - values_N.view(torch.int64))

    def running_total(self, values_N: Tensor) -> Tensor:
        """Inclusive running sum inside each segment, fp64."""
        total_N = values_N.cumsum(0)
        before_S = torch.cat([total_N.new_zeros(1), total_N]).index_select(0, self.start_S)
        return total_N - before_S.index_select(0, self.of_N)

    def remaining_total(self, values_N: Tensor) -> Tensor:
        """Sum from each row (inclusive) to the end of its segment, fp64."""
        after_N = values_N.flip(0).cumsum(0).flip(0)
        beyond_S = torch.cat([after_N, after_N.new_zeros(1)]).index_select(0, self.start_S + self.count_S)
        return after_N - beyond_S.index_select(0, self.of_N)
