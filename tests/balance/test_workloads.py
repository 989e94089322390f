"""Synthetic runs: what a router could make, by the seed alone, as skewed as they say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrmoe.balance.shapes import SHAPES
from lrmoe.balance.workloads import shaped_loads, skew_of, workload, zipf


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_is_its_shape_with_noise(name: str) -> None:
    bare = workload(name, 5, 4, 16, 512, 2, noise=0.0)
    assert bare.shape == (5, 4, 16)
    assert bare.dtype == torch.int64
    for step, lam_GE in enumerate(bare):
        assert torch.equal(lam_GE, shaped_loads(name, step=step))
    noisy = workload(name, 5, 4, 16, 512, 2, seed=1)
    assert torch.equal(noisy.sum(2), bare.sum(2))
    assert int(noisy.max()) <= 512
    assert not torch.equal(noisy, bare)
    for step in range(5):
        assert skew_of(noisy[step]) == pytest.approx(skew_of(bare[step]), rel=0.08)


def test_runs_come_of_their_seed_and_longer_ones_go_on() -> None:
    before = torch.random.get_rng_state()
    run = workload("burst", 6, 4, 16, 512, 2, seed=3)
    assert torch.equal(run, workload("burst", 6, 4, 16, 512, 2, seed=3))
    assert torch.equal(run[:4], workload("burst", 4, 4, 16, 512, 2, seed=3))
    assert not torch.equal(run, workload("burst", 6, 4, 16, 512, 2, seed=4))
    # No two sources and no two steps are alike: not all start from the same place.
    assert len({tuple(row) for row in run[:3].flatten(0, 1).tolist()}) == 12
    assert torch.equal(before, torch.random.get_rng_state())


def test_shapes_are_what_their_names_say() -> None:
    def rank_rows(name: str) -> torch.Tensor:
        return workload(name, 8, 4, 16, 512, 2).sum(1).view(8, 4, 4).sum(2)

    def expert_rows(name: str) -> torch.Tensor:
        return workload(name, 8, 4, 16, 512, 2).sum(1)

    assert (rank_rows("hot_rank").argmax(1) == 0).all()
    assert rank_rows("rotating").argmax(1).tolist() == [0, 1, 2, 3] * 2
    spread = expert_rows("spread").float()
    assert (spread.max(1).values > 2 * spread.mean(1)).all()  # Hot experts, even ranks.
    assert all(skew_of(lam_GE) < 1.1 for lam_GE in workload("spread", 8, 4, 16, 512, 2))
    assert workload("ragged", 1, 4, 16, 512, 2)[0].sum(1).tolist() == [1024, 512, 256, 0]
    assert (rank_rows("empty")[:, 3] == 0).all()
    assert (expert_rows("empty")[:, 1] == 0).all()
    hot = [step for step, lam_GE in enumerate(workload("burst", 8, 4, 16, 512, 2)) if skew_of(lam_GE) > 1.5]
    assert hot == [3, 7]


@pytest.mark.parametrize("skew", [1.0, 1.5, 2.0, 3.0, 6.0])
def test_zipf_has_its_skew(skew: float) -> None:
    run = zipf(skew, 2, 8, 64, 512, 4, seed=2, noise=0.0)
    assert run.shape == (2, 8, 64)
    assert torch.equal(run[0], run[1])
    assert skew_of(run[0]) == pytest.approx(skew, rel=0.01)
    assert run.sum(2).unique().tolist() == [2048]
    assert int(run.max()) <= 512
    noisy = zipf(skew, 2, 8, 64, 512, 4, seed=2)
    assert torch.equal(noisy, zipf(skew, 2, 8, 64, 512, 4, seed=2))
    assert not torch.equal(noisy[0], noisy[1])
    assert skew_of(noisy[1]) == pytest.approx(skew, rel=0.08)


def test_zipf_is_zipfs_law() -> None:
    # Few choices of many experts: none is chosen by every token, and popularity is what is counted.
    rows = zipf(1.2, 1, 2, 64, 100_000, 1, noise=0.0)[0, 0].sort(descending=True).values.double()
    place = torch.arange(1, 65, dtype=torch.float64)
    slope = (rows[0] / rows[1:]).log() / place[1:].log()
    assert slope.std() / slope.mean() < 0.01


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, 5), st.integers(1, 4), st.integers(0, 30), st.integers(1, 2))
def test_runs_of_any_size(name: str, ranks: int, factor: int, tokens: int, top_k: int) -> None:
    run = workload(name, 4, ranks, 4 * ranks * factor, tokens, top_k)
    assert int(run.min()) >= 0
    assert int(run.max()) <= tokens
    assert all(total % top_k == 0 and total <= tokens * top_k for total in run.sum(2).flatten().tolist())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("hot", 1, 4, 16, 512, 2), {}, "name='hot' is not known; choose one of balanced, hot_experts"),
        (("balanced", 0, 4, 16, 512, 2), {}, "steps=0 must be an integer >= 1"),
        (("balanced", 1, 20, 16, 512, 2), {}, "num_ranks=20 must be between 1 and num_experts=16"),
        (("balanced", 1, 4, 16, 512, 17), {}, "top_k=17 must be at most experts=16"),
        (("balanced", 1, 4, 16, 512, 2), {"noise": -0.1}, r"noise=-0.1 must be in \[0, 3\]"),
        (("balanced", 1, 4, 16, 512, 2), {"seed": -1}, "seed=-1 must be an integer >= 0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[object, ...], options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload(*arguments, **options)  # type: ignore[arg-type]


def test_skews_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"skew=5.0 must be between 1 and the number of ranks, 4"):
        zipf(5.0, 1, 4, 16, 512, 2)
    with pytest.raises(ValueError, match=r"skew=1.5 cannot be had .*nearest: 1.000"):
        zipf(1.5, 1, 2, 2, 512, 2)
