"""Reading run folders: every malformed file is refused with its name and line, whatever is optional may be absent."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from run_folders import compare_run, record, records, train_config, train_run, write

from lrmoe.report.comparison import rows_of
from lrmoe.report.run_folder import read_run


def with_line(tmp_path: Path, line: str) -> Path:
    """A run whose third line is ``line``."""
    run = train_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    return run


def changed(**changes: Any) -> str:
    return json.dumps({**record(25), **changes})


def layer(**changes: Any) -> str:
    return changed(layers=[{"name": "a", **changes}])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"step": 25, "loss": 2.', "not valid JSON"),
        ("[1, 2]", "expected a JSON object, found a list"),
        ("7", "expected a JSON object, found a number"),
        ('{"loss": 2.0}', "step is missing"),
        (changed(step=-1), "step=-1 must be an integer >= 0"),
        (changed(step=2.5), "step=2.5 must be an integer >= 0"),
        (changed(step=True), "step=True must be an integer >= 0"),
        (changed(loss="2.0"), "loss='2.0' must be a number"),
        (changed(eval_loss=True), "eval_loss=True must be a number"),
        ('{"step": 25, "loss": 1' + "0" * 400 + "}", "loss is an integer too large for a float"),
        ('{"step": 25, "loss": 1' + "0" * 5000 + "}", "not valid JSON"),
        (changed(layers=3), "layers must be a list, found a number"),
        (changed(layers=[3]), r"layers\[0\]: expected an object, found a number"),
        (changed(layers=[{"load": [1]}]), r"layers\[0\]: name=None must be a string"),
        (changed(layers=[{"name": "a"}, {"name": "a"}]), r"layers\[1\]: name='a' is there twice"),
        (layer(load=5), "load must be a list of pairs per expert"),
        (layer(load=[1, -2]), r"load\[1\]=-2 must be an integer >= 0"),
        (layer(load=[1, 2], kept=[1]), "load has 2 experts, kept has 1"),
        (layer(load=[1, True]), r"load\[1\]=True must be an integer >= 0"),
        (layer(load=[1, 2**63]), r"load\[1\]=9223372036854775808 is too large"),
        (layer(kept_share="all"), "kept_share='all' must be a number"),
        (layer(guarded=1), r"layers\[0\]: guarded=1 must be true or false"),
        (changed(guard_events={}), "guard_events must be a list, found an object"),
        (changed(guard_events=[3]), r"guard_events\[0\]: expected an object, found a number"),
        (changed(guard_events=[{"step": 1, "layer": "a", "kind": 3}]), r"guard_events\[0\]: kind=3 must be a string"),
        (changed(parallel=[]), "parallel must be an object, found a list"),
        (changed(parallel={"sent_bytes": {"x": "y"}}), r"parallel.sent_bytes: x='y' must be a number"),
        (changed(saved_bytes={"moe": "1"}), "saved_bytes: moe='1' must be a number"),
        (changed(variant="C0", seed=0), "lines with and without variant are mixed"),
        (changed(seed="a"), "seed='a' must be an integer"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line 3.*{said}"):
        read_run(with_line(tmp_path, line))


def test_a_line_cut_short_by_a_kill_is_refused_with_the_mend(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run")
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[:-20])
    with pytest.raises(ValueError, match=r"line 6: not valid JSON.*delete this line"):
        read_run(run)


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize(
    ("content", "said"), [("{\n\n3", "line 3: not valid JSON"), ("[]", "one JSON object"), ("\xff", "not UTF-8")]
)
def test_a_malformed_object_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    run = train_run(tmp_path / "run")
    (run / name).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=f"{name}.*{said}"):
        read_run(run)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    run = train_run(tmp_path / "run")
    (run / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing; give the folder"):
        read_run(run)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        read_run(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ({"rows": {}}, "rows must be a list of objects"),
        ({"rows": []}, "rows lacks the variant 'C0'"),
        ({"rows": [{"variant": "C0", "eval_loss": "low"}]}, r"rows\[0\]: eval_loss='low' must be a number"),
        ({"rows": [{"variant": 3}]}, r"rows\[0\]: variant=3 must be a string"),
    ],
)
def test_malformed_rows_of_a_summary_are_named(tmp_path: Path, summary: dict[str, Any], said: str) -> None:
    run = compare_run(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=rf"summary\.json.*{said}"):
        rows_of(read_run(run), "C0")


def test_layers_may_be_an_object_of_names(tmp_path: Path) -> None:
    run = write(tmp_path / "run", train_config(), [{"step": 1, "layers": {"a": {"load": [1, 2]}}}], None)
    (training,) = read_run(run).trainings
    load = training.points[0].layers["a"].load
    assert load is not None
    assert list(load) == [1, 2]


def test_validation_on_a_line_of_its_own_joins_its_step(tmp_path: Path) -> None:
    run = write(tmp_path / "run", train_config(), [{"step": 5, "loss": 2.0}, {"step": 5, "eval_loss": 2.2}], None)
    (training,) = read_run(run).trainings
    assert [(point.step, point.values) for point in training.points] == [(5, {"loss": 2.0, "eval_loss": 2.2})]


def test_a_step_that_was_logged_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    lines = [*records(), {**record(40), "loss": 9.0}, record(50), record(60)]
    (training,) = read_run(train_run(tmp_path / "run", lines)).trainings
    assert training.series("loss")[0] == [10, 20, 30, 40, 50, 60]
    assert training.series("loss")[1][3] == 9.0


def test_values_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    run = write(tmp_path / "run", train_config(), [{"step": 1, "loss": math.nan}, {"step": 2, "loss": -math.inf}], None)
    (training,) = read_run(run).trainings
    steps, values = training.series("loss")
    assert steps == [1, 2]
    assert math.isnan(values[0])
    assert values[1] == -math.inf


def test_line_separators_inside_strings_do_not_end_a_line(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run")
    line = json.dumps({"step": 70, "note": "a\u2028b\x85c"}, ensure_ascii=False)
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + line + "\n", encoding="utf-8")
    assert read_run(run).last_step == 70
