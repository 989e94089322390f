"""Norms of numbers of any range, against math.hypot. N rows, X numbers in a row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lrmoe.recalibration.norms import norm_of_norms, row_norms, tensor_norms

SMALLEST = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126, torch.float64: 2.0**-500}
LARGEST = {torch.float16: 2.0**14, torch.bfloat16: 2.0**126, torch.float32: 2.0**126, torch.float64: 2.0**500}


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Rows of fp32 numbers whose magnitudes are anywhere in the normal range, the same in a row or not."""
    number = st.builds(lambda m, e: math.ldexp(m, e), st.floats(-1.0, 1.0, width=32), st.integers(-110, 127))
    size = draw(st.integers(1, 9))
    return torch.tensor(draw(st.lists(st.lists(number, min_size=size, max_size=size), min_size=1, max_size=6)))


@settings(max_examples=200, deadline=None)
@given(rows_NX=rows(), dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_row_norms_are_those_of_hypot(rows_NX: Tensor, dtype: torch.dtype) -> None:
    rows_NX = rows_NX.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else rows_NX.clamp(-3e38, 3e38).to(dtype)
    found_N = row_norms(rows_NX)
    assert found_N.dtype == torch.float64
    wanted = [math.hypot(*row) for row in rows_NX.tolist()]
    assert found_N.tolist() == pytest.approx(wanted, rel=1e-6, abs=0.0)
    of_tensors = tensor_norms(rows_NX, torch.device("cpu"))
    assert of_tensors.tolist() == pytest.approx(wanted, rel=1e-6, abs=0.0)
    assert norm_of_norms(of_tensors).item() == pytest.approx(math.hypot(*wanted), rel=1e-6, abs=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_rows_norm_depends_on_no_other_row(dtype: torch.dtype) -> None:
    """Bit for bit, at the same shape, whatever the range of the others; and what is not finite shows."""
    rows_NX = torch.randn(5, 33).to(dtype)
    plain_N = row_norms(rows_NX)
    for value in (0.0, SMALLEST[dtype], LARGEST[dtype], math.inf, math.nan):
        beside_NX = rows_NX.clone()
        beside_NX[2] = value
        found_N = row_norms(beside_NX)
        assert torch.equal(found_N[[0, 1, 3, 4]], plain_N[[0, 1, 3, 4]])
        assert bool(found_N[2].isfinite()) == math.isfinite(value)
    assert row_norms(rows_NX[:0]).shape == (0,)
    assert row_norms(rows_NX[:, :0]).tolist() == [0.0] * 5
    assert norm_of_norms(torch.tensor([1.0, math.inf], dtype=torch.float64)).item() == math.inf


def test_a_norm_that_the_numbers_own_type_does_not_hold() -> None:
    assert row_norms(torch.full((1, 4096), 3e38)).item() == pytest.approx(64 * 3e38, rel=1e-6)
