"""Synthetic loads and load files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.balance.shapes import SHAPES
from lrmoe.studies.loads import read_loads, scaled_loads, shaped_loads, skew_of, skewed_loads


@pytest.mark.parametrize("skew", [1.0, 1.5, 2.0, 3.5])
def test_skewed_loads_have_the_skew_and_are_a_routers(skew: float) -> None:
    lam_GE = skewed_loads(skew, num_experts=32, num_ranks=4, tokens=512, top_k=4)
    assert skew_of(lam_GE) == pytest.approx(skew, rel=0.01)
    assert lam_GE.sum(1).tolist() == [512 * 4] * 4
    assert int(lam_GE.min()) >= 0
    assert int(lam_GE.max()) <= 512
    assert torch.equal(lam_GE, skewed_loads(skew, num_experts=32, num_ranks=4, tokens=512, top_k=4))
    if skew > 1:
        assert not torch.equal(lam_GE, skewed_loads(skew, num_experts=32, num_ranks=4, tokens=512, top_k=4, seed=1))
        assert not torch.equal(lam_GE[0], lam_GE[1])


@pytest.mark.parametrize(
    ("skew", "sizes", "message"),
    [
        (0.9, {}, "skew=0.9 must be between 1 and the number of ranks, 8"),
        (9.0, {}, "skew=9.0 must be between 1 and"),
        (float("nan"), {}, "skew=nan must be a number"),
        (2.0, {"num_ranks": 200}, "num_ranks=200 must be between 1 and num_experts=128"),
        (2.0, {"top_k": 200}, "top_k=200 must be at most experts=128"),
        (2.0, {"tokens": -1}, "tokens=-1 must be an integer >= 0"),
        # Two of two experts a token: all experts have the same load, whatever the router prefers.
        (1.5, {"num_experts": 2, "num_ranks": 2, "top_k": 2}, r"cannot be had .*nearest: 1.000"),
    ],
)
def test_impossible_skews_are_refused(skew: float, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        skewed_loads(skew, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_a_routers(shape: str) -> None:
    for step in range(4):
        lam_GE = shaped_loads(shape, step=step)
        assert lam_GE.shape == (4, 16)
        assert int(lam_GE.max()) <= 512
        assert (lam_GE.sum(1) % 2 == 0).all()
    with pytest.raises(ValueError, match="shape='hot' is not known; choose one of balanced, hot_experts"):
        shaped_loads("hot")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 40),
    st.integers(1, 2),
    st.integers(0, 9),
)
def test_shapes_of_any_size(shape: str, ranks: int, factor: int, tokens: int, top_k: int, step: int) -> None:
    # Of a rank's experts every other one may be without load, which leaves two to choose from.
    sizes = {"num_experts": 4 * ranks * factor, "num_ranks": ranks, "tokens": tokens, "top_k": top_k, "step": step}
    lam_GE = shaped_loads(shape, **sizes)
    assert int(lam_GE.min()) >= 0
    assert int(lam_GE.max()) <= tokens
    assert all(total % top_k == 0 and total <= tokens * top_k for total in lam_GE.sum(1).tolist())


def test_scaled_loads_keep_the_proportions() -> None:
    lam_GE = skewed_loads(2.0, num_experts=16, num_ranks=4, tokens=512, top_k=2)
    smaller = scaled_loads(lam_GE, 64, 2)
    assert smaller.sum(1).tolist() == [128] * 4
    assert (smaller - lam_GE / 8).abs().max() <= 1
    assert int(scaled_loads(torch.zeros(2, 4, dtype=torch.int64), 64, 2).sum()) == 0


def test_load_files(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text("[[3, 1], [2, 2]]")
    assert [matrix.tolist() for matrix in read_loads(path, None)] == [[[3, 1], [2, 2]]]
    path.write_text("[[[3, 1], [2, 2]], [[0, 0], [1, 0]]]")
    assert [matrix.tolist() for matrix in read_loads(path, 2)] == [[[3, 1], [2, 2]], [[0, 0], [1, 0]]]
    path.write_text("[5, 2]")
    assert [matrix.tolist() for matrix in read_loads(path, 2)] == [[[2, 1], [3, 1]]]


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("{", None, "cannot be read as JSON"),
        ('{"a": 1}', None, "must hold lists of counts"),
        ("[]", None, "must hold lists of counts"),
        ("[[1, 2], [3]]", None, "differ in length"),
        ("[[1, 2], 3]", None, "must hold lists of counts"),
        ("[[1, 2.5]]", None, "entry 2.5 is not a count"),
        ("[[1, true]]", None, "entry True is not a count"),
        ("[[1, 1e400]]", None, "entry inf is not a count"),
        ("[[1, -2]]", None, r"lam_GE\[0, 1\]=-2 is negative"),
        ("[1, -2]", 2, "load -2 is negative"),
        ("[5, 2]", None, "say over how many ranks"),
        ("[5, 2]", 3, "num_ranks=3 must be between 1 and num_experts=2"),
        ("[[1], [2]]", None, "num_ranks=2 must be between 1 and num_experts=1"),
        ("[[3, 1], [2, 2]]", 4, "holds loads of 2 ranks, but ranks=4"),
        ("[[[[1]]]]", None, "nested deeper"),
        ("[[[1, 2]], [[1, 2], [3, 4]]]", None, "differ in length"),
    ],
)
def test_bad_load_files_are_named(tmp_path: Path, text: str, ranks: int | None, message: str) -> None:
    path = tmp_path / "loads.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_loads(path, ranks)
    assert str(path) in str(caught.value)


def test_a_missing_load_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"loads.json is missing; give a JSON file"):
        read_loads(tmp_path / "loads.json", None)


def test_the_recorded_router_loads_are_a_routers() -> None:
    path = Path(__file__).parents[2] / "docs" / "results" / "router_loads.json"
    for matrix in json.loads(path.read_text()):
        assert [sum(row) for row in matrix] == [2048 * 4] * 8
        assert all(0 <= count <= 2048 for row in matrix for count in row)
