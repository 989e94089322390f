"""The files of a routing trace: whole parts, no record twice, readable with numpy alone, refused when malformed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrmoe.training.config import TrainConfig
from lrmoe.training.files import read_records
from lrmoe.training.run import prepare, train
from lrmoe.training.trace import TraceWriter, deal, read_trace

MakeConfig = Callable[..., TrainConfig]

RANKS, EXPERTS, LAYERS = 2, 4, 2


def loads(step: int, layer: int) -> torch.Tensor:
    return torch.arange(RANKS * EXPERTS).view(RANKS, EXPERTS) * (step + 1) + layer


def write(folder: Path, steps: range, *, every: int = 2) -> TraceWriter:
    writer = TraceWriter(folder, {"top_k": 2, "layers": ["a", "b"]})
    for step in steps:
        for layer in reversed(range(LAYERS)):  # As the backward comes by.
            writer.add(layer, step, 0, loads(step, layer))
        if (step + 1) % every == 0:
            writer.flush()
    return writer


def test_numpy_alone_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "trace", range(4))
    said = json.loads((tmp_path / "trace" / "trace.json").read_text())
    assert said["axes"]["lam"] == ["record", "source rank", "expert"]
    assert (said["top_k"], said["layers"]) == (2, ["a", "b"])
    parts = [np.load(path, allow_pickle=False) for path in sorted((tmp_path / "trace").glob("part-*.npz"))]
    assert len(parts) == 2
    assert all(part[name].dtype == np.int32 for part in parts for name in part.files)
    assert np.concatenate([part["step"] for part in parts]).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert parts[1]["layer"].tolist() == [0, 1, 0, 1]
    assert parts[1]["lam"][1].tolist() == loads(2, 1).tolist()


def test_a_killed_run_keeps_whole_parts_and_goes_on_without_a_record_twice(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write(whole, range(8))
    write(cut, range(7))  # Step 6 was never flushed.
    (cut / ".part-00000006.npz.1.tmp").write_bytes(b"half")
    assert len(read_trace(cut)) == 6 * LAYERS
    # The newest checkpoint was of step 3, in the middle of a part.
    writer = TraceWriter(cut, {"top_k": 2, "layers": ["a", "b"]})
    writer.continue_from(3)
    assert read_trace(cut).step_N.tolist() == [0, 0, 1, 1, 2, 2]
    for step in range(3, 8):
        for layer in range(LAYERS):
            writer.add(layer, step, 0, loads(step, layer))
    writer.flush()
    one, other = read_trace(whole), read_trace(cut)
    for name in ("lam_NGE", "step_N", "microbatch_N", "layer_N"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.about == other.about
    assert not list(cut.glob(".part-*"))


def test_the_same_records_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, range(2))
    part = "part-00000000.npz"
    assert (tmp_path / "a" / part).read_bytes() == (tmp_path / "b" / part).read_bytes()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_dealing_out_keeps_every_experts_sum_and_spreads_evenly(ranks: int) -> None:
    lam_NGE = np.random.default_rng(0).integers(0, 50, (5, 2, 8)).astype(np.int32)
    dealt = deal(lam_NGE, ranks)
    assert dealt.shape == (5, ranks, 8)
    assert np.array_equal(dealt.sum(1), lam_NGE.sum(1))
    if ranks == 8:  # Each source's pairs stay apart.
        assert np.array_equal(dealt.reshape(5, 2, 4, 8).sum(2), lam_NGE)
        assert (np.ptp(dealt.reshape(5, 2, 4, 8), axis=2) <= 1).all()
        totals = dealt.reshape(5, 2, 4, 8).sum(3)
        assert np.ptp(totals, axis=2).max() <= 4, "remainders do not pile up on one rank"


def test_a_run_that_went_on_with_other_ranks_needs_a_number(tmp_path: Path) -> None:
    writer = write(tmp_path, range(2))
    writer.add(0, 2, 0, torch.ones(1, EXPERTS, dtype=torch.int64))
    writer.flush()
    with pytest.raises(ValueError, match="4 experts on 1 ranks and 4 experts on 2 ranks; say over how many ranks"):
        read_trace(tmp_path)
    assert read_trace(tmp_path, ranks=2).lam_NGE.shape == (5, 2, 4)


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is missing; give what lrmoe train --trace wrote"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no part-\*.npz"):
        read_trace(tmp_path)
    part = tmp_path / "part-00000000.npz"
    part.write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(ValueError, match=r"part-00000000\.npz is no part of a trace"):
        read_trace(tmp_path)
    good = {"lam": np.ones((2, 2, 4), np.int32), **dict.fromkeys(("microbatch", "layer"), np.zeros(2, np.int32))}
    for step, changes, message in (
        ([0, 1], {"lam": np.ones((2, 2, 4), np.float32)}, "lam is float32"),
        ([0, 1], {"layer": np.zeros(3, np.int32)}, r"layer is int32 \(3,\)"),
        ([0, 1], {"lam": np.ones((2, 5, 4), np.int32)}, "at least as many experts as ranks"),
        ([0, 1], {"lam": -np.ones((2, 2, 4), np.int32)}, "holds negative numbers"),
        ([0, 1], {"lam": np.full((2, 2, 4), 2**32 + 1)}, "do not fit the format's int32"),
        ([1, 1], {}, r"\(1, 0, 0\) comes after \(1, 0, 0\)"),
    ):
        np.savez(part, **{"step": np.array(step, np.int32), **good, **changes})
        with pytest.raises(ValueError, match=message):
            read_trace(part)


def test_loads_that_do_not_fit_other_ranks_are_refused(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, {})
    writer.add(0, 0, 0, torch.full((2, 4), 2**31 - 1))
    writer.flush()
    assert int(read_trace(tmp_path, ranks=3).lam_NGE.sum(dtype=np.int64)) == 8 * (2**31 - 1)
    with pytest.raises(ValueError, match="4294967294 on one of ranks=1, do not fit"):
        read_trace(tmp_path, ranks=1)


def records_of(out: Path) -> list[dict[str, Any]]:
    return read_records(out / "metrics.jsonl")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_case_58_a_run_records_every_microbatch_it_trains_on(
    tiny: MakeConfig, tmp_path: Path, checkpointing: bool
) -> None:
    """Loads that do not add up to tokens times choices, per layer and rank, were counted twice or in part."""
    config = tiny(trace=True, batch=2, grad_accum=2, log_every=2, eval_every=2, gradient_checkpointing=checkpointing)
    train(prepare(config, tmp_path / "run"))
    trace = read_trace(tmp_path / "run")
    places = [(step, microbatch, layer) for step in range(6) for microbatch in range(2) for layer in range(2)]
    assert list(zip(trace.step_N.tolist(), trace.microbatch_N.tolist(), trace.layer_N.tolist(), strict=True)) == places
    assert trace.lam_NGE.shape == (24, 1, 4)
    assert (trace.lam_NGE.sum((1, 2)) == 2 * 32 * 2).all()
    assert len(list((tmp_path / "run" / "trace").glob("part-*"))) == 3
    for record in records_of(tmp_path / "run"):
        done = (record["step"] - 2 <= trace.step_N) & (trace.step_N < record["step"])
        for number, layer in enumerate(record["layers"]):
            assert trace.lam_NGE[done & (trace.layer_N == number)].sum((0, 1)).tolist() == layer["load"]
    assert trace.about["dim"] == 16
    assert trace.about["layers"] == [f"model.layers.{i}.mlp.experts" for i in range(2)]


def test_recording_changes_nothing_and_a_resumed_run_records_the_same(tiny: MakeConfig, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(step: int, record: dict[str, Any] | None) -> None:
        if step == 5 and record is not None:
            raise Killed

    config = tiny(trace=True)
    train(prepare(config, tmp_path / "whole"))
    train(prepare(tiny(), tmp_path / "without"))
    losses = [[record["loss"] for record in records_of(tmp_path / name)] for name in ("whole", "without")]
    assert losses[0] == losses[1]
    assert not (tmp_path / "without" / "trace").exists()
    cut = tmp_path / "cut"
    with pytest.raises(Killed):
        train(prepare(config, cut), progress=kill)
    assert read_trace(cut).step_N.max() == 4
    train(prepare(config, cut, resume=True))
    one, other = read_trace(tmp_path / "whole"), read_trace(cut)
    assert np.array_equal(one.lam_NGE, other.lam_NGE)
    assert np.array_equal(one.step_N, other.step_N)
    with pytest.raises(ValueError, match="was begun with trace=True, now False"):
        prepare(tiny(), cut, resume=True)
    train(prepare(tiny(steps=2, eval_every=2), cut, overwrite=True))
    assert not (cut / "trace").exists()
