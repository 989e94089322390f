"""How much of each sequence a backward keeps: quotas are by expert, and what they take falls unevenly on sequences.

T tokens, K choices, N pairs routed, M pairs kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrmoe.ops.permute import count_per_expert


def kept_by_sequence(sequence_T: Tensor, token_N: Tensor, token_M: Tensor) -> Tensor:
    """The least, the median and the most of the shares that a batch's sequences keep of their pairs.

    Args:
        sequence_T: int64, the number in [0, T) of each token's sequence.
        token_N: int64, the token of each routed pair, -1 for what is no pair.
        token_M: int64, that of each kept pair.

    Returns:
        (4,) fp64: the three, of the sequences that have pairs, and 1; four zeros if none has. No synchronisation.
    """
    bins = sequence_T.numel()
    if bins == 0:
        return torch.zeros(4, dtype=torch.float64, device=sequence_T.device)
    routed_S, kept_S = (_count(sequence_T, token) for token in (token_N, token_M))
    share_S = torch.where(routed_S > 0, kept_S.double() / routed_S, torch.inf).sort().values
    known = (routed_S > 0).sum()
    last = (known - 1).clamp(min=0)
    # The two in the middle, which are one where their number is odd.
    least, lower, upper, most = share_S[
        torch.stack([torch.zeros_like(last), last // 2, (last + 1) // 2, last])
    ].unbind()
    found_4 = torch.stack([least, (lower + upper) / 2, most, torch.ones_like(most)])
    return torch.where(known > 0, found_4, 0.0)


def _count(sequence_T: Tensor, token_N: Tensor) -> Tensor:
    sequence_N = torch.where(token_N < 0, -1, sequence_T[token_N.clamp(min=0)])
    return count_per_expert(sequence_N, sequence_T.numel())
