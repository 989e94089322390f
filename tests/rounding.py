"""Another machine on this one: matrix products whose rounding depends on their shape and on where a row stands in it.

That is all a BLAS promises. It picks its blocks by the shape, computes the rows that fill no block by other code, and
may look at where operands lie in memory; the next machine does otherwise. What it gives for a row of 64 and for the
same row of 63 may be the same bits here and not there. After :func:`by_shape` no test gets such bits by luck: each
product is a sum of two, cut where shape and place in memory say, and elsewhere for the last rows. The same shapes
still give the same bits.

M rows, X summed over, Y columns, E groups.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)

_library: torch.library.Library | None = None


def by_shape() -> None:
    """From now on, in this process, every product of matrices on a CPU that goes through torch's dispatcher (all but
    those of compiled code) rounds by its shape."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    kernels = {"mm": _mm, "addmm": _addmm, "bmm": _bmm, "baddbmm": _baddbmm, "mv": _mv, "_grouped_mm": _grouped_mm}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels.items():
            _library.impl(name, kernel, "CPU")


def is_by_shape() -> bool:
    """Whether :func:`by_shape` was called in this process."""
    return _library is not None


def allowance(dtype: torch.dtype, *terms: int) -> float:
    """How far two results may lie apart that add up the same terms, each in an order of its own.

    A sum of n terms is within n u of the true one, u = eps / 2, in units of the sum of their magnitudes: two of them
    are within n eps. Half precision is summed in fp32, and what two such sums round to lies another eps apart.

    Args:
        dtype: of the operands.
        terms: how many terms each product sums over, one after the other.

    Returns:
        The largest difference in units of the sum of magnitudes. The largest value of a tensor of hundreds of random
        sums of 8 to 64 terms is about that sum, so it is also one for :func:`experts.problem.error`.
    """
    exact = torch.float32 if dtype in HALF else dtype
    return sum(terms) * torch.finfo(exact).eps + (len(terms) * torch.finfo(dtype).eps if dtype in HALF else 0.0)


def _mm(a_MX: Tensor, b_XY: Tensor) -> Tensor:
    rows, inner = a_MX.shape
    if not a_MX.is_floating_point() or rows == 0 or inner < 2:
        return _plain(a_MX, b_XY)
    blocked = rows - rows % 7
    place = a_MX.data_ptr() % 64 + b_XY.data_ptr() % 64
    cut = 1 + (rows * 31 + b_XY.shape[1] * 17 + place) % (inner - 1)
    return torch.cat([_cut(a_MX[:blocked], b_XY, cut), _cut(a_MX[blocked:], b_XY, inner - cut)])


def _cut(a_MX: Tensor, b_XY: Tensor, cut: int) -> Tensor:
    # Half precision is summed in fp32 and rounded once, as every library does it.
    a_MX, b_XY, dtype = _wide(a_MX), _wide(b_XY), a_MX.dtype
    return _plain(a_MX[:, :cut], b_XY[:cut]).add_(_plain(a_MX[:, cut:], b_XY[cut:])).to(dtype)


def _plain(a_MX: Tensor, b_XY: Tensor) -> Tensor:
    return torch.mm(a_MX, b_XY, out=a_MX.new_empty(a_MX.shape[0], b_XY.shape[1]))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _addmm(bias: Tensor, a_MX: Tensor, b_XY: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _wide(_mm(a_MX, b_XY)) * alpha
    return (product + _wide(bias) * beta if beta else product).to(a_MX.dtype)


def _bmm(a_EMX: Tensor, b_EXY: Tensor) -> Tensor:
    if not a_EMX.shape[0]:
        return a_EMX.new_empty(0, a_EMX.shape[1], b_EXY.shape[2])
    return torch.stack([_mm(a, b) for a, b in zip(a_EMX, b_EXY, strict=True)])


def _baddbmm(bias: Tensor, a_EMX: Tensor, b_EXY: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _bmm(a_EMX, b_EXY) * alpha
    return product + bias * beta if beta else product


def _mv(a_MX: Tensor, vector_X: Tensor) -> Tensor:
    return _mm(a_MX, vector_X.unsqueeze(1)).squeeze(1)


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The three forms there are: groups of rows of ``a``, groups of what is summed over, and a batch."""
    assert bias is None
    if offs is None:
        return _bmm(a, b)
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if b.dim() == 2:
        return torch.stack([_mm(a[:, group], b[group]) for group in groups])
    out = a.new_empty(a.shape[0], b.shape[2])
    for expert, group in enumerate(groups):
        out[group] = _mm(a[group], b[expert])
    return out
