"""Sorting pairs by expert and adding rows back to tokens, against loops over pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.ops.permute import add_to_tokens, count_per_expert, sort_by_expert, weighted_combine

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(-1, 5), max_size=40), dtype=st.sampled_from([torch.int64, torch.int32]))
def test_sort_is_stable_and_puts_pairs_without_an_expert_last(ids: list[int], dtype: torch.dtype) -> None:
    ids_N = torch.tensor(ids, dtype=dtype)
    pair_N, count_E = sort_by_expert(ids_N, 6)
    assert pair_N.tolist() == sorted(range(len(ids)), key=lambda u: (ids[u] if ids[u] >= 0 else 6, u))
    assert count_E.tolist() == [ids.count(e) for e in range(6)] == count_per_expert(ids_N, 6).tolist()
    assert count_E.dtype == torch.int64


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_combine(dtype: torch.dtype, top_k: int, tokens: int) -> None:
    ids_TK = torch.randint(-1, 4, (tokens, top_k))
    pair_N, count_E = sort_by_expert(ids_TK.reshape(-1), 4)
    live = int(count_E.sum())
    y_ND = torch.randn(tokens * top_k, 6).to(dtype)
    y_ND[live:] = torch.nan  # Never written, so never read.
    alpha_TK = torch.rand(tokens, top_k, dtype=torch.promote_types(dtype, torch.float32))
    alpha_TK[ids_TK < 0] = torch.nan
    wanted = torch.zeros(tokens, 6, dtype=torch.float64)
    for row, pair in enumerate(pair_N[:live].tolist()):
        wanted[pair // top_k] += alpha_TK[pair // top_k, pair % top_k].double() * y_ND[row].double()
    found = weighted_combine(y_ND, alpha_TK, pair_N, torch.tensor(live, dtype=torch.int32))
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.allclose(found.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    assert (found[(ids_TK < 0).all(-1)] == 0).all()


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_to_tokens(dtype: torch.dtype, top_k: int, tokens: int) -> None:
    for share in (0.0, 0.5, 1.0):
        pair_M = torch.randperm(tokens * top_k)[: int(share * tokens * top_k)]
        rows_MD = torch.randn(pair_M.numel(), 6).to(dtype)
        wanted = torch.zeros(tokens, 6, dtype=torch.float64).index_add_(0, pair_M // top_k, rows_MD.double())
        found = add_to_tokens(rows_MD, pair_M, tokens, top_k)
        assert found.dtype == dtype
        assert torch.allclose(found.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
        nobody = torch.ones(tokens, dtype=torch.bool)
        nobody[pair_M // top_k] = False
        assert (found[nobody] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_are_rounded_once(dtype: torch.dtype) -> None:
    # 1 + 64 times a quarter of the resolution: each addition in half precision would be lost.
    small = torch.finfo(dtype).eps / 4
    rows_MD = torch.full((65, 2), small, dtype=dtype)
    rows_MD[0] = 1.0
    wanted = torch.tensor(1.0 + 64 * small).to(dtype)
    assert (add_to_tokens(rows_MD, torch.arange(65), 1, 65) == wanted).all()
    combined = weighted_combine(rows_MD, torch.ones(1, 65), torch.arange(65), torch.tensor(65))
    assert (combined == wanted).all()


def test_sums_follow_the_order_of_the_choices() -> None:
    # So that they repeat bit for bit, whatever the order the rows lie in.
    rows_MD = torch.randn(12, 5)
    order = torch.randperm(12)
    found = add_to_tokens(rows_MD, torch.arange(12), 3, 4)
    assert torch.equal(found, add_to_tokens(rows_MD[order], torch.arange(12)[order], 3, 4))
    wanted = torch.stack([((r[0] + r[1]) + r[2]) + r[3] for r in rows_MD.view(3, 4, 5)])
    assert torch.equal(found, wanted)
