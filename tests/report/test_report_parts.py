"""The small parts: number formats, curves over seeds, thinning of loads, looks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from run_folders import VARIANTS, compare_run, record, train_run

from lrmoe.report import series
from lrmoe.report.loads import MAX_FRAMES, load_maps
from lrmoe.report.run_folder import LayerPoint, Point, Training, read_run
from lrmoe.report.text import duration, fixed, percent, short_layer_names, signed, size
from lrmoe.report.variants import find_baseline, looks


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (fixed(-0.00001, 3), "0.000"),
        (fixed(-1234.5, 1), "−1,234.5"),
        (fixed(None, 2), "–"),
        (fixed(math.nan, 2), "NaN"),
        (fixed(-math.inf, 2), "−∞"),
        (signed(0.00004, 4), "0.0000"),
        (signed(0.25, 2), "+0.25"),
        (signed(-0.25, 2), "−0.25"),
        (signed(math.inf, 2), "∞"),
        (percent(0.805), "80.5 %"),
        (duration(0.0321), "32.1 ms"),
        (duration(2.5), "2.50 s"),
        (duration(3e-7), "0.30 µs"),
        (duration(0.0), "0 s"),
        (size(1023), "1023 B"),
        (size(5.5 * 2**20), "5.50 MiB"),
        (size(2**42), "4.00 TiB"),
        (size(None), "–"),
    ],
)
def test_numbers_as_a_reader_sees_them(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["model.layers.0.mlp.experts", "model.layers.11.mlp.experts"], ["layer 0", "layer 11"]),
        (["model.layers.3.mlp.experts"], ["layer 3"]),
        (["moe"], ["moe"]),
        (["a.x", "b.x"], ["a", "b"]),
        (["a", "a.b"], ["a", "a.b"]),
        (["encoder.0.moe", "decoder.0.moe"], ["encoder", "decoder"]),
        ([], []),
    ],
)
def test_layer_names_lose_what_they_have_in_common(names: list[str], short: list[str]) -> None:
    assert short_layer_names(names) == short


def test_smoothing_keeps_a_line_and_the_ends() -> None:
    line = [0.5 * i for i in range(200)]
    assert series.smooth(line) == pytest.approx(line)


def test_smoothing_does_not_bridge_what_is_not_finite() -> None:
    values = [1.0] * 200
    values[100] = math.nan
    smoothed = series.smooth(values)
    assert [i for i, value in enumerate(smoothed) if value is None] == list(range(96, 105))


def test_a_mean_over_seeds_needs_every_seed() -> None:
    curve = series.over_seeds([([1, 2, 3], [1.0, 2.0, None]), ([1, 2, 3, 4], [3.0, 6.0, 1.0, 1.0])])
    assert curve.steps == [1, 2, 3]
    assert curve.mean == [2.0, 4.0, None]
    assert curve.low == [1.0, 2.0, None]
    assert curve.high == [3.0, 6.0, None]


def test_long_runs_keep_an_even_choice_of_frames_and_the_whole_total() -> None:
    points = [Point(step=s, layers={"a": LayerPoint(load=[s, 1])}) for s in range(1, 1001)]
    (one,) = load_maps([Training(variant="run", seed=0, points=points)])
    assert len(one["steps"]) == MAX_FRAMES
    assert (one["steps"][0], one["steps"][-1], one["logged"]) == (1, 1000, 1000)
    assert max(b - a for a, b in zip(one["steps"], one["steps"][1:], strict=False)) <= 18
    assert one["total"] == [[500_500, 1000]]
    assert one["top"] == pytest.approx(2 * 1000 / 1001)


def test_layers_may_have_different_numbers_of_experts_and_may_miss_from_a_line(tmp_path: Path) -> None:
    second = record(20)
    second["layers"][0]["load"], second["layers"][0]["kept"] = [1, 2], [1, 2]
    second["layers"].pop()
    (one,) = load_maps(read_run(train_run(tmp_path / "run", [record(10), second])).trainings)
    assert one["frames"][1] == [[1, 2], []]
    assert one["total"] == [[41, 32, 20, 10], [40, 30, 20, 10]]


def test_looks_follow_selector_and_rate(tmp_path: Path) -> None:
    variants = {
        **VARIANTS,
        "C30 pps": {"drop": 0.3, "cost": 0.0, "selector": "pps"},
        "by norm": {"drop": 0.3, "cost": 0.0, "selector": "topq", "metric": "grad_norm"},
        "C30": {"drop": 0.3, "cost": 0.0},
    }
    run = read_run(compare_run(tmp_path / "run", variants))
    assert find_baseline(run) == "C0"
    chosen = looks(run, "C0")
    assert chosen["C20 pps"].colour == chosen["C30 pps"].colour == chosen["C30"].colour, "pps is the common selector"
    assert chosen["C20 pps"].dash != chosen["C30 pps"].dash
    assert len({chosen[name].colour for name in ("C0", "C20 pps", "C20 topq", "by norm")}) == 4


def test_the_baseline_is_found_from_the_lines_without_a_summary(tmp_path: Path) -> None:
    variants = {"first": VARIANTS["C20 pps"], "exact": VARIANTS["C0"]}
    run = compare_run(tmp_path / "run", variants)
    (run / "summary.json").unlink()
    assert find_baseline(read_run(run)) == "exact"
