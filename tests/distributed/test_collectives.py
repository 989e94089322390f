"""Collectives by rows: every split, dtype and layout against lists in one process; failures that name who is missing.

G ranks.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.world import run_world
from torch import Tensor

from lrmoe.parallel.collectives import (
    RankFailure,
    Traffic,
    all_gather_counts,
    all_reduce,
    all_to_all_rows,
)
from lrmoe.parallel.meeting import all_gather_json, barrier

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
# Case 51: one side sends nothing, nobody sends anything, all goes to one rank; then uneven worlds of 1 and 4.
SPLITS = (
    [[1, 1], [0, 0]],
    [[0, 0], [0, 0]],
    [[3, 0], [5, 0]],
    [[2, 3], [4, 1]],
    [[3]],
    [[0]],
    [[0, 0, 0, 7], [0, 0, 0, 0], [1, 2, 3, 4], [5, 0, 0, 0]],
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (0,))


def rows_of(rank: int, count: int, shape: tuple[int, ...], dtype: torch.dtype, *, contiguous: bool = True) -> Tensor:
    """Rows whose values say which rank sent them."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, 100, (count, *shape), generator=generator) + 100 * rank
    rows = (values % 2 == 0) if dtype is torch.bool else (values % 256 if dtype is torch.uint8 else values).to(dtype)
    if contiguous:
        return rows
    every_other = rows.repeat_interleave(2, dim=0)[::2]
    return every_other.transpose(0, -1).contiguous().transpose(0, -1) if shape else every_other


def exchange(group: dist.ProcessGroup, splits: list[list[int]]) -> list[tuple[Tensor, Tensor, int]]:
    """Each combination of shape, dtype and layout: what arrived, as bytes, beside what should have."""
    rank, size = group.rank(), group.size()
    send, receive = splits[rank], [splits[source][rank] for source in range(size)]
    found = []
    for shape in SHAPES:
        for dtype in DTYPES:
            for contiguous in (True, False):
                traffic = Traffic()
                rows = rows_of(rank, sum(send), shape, dtype, contiguous=contiguous)
                kept = rows.clone()
                got = all_to_all_rows(rows, send, receive, group, what="rows", traffic=traffic)
                assert torch.equal(rows.to(torch.float64), kept.to(torch.float64))
                parts = []
                for source in range(size):
                    start = sum(splits[source][:rank])
                    sent = rows_of(source, sum(splits[source]), shape, dtype)
                    parts.append(sent[start : start + splits[source][rank]])
                expected = torch.cat(parts)
                assert got.dtype == dtype
                assert got.is_contiguous()
                row_bytes = expected[:1].numel() * expected.element_size() if len(expected) else None
                found.append((got.to(torch.float64), expected.to(torch.float64), traffic.bytes["rows"]))
                if row_bytes is not None:
                    assert traffic.bytes["rows"] == row_bytes * (sum(send) - send[rank])
    return found


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_case_51_rows_arrive_in_order_of_rank(splits: list[list[int]]) -> None:
    for rank, found in enumerate(run_world(len(splits), exchange, splits)):
        assert len(found) == len(SHAPES) * len(DTYPES) * 2
        for got, expected, _ in found:
            assert got.shape == expected.shape == (sum(row[rank] for row in splits), *expected.shape[1:])
            assert torch.equal(got, expected)


def count(group: dist.ProcessGroup) -> dict[str, Any]:
    rank = group.rank()
    traffic = Traffic()
    return {
        "counts": all_gather_counts(torch.arange(3) + 10 * rank, group, what="counts", traffic=traffic),
        "empty": all_gather_counts(torch.arange(0), group, what="nothing", traffic=traffic),
        "json": all_gather_json({"rank": rank, "text": "α" * rank, "list": [1.5] * rank}, group, what="json"),
        "bytes": traffic.bytes,
        "total": sum(traffic.bytes.values()),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_counts_and_objects_are_gathered_in_order_of_rank(size: int) -> None:
    for found in run_world(size, count):
        assert found["counts"].tolist() == [[10 * rank, 10 * rank + 1, 10 * rank + 2] for rank in range(size)]
        assert found["empty"].shape == (size, 0)
        assert found["json"] == [{"rank": r, "text": "α" * r, "list": [1.5] * r} for r in range(size)]
        assert found["bytes"] == {"counts": 24 * (size - 1), "nothing": 0}
        assert found["total"] == 24 * (size - 1)


def values_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return (10 * torch.randn(shape, generator=generator)).to(dtype)


REDUCED = [
    ((), torch.float64),
    ((1,), torch.float32),
    ((5,), torch.int64),
    ((3, 7), torch.float32),
    ((0,), torch.int32),
]


def reduce_all(group: dist.ProcessGroup) -> list[Tensor]:
    results = []
    for shape, dtype in REDUCED:
        for op in ("sum", "max", "min"):
            tensor = values_of(group.rank(), shape, dtype)
            strided = torch.stack([tensor, tensor], dim=-1)[..., 0]
            assert all_reduce(strided, group, what="values", op=op) is strided
            results.append(strided.clone())
    barrier(group, what="end")
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_reduce_adds_in_order_of_rank(size: int) -> None:
    """Bit for bit what a loop over the ranks gives, on every rank, in worlds that divide the tensor and that do not."""
    expected = []
    for shape, dtype in REDUCED:
        values = [values_of(rank, shape, dtype) for rank in range(size)]
        total = values[0].clone()
        for value in values[1:]:
            total += value
        expected += [total, torch.stack(values).amax(0), torch.stack(values).amin(0)]
    for found in run_world(size, reduce_all):
        assert len(found) == len(expected)
        for got, want in zip(found, expected, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


def misuse(group: dist.ProcessGroup) -> list[str]:
    messages = []
    for arguments in (
        {"rows": torch.ones(3), "send": [1, 1], "receive": [1, 1]},
        {"rows": torch.ones(2), "send": [2], "receive": [1, 1]},
        {"rows": torch.ones(2), "send": [1, 1], "receive": [3, -1]},
        {"rows": torch.ones(2), "send": [1, 1], "receive": [2, 2]},
        {"rows": torch.ones(2), "send": [1, 1], "receive": [1, 1], "timeout_s": 0.0},
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            all_to_all_rows(**arguments, group=group, what="what")  # type: ignore[arg-type]
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match="op='avg'"):
        all_reduce(torch.ones(1), group, what="what", op="avg")
    with pytest.raises(ValueError, match="must be"):
        all_gather_counts(torch.ones(1, 1), group, what="what")
    # Nobody entered a collective: the group still works.
    barrier(group, what="after")
    return messages


def test_misuse_is_found_before_anything_is_sent() -> None:
    messages, other = run_world(2, misuse)
    assert "adds up to 2, but there are 3 rows" in messages[0]
    assert "send=[2] must be 2" in messages[1]
    assert "receive=[3, -1]" in messages[2]
    assert "rank 0 sends itself 1 rows and expects 2" in messages[3]
    assert "timeout_s=0.0" in messages[4]
    assert "rank 1 sends itself" in other[3]


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        barrier(what="what")


def stay_away(group: dist.ProcessGroup, absent: tuple[int, ...]) -> tuple[str, tuple[int, ...], float] | None:
    if group.rank() in absent:
        time.sleep(2.5)
        return None
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        all_to_all_rows(torch.ones(group.size()), [1] * 4, [1] * 4, group, what="the test's rows", timeout_s=0.5)
    assert caught.value.what == "the test's rows"
    return str(caught.value), caught.value.ranks, time.monotonic() - start


@pytest.mark.parametrize("absent", [(2,), (0, 3)])
def test_ranks_that_stay_away_are_named_in_time(absent: tuple[int, ...]) -> None:
    results = run_world(4, stay_away, absent, breaks_group=True)
    names = ", ".join(str(rank) for rank in absent)
    for rank, result in enumerate(results):
        assert (result is None) == (rank in absent)
        if result is not None:
            message, ranks, seconds = result
            assert f"the test's rows: rank{'s' * (len(absent) > 1)} {names} did not arrive (no answer within" in message
            assert ranks == absent
            assert seconds < 5
