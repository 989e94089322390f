"""Products of many row groups with one matrix each: the seam through which every expert GEMM goes.

M rows in E contiguous groups; ``offs_E`` int32 are the ends of the groups. Rows past ``offs_E[-1]`` are not read, and
the corresponding rows of a result are uninitialised: nothing may read them either.

`torch.nn.functional.grouped_mm` does the work where it can. It cannot for fp64, nor where a row is not a multiple of
16 bytes; and half precision on a CPU without the instructions for it is up to 70 times slower there than fp32, so each
group is then multiplied in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def grouped_mm(a_MX: Tensor, b_EXY: Tensor, offs_E: Tensor) -> Tensor:
    """(M, Y): each group's rows times its matrix. ``b_EXY`` may be a transposed view."""
    if _native(a_MX, b_EXY):
        # Rows of an odd width come back padded to 16 bytes.
        return F.grouped_mm(a_MX, b_EXY, offs=offs_E).contiguous()
    out_MY = a_MX.new_empty(a_MX.shape[0], b_EXY.shape[2])
    for expert, rows in _groups(offs_E):
        out_MY[rows] = _product(a_MX[rows], b_EXY[expert])
    return out_MY


def grouped_wgrad(a_MX: Tensor, b_MY: Tensor, offs_E: Tensor) -> Tensor:
    """(E, X, Y): for each group, the transpose of its rows of ``a`` times its rows of ``b``; exact zeros if empty."""
    if _native(a_MX, b_MY):
        return F.grouped_mm(a_MX.t(), b_MY, offs=offs_E).contiguous()
    out_EXY = a_MX.new_zeros(offs_E.numel(), a_MX.shape[1], b_MY.shape[1])
    for expert, rows in _groups(offs_E):
        out_EXY[expert] = _product(a_MX[rows].t(), b_MY[rows])
    return out_EXY


def grouped_sum(a_MX: Tensor, offs_E: Tensor) -> Tensor:
    """(E, X) in fp32 or better: each group's rows added up in row order; exact zeros if empty."""
    dtype = torch.promote_types(a_MX.dtype, torch.float32)
    out_EX = a_MX.new_zeros(offs_E.numel(), a_MX.shape[1], dtype=dtype)
    return out_EX.index_add_(0, group_of_row(offs_E, a_MX.shape[0]), a_MX.to(dtype))


def add_group_rows(a_MX: Tensor, b_EX: Tensor, offs_E: Tensor) -> Tensor:
    """Adds to each row, in place, the row of ``b_EX`` of its group; returns ``a_MX``."""
    return a_MX.add_(b_EX.index_select(0, group_of_row(offs_E, a_MX.shape[0])))


def group_of_row(offs_E: Tensor, num_rows: int) -> Tensor:
    """The group of each row, (M,) int64; the last group for rows past the end, which nothing reads."""
    row_M = torch.arange(num_rows, device=offs_E.device, dtype=offs_E.dtype)
    return torch.bucketize(row_M, offs_E, right=True).clamp(max=offs_E.numel() - 1)


def _groups(offs_E: Tensor) -> list[tuple[int, slice]]:
    ends = offs_E.tolist()
    return [(e, slice(start, end)) for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start]


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in _HALF and a.device.type == "cpu":
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def _native(a: Tensor, b: Tensor) -> bool:
    if a.dtype == torch.float64 or (a.dtype in _HALF and a.device.type == "cpu" and not _fast_half_on_cpu()):
        return False
    return all(_aligned(operand) for operand in (a, b))


def _aligned(operand: Tensor) -> bool:
    """The rows (in a transposed view: the columns) are contiguous and lie a multiple of 16 bytes apart."""
    inner, outer = sorted((operand.stride(-1), operand.stride(-2)))
    return inner == 1 and outer * operand.element_size() % 16 == 0 and outer > 0


def _fast_half_on_cpu() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"
