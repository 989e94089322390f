"""How much of each sequence is kept: quotas are by expert, so sequences of a batch lose unevenly, and that is shown."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.test_faults_masks import EncoderDecoder, Model, Packed, SequenceFirst, ids, mask
from torch import Tensor, nn

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.experts.meter import BY_SEQUENCE, BackwardCall
from lrmoe.experts.sequences import kept_by_sequence
from lrmoe.report import run_charts
from lrmoe.report.run_folder import read_run

LENGTHS = [1, 3, 60, 17]
LONGEST = 60


def told_apart(call: BackwardCall, sequence_of: list[int], real: list[bool]) -> tuple[float, float, float]:
    """Least, median and most of what sequences keep, pair by pair from the record."""
    kept: dict[int, list[int]] = {}
    for token, sequence in enumerate(sequence_of):
        if real[token]:
            kept.setdefault(sequence, []).extend(int(one) for one in call.kept_TK[token].tolist())
    shares = [sum(pairs) / len(pairs) for pairs in kept.values()]
    return min(shares), statistics.median(shares), max(shares)


def check(recal: lrmoe.Recalibrator, calls: list[BackwardCall], sequence_of: list[int], real: list[bool]) -> None:
    metrics = recal.metrics(reset=False)
    wanted: dict[int, list[tuple[float, float, float]]] = {}
    for call in calls:
        wanted.setdefault(call.layer, []).append(told_apart(call, sequence_of, real))
    for number, layer in enumerate(metrics["layers"].values()):
        means = [statistics.mean(column) for column in zip(*wanted[number], strict=True)]
        assert [layer[key] for key in BY_SEQUENCE] == pytest.approx(means)
    least, median, most = (metrics[key] for key in BY_SEQUENCE)
    assert least < median <= most <= 1.0
    assert least < metrics["kept_share"] < most


@pytest.mark.parametrize("checkpointed", [None, False, True])
@pytest.mark.parametrize("kind", [Model, SequenceFirst])
@pytest.mark.parametrize("left", [False, True])
def test_s9_padded(kind: type[Model], checkpointed: bool | None, left: bool) -> None:
    torch.manual_seed(0)
    model = kind()
    for block in model.blocks:
        block.use_reentrant = checkpointed
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.4))
    padding = mask(LENGTHS, LONGEST, left=left)
    with lrmoe.recording() as calls:
        for seed in range(2):
            model(ids(4, LONGEST, seed=seed), padding).square().sum().backward()
    order = padding.t() if kind is SequenceFirst else padding
    number = torch.arange(4)[:, None].expand(4, LONGEST)
    number = number.t() if kind is SequenceFirst else number
    check(recal, calls, number.reshape(-1).tolist(), order.reshape(-1).tolist())


@pytest.mark.parametrize("rows", [1, 2])
def test_s9_packed(rows: int) -> None:
    torch.manual_seed(0)
    model = Packed()
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.4))
    position = torch.cat([torch.arange(length) for length in LENGTHS]).expand(rows, -1)
    with lrmoe.recording() as calls:
        model(ids(rows, sum(LENGTHS)), position_ids=position).square().sum().backward()
    one = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
    sequence_of = [number + 4 * row for row in range(rows) for number in one]
    check(recal, calls, sequence_of, [True] * len(sequence_of))


def test_s9_a_row_cut_out_of_a_longer_text_is_a_sequence() -> None:
    torch.manual_seed(0)
    model = Packed()
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.4))
    position = torch.tensor([[5, 6, 7, 0, 1, 2, 3, 4], [9, 10, 11, 12, 13, 14, 0, 1]])
    with lrmoe.recording() as calls:
        model(ids(2, 8), position_ids=position).square().sum().backward()
    check(recal, calls, [0] * 3 + [1] * 5 + [2] * 6 + [3] * 2, [True] * 16)


def test_s9_encoder_and_decoder_have_sequences_of_their_own() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder()
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.4))
    with lrmoe.recording() as calls:
        model(ids(3, 6), mask([6, 2, 4], 6), ids(3, 9, seed=3), mask([9, 1, 5], 9)).square().sum().backward()
    layers = recal.metrics()["layers"].values()
    found = sorted(tuple(layer[key] for key in BY_SEQUENCE) for layer in layers)
    wanted = []
    for call in calls:
        length = call.kept_TK.shape[0] // 3
        real = mask([6, 2, 4], 6) if length == 6 else mask([9, 1, 5], 9)
        sequence_of = [row for row in range(3) for _ in range(length)]
        wanted.append(told_apart(call, sequence_of, real.reshape(-1).tolist()))
    assert len({call.kept_TK.shape[0] for call in calls}) == 2
    for one, other in zip(found, sorted(wanted), strict=True):
        assert one == pytest.approx(other)


@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_s9_unknown_where_no_batch_dimension_is(drop: float) -> None:
    """Rows that come as they are belong to nobody's sequence; the other metrics do without."""
    torch.manual_seed(0)
    moe = lrmoe.MoE(dim=8, expert_dim=6, num_experts=4, top_k=2)
    model = nn.Sequential(moe)
    recal = lrmoe.attach(model, LRMoEConfig(drop=drop))
    model(torch.randn(20, 8)).square().sum().backward()
    metrics = recal.metrics()
    assert metrics["kept_share"] == 1 - drop
    assert all(metrics[key] is None for key in BY_SEQUENCE)


def test_s9_everything_is_kept_of_every_sequence_where_nothing_is_dropped() -> None:
    model = Model()
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.0))
    model(ids(4, 9), mask([9, 1, 2, 3], 9)).square().sum().backward()
    metrics = recal.metrics()
    assert [metrics[key] for key in BY_SEQUENCE] == [1.0, 1.0, 1.0]


def test_s9_an_interval_without_backwards_tells_nothing() -> None:
    recal = lrmoe.attach(Model(), LRMoEConfig(drop=0.4))
    assert all(recal.metrics()[key] is None for key in BY_SEQUENCE)


@pytest.mark.parametrize(
    ("sequence", "routed", "kept", "wanted"),
    [
        ([], [], [], [0, 0, 0, 0]),
        ([0, 0, 1], [], [], [0, 0, 0, 0]),
        ([0, 0, 1], [-1, -1], [], [0, 0, 0, 0]),
        ([0, 0, 1], [0, 0, 1], [], [0, 0, 0, 1]),
        ([2, 2, 0], [0, 0, 1, 2], [0, 2], [1 / 3, 2 / 3, 1, 1]),
        ([0, 1, 2], [0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 2], [1 / 4, 1 / 2, 1, 1]),
    ],
)
def test_s9_kept_by_sequence(sequence: list[int], routed: list[int], kept: list[int], wanted: list[float]) -> None:
    def whole(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    assert kept_by_sequence(whole(sequence), whole(routed), whole(kept)).tolist() == pytest.approx(wanted)


def test_s9_compiled_is_as_eager() -> None:
    found: list[list[Any]] = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model()
        recal = lrmoe.attach(model, LRMoEConfig(drop=0.4))
        called = torch.compile(model, backend="aot_eager") if compiled else model
        called(ids(4, LONGEST), mask(LENGTHS, LONGEST)).square().sum().backward()
        metrics = recal.metrics()
        found.append([metrics[key] for key in BY_SEQUENCE])
    assert found[0] == found[1]
    assert found[0][0] is not None


def test_s9_on_the_page(tmp_path: Path) -> None:
    """The figure of what is left out shows the sequences that lost most and least, where a run knows them."""
    (tmp_path / "config.json").write_text("{}")
    line = '{"step": 1, "loss": 1.0, "drop": 0.4, "kept_share": 0.6, "sequence_kept_share_min": 0.25, '
    (tmp_path / "metrics.jsonl").write_text(line + '"sequence_kept_share_max": 0.75, "layers": []}\n')
    figure = run_charts.dropped(read_run(tmp_path).trainings[0])
    assert figure is not None
    assert [trace["y"][0] for trace in figure["data"]] == pytest.approx([40.0, 40.0, 75.0, 25.0])
