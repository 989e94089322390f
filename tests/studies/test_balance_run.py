"""``lrmoe balance`` as a command: what it prints and writes, and that bad input writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lrmoe.cli import main
from lrmoe.training.files import read_records

SMALL = ["--experts", "16", "--ranks", "4", "--tokens", "256", "--top-k", "2"]
POLICIES = ["fixed", "ultraep", "ultraep, 20% dropped after", "lrmoe", "lrmoe, 20%"]


def test_it_prints_a_table_and_the_break_even(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["balance", "--skew", "2", *SMALL, "--floor", "1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in POLICIES)
    assert "loads: synthetic, max/mean 2; 1 x 16 experts on 4 ranks" in said
    assert "replicas pay from about" in said
    assert "65,536" in said
    config, summary = (json.loads((out / name).read_text()) for name in ("config.json", "summary.json"))
    assert (config["command"], config["skew"], config["floor"]) == ("balance", 2.0, 1)
    records = read_records(out / "metrics.jsonl")
    assert [record["policy"] for record in records] == POLICIES
    assert [{"step": step, **record} for step, record in enumerate(summary["policies"])] == records
    assert [record["policy"] for record in summary["break_even"]] == POLICIES[1:]
    assert all(note in said for note in summary["notes"])
    # Again over the same folder only when told to.
    assert main(["balance", "--skew", "2", *SMALL, "--out", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["balance", "--skew", "1.5", *SMALL, "--out", str(out), "--overwrite"]) == 0
    assert json.loads((out / "config.json").read_text())["skew"] == 1.5
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "report.html",
        "summary.json",
    ]


def test_a_capacity_that_does_not_fit_is_an_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text("[400, 100, 100, 100, 50, 50, 100, 100]")
    arguments = ["balance", "--loads", str(path), "--ranks", "4", "--capacity", "200", "--floor", "1"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "fixed: policy 'fixed' does not fit: rank 0 needs 500 rows, the capacity is 200" in said
    assert "ultraep: policy 'ultraep' does not fit" in said
    records = read_records(tmp_path / "out" / "metrics.jsonl")
    assert [record["fits"] for record in records] == [False, False, True, False, True]
    assert (records[-1]["backward"], records[-1]["replicas"], records[-1]["extra_dropped"]) == (1.0, 3, 0)


def test_no_slots_and_no_drop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balance", "--shape", "hot_rank", "--slots", "0", "--drop", "0"]) == 0
    said = capsys.readouterr().out
    assert "dropped after" not in said
    assert "tokens a rank" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--skew", "9"], "--skew 9.0 must be between 1 and the number of ranks, 8"),
        (["--skew", "two"], "argument --skew: invalid float value: 'two'"),
        (["--loads", "missing.json"], "--loads missing.json is missing"),
        (["--loads", "x.json", "--skew", "2"], "--loads x.json and --skew 2.0 exclude each other"),
        (["--loads", "x.json", "--tokens", "9"], "--tokens 9 is of synthetic loads"),
        (["--shape", "hot_rank", "--seed", "1"], "--seed 1 has no effect on a shape"),
        (["--shape", "hot"], "argument --shape: invalid choice: 'hot'"),
        (["--drop", "1"], "--drop 1.0 must be in [0, 1)"),
        (["--slots", "-1"], "--slots -1 must be an integer >= 0"),
        (["--capacity", "-5"], "--capacity -5.0 must be a positive number"),
        (["--flops", "0"], "--flops 0.0 must be a finite number above 0"),
        (["--floor", "0"], "--floor 0 must be an integer >= 1"),
        (["--experts", "4"], "--ranks 8 must be between 1 and --experts 4"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert main(["balance", *arguments, "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert message in said.err
    assert not out.exists()
