"""The small parts: number formats, curves over seeds, thinning of loads, looks."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import pytest
from run_folders import VARIANTS, compare_run, record, train_run, unpacked

from lrmoe.report import series
from lrmoe.report.binary import counts, packed
from lrmoe.report.charts import clipped
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


@pytest.mark.parametrize("most", [2, 10, 1200])
def test_a_thinned_curve_reaches_as_far_as_the_whole_one_and_keeps_its_gaps(most: int) -> None:
    steps = list(range(0, 5000, 5))
    values: series.Values = [math.sin(step / 70) + (step % 13) / 10 for step in steps]
    values[400] = None
    thin_steps, thin_values = series.thin(steps, values, most)
    assert len(thin_steps) <= max(most, 2) + 1
    assert thin_steps == sorted(thin_steps)
    known = [value for value in values if value is not None]
    assert min(v for v in thin_values if v is not None) == min(known)
    assert max(v for v in thin_values if v is not None) == max(known)
    assert None in thin_values
    assert set(zip(thin_steps, thin_values, strict=True)) <= set(zip(steps, values, strict=True))


def test_a_short_curve_is_not_thinned() -> None:
    assert series.thin([1, 2], [0.5, None]) == ([1, 2], [0.5, None])
    assert series.thinned_by(1200) is None
    assert series.thinned_by(10_000) == 17


def test_bands_of_long_comparisons_keep_the_extremes() -> None:
    steps = list(range(1000))
    curve = series.over_seeds([(steps, [float(s) for s in steps]), (steps, [s + 1.0 for s in steps])]).thinned(10)
    assert len(curve.steps) == 10
    assert (curve.low[0], curve.high[-1]) == (0.0, 1000.0)
    assert curve.mean[0] == pytest.approx(50.0)


@pytest.mark.parametrize(("most", "dtype"), [(65_535, "u2"), (65_536, "u4"), (2**33 + 1, "f8")])
def test_counts_in_a_page_are_exact(most: int, dtype: str) -> None:
    told = counts(array("q", [0, most, 7]))
    assert told["dtype"] == dtype
    assert unpacked(told) == [0, most, 7]


def test_a_table_in_a_page_has_gaps() -> None:
    told = packed([0.5, None, -2.0, 1.0], (2, 2))
    assert told["shape"] == "2, 2"
    values = unpacked(told)
    assert math.isnan(values[1])
    assert [values[0], *values[2:]] == [0.5, -2.0, 1.0]


def test_a_long_label_shows_its_end() -> None:
    assert clipped("model.layers.7") == "model.layers.7"
    assert clipped("a" * 100 + ".layers.7").endswith(".layers.7")
    assert len(clipped("a" * 100)) == 22


def test_a_mean_over_seeds_needs_every_seed() -> None:
    curve = series.over_seeds([([1, 2, 3], [1.0, 2.0, None]), ([1, 2, 3, 4], [3.0, 6.0, 1.0, 1.0])])
    assert curve.steps == [1, 2, 3]
    assert curve.mean == [2.0, 4.0, None]
    assert curve.low == [1.0, 2.0, None]
    assert curve.high == [3.0, 6.0, None]


def test_long_runs_keep_an_even_choice_of_frames_and_the_whole_total() -> None:
    points = [Point(step=s, layers={"a": LayerPoint(load=array("q", [s, 1]))}) for s in range(1, 1001)]
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
    assert one["widths"] == [4, 4]
    assert unpacked(one["frames"])[8:] == [1, 2, 0, 0, 0, 0, 0, 0]
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
