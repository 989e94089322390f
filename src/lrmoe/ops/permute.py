"""Sorting pairs by expert, and adding rows back to their tokens.

T tokens, K choices, N = T*K pairs (pair u is choice u % K of token u // K), E experts, D width, M kept rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sort_by_expert(ids_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(pair_N, count_E): pairs in the order of their experts, lower pair first, and how many each expert has.

    Pairs without an expert (id -1) come last and are not counted.
    """
    pair_N = torch.argsort(torch.where(ids_N < 0, num_experts, ids_N), stable=True)
    return pair_N, count_per_expert(ids_N, num_experts)


def count_per_expert(ids_N: Tensor, num_experts: int) -> Tensor:
    """(E,) int64: how often each id in [0, E) occurs; -1 is not counted. No synchronisation, unlike bincount."""
    count_S = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_N.device)
    count_S.index_add_(0, torch.where(ids_N < 0, num_experts, ids_N), torch.ones_like(ids_N, dtype=torch.int64))
    return count_S[:-1].clone()


def weighted_combine(y_ND: Tensor, alpha_TK: Tensor, pair_N: Tensor, live: Tensor) -> Tensor:
    """(T, D): sum over a token's choices of alpha times its row of ``y_ND``, which lies in the order of ``pair_N``.

    Rows of ``y_ND`` from the int scalar ``live`` on are not read: it is overwritten there. Neither does alpha of their
    pairs matter: a router may well give NaN to a token that it leaves without experts. Sums in fp32 or better.
    """
    num_tokens, top_k = alpha_TK.shape
    _clear_from(y_ND, live)
    row_TK = torch.empty_like(pair_N).scatter_(0, pair_N, torch.arange(pair_N.numel(), device=pair_N.device))
    row_TK = row_TK.view(num_tokens, top_k)
    alpha_TK = alpha_TK.masked_fill(row_TK >= live, 0)
    if y_ND.dtype in (torch.float32, torch.float64):
        return F.embedding_bag(row_TK, y_ND, mode="sum", per_sample_weights=alpha_TK.to(y_ND.dtype))
    # The fused form would round the weights to half precision.
    out_TD = torch.zeros(num_tokens, y_ND.shape[1], dtype=torch.float32, device=y_ND.device)
    for k in range(top_k):
        out_TD.addcmul_(y_ND.index_select(0, row_TK[:, k]).float(), alpha_TK[:, k, None])
    return out_TD.to(y_ND.dtype)


def add_to_tokens(rows_MD: Tensor, pair_M: Tensor, num_tokens: int, top_k: int) -> Tensor:
    """(T, D): the sum of each token's rows, in the order of its choices; exact zeros for a token without any."""
    row_M = _rows_by_pair(pair_M, num_tokens * top_k)
    count_T = torch.zeros(num_tokens, dtype=torch.int64, device=pair_M.device)
    count_T.index_add_(0, pair_M // top_k, torch.ones_like(pair_M))
    start_T = count_T.cumsum(0) - count_T
    if num_tokens and rows_MD.dtype in (torch.float32, torch.float64):
        return F.embedding_bag(row_M, rows_MD, start_T, mode="sum")
    out_TD = torch.zeros(num_tokens, rows_MD.shape[1], dtype=torch.float32, device=rows_MD.device)
    choice_M = torch.arange(pair_M.numel(), device=pair_M.device) - start_T[pair_M[row_M] // top_k]
    for k in range(top_k):
        rows_k = row_M[choice_M == k]
        out_TD.index_add_(0, pair_M[rows_k] // top_k, rows_MD.index_select(0, rows_k).float())
    return out_TD.to(rows_MD.dtype)


def _rows_by_pair(pair_M: Tensor, num_pairs: int) -> Tensor:
    """The order that sorts the (distinct) pairs: through a table, several times faster than a sort."""
    row_N = pair_M.new_full((num_pairs,), -1)
    row_N[pair_M] = torch.arange(pair_M.numel(), device=pair_M.device)
    return row_N.masked_select(row_N >= 0)


def _clear_from(rows_ND: Tensor, live: Tensor) -> None:
    if rows_ND.device.type == "cpu":
        rows_ND[int(live) :] = 0
    else:
        # Reading `live` would wait for the device; the mask does not.
        dead_N = torch.arange(rows_ND.shape[0], device=rows_ND.device) >= live
        rows_ND.masked_fill_(dead_N.unsqueeze(-1), 0)
