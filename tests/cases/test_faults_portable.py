"""The suite on another machine: products whose rounding depends on their shape, and the bound that tests compare by."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import rounding
import torch
from torch import Tensor

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def linear(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    return rounding._mm(x_TD, weight_FD.t())


def with_bias(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    return rounding._addmm(torch.zeros(weight_FD.shape[0], dtype=x_TD.dtype), x_TD, weight_FD.t())


def one_group(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    ends = torch.tensor([len(x_TD)], dtype=torch.int32)
    return rounding._grouped_mm(x_TD, weight_FD.t().unsqueeze(0), offs=ends)


def batch(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    return rounding._bmm(x_TD.unsqueeze(0), weight_FD.t().unsqueeze(0))[0]


PRODUCTS = [linear, with_bias, one_group, batch]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_m1_a_product_that_rounds_by_its_shape_is_a_product(
    product: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    """Within the bound of fp64, again and again the same bits; a row among 64 and among 63 within the bound of each
    other, and not the same bits in fp32 and fp64."""
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_FD = (torch.randn(n, 48, generator=generator, dtype=torch.float64).to(dtype) for n in (64, 40))
    found = product(x_TD, weight_FD)
    assert found.dtype == dtype
    assert torch.equal(found, product(x_TD, weight_FD))
    limit = rounding.allowance(dtype, 48)
    magnitude_TF = x_TD.double().abs() @ weight_FD.double().abs().T
    assert ((found.double() - x_TD.double() @ weight_FD.double().T).abs() <= limit * magnitude_TF).all()
    fewer = product(x_TD[:63], weight_FD)
    assert ((found[:63] - fewer).double().abs() <= limit * magnitude_TF[:63]).all()
    if dtype != torch.bfloat16:
        assert not torch.equal(found[:63], fewer)
        # Equal rows need not give equal bits: the last ones fill no block.
        alike = product(x_TD[:1].expand(64, 48), weight_FD)
        assert not torch.equal(alike[0], alike[-1])
        # Nor the same rows elsewhere in memory.
        moved = torch.empty(64 * 48 + 5, dtype=dtype)[5:].view(64, 48).copy_(x_TD)
        assert not torch.equal(found, product(moved, weight_FD))


@pytest.mark.parametrize(("sizes", "tail"), [([3, 0, 9], 0), ([0, 0], 0), ([8, 2], 5)])
def test_m1_groups_that_round_by_their_shape(sizes: list[int], tail: int) -> None:
    """Grouped products, both ways, are loops over the groups; rows behind the last one are nobody's."""
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    live = sum(sizes)
    a_MX, b_MY = torch.randn(live + tail, 16), torch.randn(live + tail, 12)
    b_EXY = torch.randn(len(sizes), 16, 12)
    found_MY = rounding._grouped_mm(a_MX, b_EXY, offs=ends)
    found_EXY = rounding._grouped_mm(a_MX.t(), b_MY, offs=ends)
    assert found_MY.shape == (live + tail, 12)
    for e, (rows, other) in enumerate(zip(a_MX[:live].split(sizes), b_MY[:live].split(sizes), strict=True)):
        start = sum(sizes[:e])
        torch.testing.assert_close(found_MY[start : start + sizes[e]], rows @ b_EXY[e])
        torch.testing.assert_close(found_EXY[e], rows.t() @ other)
