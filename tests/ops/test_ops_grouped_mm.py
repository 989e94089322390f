"""Grouped products against loops over the groups: every dtype, layout and kind of group; rows past the end are NaN."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lrmoe.ops import grouped_mm as seam
from lrmoe.ops.grouped_mm import add_group_rows, group_of_row, grouped_mm, grouped_sum, grouped_wgrad

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Sizes of groups, then how many rows lie past the last one.
GROUPS = {
    "ordinary": ([3, 5, 2], 0),
    "empty ones": ([0, 4, 0, 0, 3, 0], 0),
    "all empty": ([0, 0, 0], 0),
    "one group": ([7], 0),
    "one row": ([0, 1], 0),
    "a tail": ([2, 0, 4], 5),
    "nothing but a tail": ([0, 0], 4),
}


def rounding(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}[dtype]


def rows(count: int, live: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random rows; those from ``live`` on hold NaN."""
    values = torch.randn(count, width, dtype=torch.float64).to(dtype)
    values[live:] = torch.nan
    return values


def layouts(matrices_EXY: Tensor) -> dict[str, Tensor]:
    e, x, y = matrices_EXY.shape
    wide = torch.full((e, x, y + 8), torch.nan, dtype=matrices_EXY.dtype)
    wide[..., :y] = matrices_EXY
    return {
        "contiguous": matrices_EXY,
        "transposed view": matrices_EXY.transpose(1, 2).contiguous().transpose(1, 2),
        "slice of wider rows": wide[..., :y],
        "experts in the middle": matrices_EXY.transpose(0, 1).contiguous().transpose(0, 1),
    }


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    assert found.shape == wanted.shape
    scale = wanted.abs().max().clamp(min=1) if wanted.numel() else 1.0
    return bool(((found.double() - wanted).abs() <= rounding(dtype) * scale).all())


@pytest.fixture(params=[False, True], ids=["loop", "native"], autouse=True)
def _half_native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision takes torch's grouped product on some CPUs and a loop on others; both are tested everywhere."""
    monkeypatch.setattr(seam, "_fast_half_on_cpu", lambda: request.param)


@pytest.mark.parametrize("groups", list(GROUPS))
@pytest.mark.parametrize(("x", "y"), [(16, 24), (16, 7), (15, 8), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_mm(dtype: torch.dtype, x: int, y: int, groups: str) -> None:
    sizes, tail = GROUPS[groups]
    live = sum(sizes)
    offs_E = torch.tensor(sizes).cumsum(0).to(torch.int32)
    a_MX = rows(live + tail, live, x, dtype)
    matrices = torch.randn(len(sizes), x, y, dtype=torch.float64).to(dtype)
    wanted = torch.cat(
        [torch.zeros(0, y, dtype=torch.float64)]
        + [part.double() @ b.double() for part, b in zip(a_MX[:live].split(sizes), matrices, strict=True)]
    )
    for name, b_EXY in layouts(matrices).items():
        assert torch.equal(b_EXY, matrices)
        found = grouped_mm(a_MX, b_EXY, offs_E)
        assert found.dtype == dtype
        assert found.is_contiguous()
        assert found.shape[0] == live + tail
        assert close(found[:live], wanted, dtype), name


@pytest.mark.parametrize("groups", list(GROUPS))
@pytest.mark.parametrize(("x", "y"), [(16, 24), (16, 7), (15, 8), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_wgrad(dtype: torch.dtype, x: int, y: int, groups: str) -> None:
    sizes, tail = GROUPS[groups]
    live = sum(sizes)
    offs_E = torch.tensor(sizes).cumsum(0).to(torch.int32)
    a_MX, b_MY = rows(live + tail, live, x, dtype), rows(live + tail, live, y, dtype)
    wanted = torch.stack(
        [a.double().T @ b.double() for a, b in zip(a_MX[:live].split(sizes), b_MY[:live].split(sizes), strict=True)]
    )
    found = grouped_wgrad(a_MX, b_MY, offs_E)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert close(found, wanted, dtype)
    for e, size in enumerate(sizes):
        if size == 0:
            assert (found[e] == 0).all()


@pytest.mark.parametrize("groups", [name for name, (_, tail) in GROUPS.items() if not tail])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_sum_and_add_group_rows(dtype: torch.dtype, groups: str) -> None:
    sizes, _ = GROUPS[groups]
    offs_E = torch.tensor(sizes).cumsum(0).to(torch.int32)
    a_MX = rows(sum(sizes), sum(sizes), 5, dtype)
    found = grouped_sum(a_MX, offs_E)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wanted = torch.stack([part.double().sum(0) for part in a_MX.split(sizes)])
    assert close(found, wanted, torch.float32)
    bias = torch.randn(len(sizes), 5, dtype=torch.float64).to(dtype)
    wanted = torch.cat([part + b for part, b in zip(a_MX.split(sizes), bias, strict=True)])
    before = a_MX.data_ptr()
    assert torch.equal(add_group_rows(a_MX, bias, offs_E), wanted)
    assert a_MX.data_ptr() == before
    assert torch.equal(a_MX, wanted)


def test_add_group_rows_leaves_live_rows_right_beside_a_tail() -> None:
    a_MX = rows(6, 4, 3, torch.float32)
    wanted = a_MX[:4].clone()
    bias = torch.randn(2, 3)
    found = add_group_rows(a_MX, bias, torch.tensor([1, 4], dtype=torch.int32))
    assert torch.equal(found[:4], wanted + bias[[0, 1, 1, 1]])


def test_group_of_row() -> None:
    offs_E = torch.tensor([0, 2, 2, 5, 5], dtype=torch.int32)
    assert group_of_row(offs_E, 7).tolist() == [1, 1, 3, 3, 3, 4, 4]
    assert group_of_row(offs_E, 0).tolist() == []


def test_half_precision_is_rounded_once() -> None:
    """Sums in fp32: 4096 ones and a small number do not stall at 256 (bf16) or 2048 (fp16)."""
    offs_E = torch.tensor([1, 2], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        a = torch.ones(2, 4096, dtype=dtype)
        b = torch.ones(2, 4096, 8, dtype=dtype)
        assert (grouped_mm(a, b, offs_E) == 4096).all()
        assert (grouped_wgrad(b[:, :, 0].reshape(2, 4096).t().contiguous(), torch.ones(4096, 8, dtype=dtype),
                              torch.tensor([4096], dtype=torch.int32)) == 4096).all()  # fmt: skip


def test_what_torchs_grouped_product_cannot_do_takes_the_loop() -> None:
    """The condition is on bytes and strides; asking torch for what it refuses would raise."""
    for (x, y), dtype in itertools.product([(16, 16), (4, 8), (6, 8), (15, 16), (3, 3)], DTYPES):
        a, b = torch.randn(2, x).to(dtype), torch.randn(1, x, y).to(dtype)
        if seam._native(a, b):
            assert dtype != torch.float64
            assert x * dtype.itemsize % 16 == 0
        assert close(grouped_mm(a, b, torch.tensor([2], dtype=torch.int32)), a.double() @ b[0].double(), dtype)
