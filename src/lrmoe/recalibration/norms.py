"""Norms of rows that neither overflow nor underflow, whatever the range of the numbers in them.

A sum of squares in the numbers' own precision leaves its range at the square root of it: in fp32 and bf16 a row of
1e-23 has the norm 0 and one of 1e20 an infinite norm. N rows, X numbers in each.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Norms in this range, taken in fp32, are as good as any: no square is infinite, and those that underflow are together
# too small to be seen. (In fp64 the range would be far larger; the same one does.)
_SAFE_LEAST, _SAFE_MOST = 2.0**-45, 2.0**62
# Numbers of a tensor that are copied to fp64 at a time.
_BLOCK = 1 << 22


def row_norms(rows_NX: Tensor) -> Tensor:
    """2-norms of the rows, (N,) fp64: right for any finite numbers of fp16, bf16 and fp32, and for those of fp64 as far
    as the norm itself is a number of fp64. Not finite where a row is not. A row's norm depends on no other row."""
    if rows_NX.dtype == torch.float16:
        # Its squares lie well within fp32.
        return _norm(rows_NX, torch.float32)
    if rows_NX.device.type != "cpu" or rows_NX.dtype == torch.bfloat16 or not rows_NX.numel():
        return _of_any_range(rows_NX)
    # On a CPU sums in the numbers' own precision are the fastest, and asking whether they were good enough makes nobody
    # wait.
    norm_N = _norm(rows_NX, rows_NX.dtype)
    safe_N = (norm_N >= _SAFE_LEAST) & (norm_N <= _SAFE_MOST)
    return norm_N if bool(safe_N.all()) else torch.where(safe_N, norm_N, _of_any_range(rows_NX))


def tensor_norms(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """2-norms of the tensors, of any shape, (number of tensors,) fp64 on ``device``, with the promises of
    :func:`row_norms`. The host waits for the device once."""
    tensors = list(tensors)
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    norm_X = torch.stack([norm.to(device, torch.float64) for norm in norms])
    # Whole gradients: in fp64 they would take four times their memory, and on a GPU several times as long.
    for place, norm in enumerate(norm_X.tolist()):
        if not _SAFE_LEAST <= norm <= _SAFE_MOST:
            blocks = torch.split(tensors[place].reshape(-1), _BLOCK)
            norm_X[place] = norm_of_norms(torch.stack([_of_any_range(block) for block in blocks]))
    return norm_X


def norm_of_norms(norm_X: Tensor) -> Tensor:
    """The 2-norm, a scalar, of what has parts of these norms; fp64 both. 0 for no part."""
    return _of_any_range(norm_X)


def _of_any_range(rows_NX: Tensor) -> Tensor:
    if rows_NX.dtype != torch.float64 or not rows_NX.shape[-1]:
        return _norm(rows_NX, torch.float64)
    largest_N = rows_NX.abs().amax(-1)
    # With an infinite number among them the norm is infinite, and not NaN.
    unit_N = torch.where(largest_N > 0, largest_N.clamp(max=torch.finfo(torch.float64).max), 1.0)
    return _norm(rows_NX / unit_N.unsqueeze(-1), torch.float64) * unit_N


def _norm(rows_NX: Tensor, dtype: torch.dtype) -> Tensor:
    """In fp64, accumulated in ``dtype``."""
    norm_N: Tensor = torch.linalg.vector_norm(rows_NX, dim=-1, dtype=dtype)
    return norm_N.to(torch.float64)
