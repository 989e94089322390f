"""Runs that studies share: what names them, that each is done once, and that what was interrupted goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lrmoe import LRMoEConfig
from lrmoe.studies.catalog import run_named
from lrmoe.studies.cells import Cell, missing, run_cells, steps_of
from lrmoe.studies.compare_table import MEANS
from lrmoe.studies.quota_spread import STUDY
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.study_run import check
from lrmoe.training.config import TrainConfig
from lrmoe.training.files import locked, read_records

QUIET = LRMoEConfig(drop=0.0, guard_variance=None, guard_tail=None)


@pytest.fixture
def small(tiny: Callable[..., TrainConfig]) -> TrainConfig:
    return replace(tiny(save_every=6), recalibration=QUIET)


def test_a_run_is_named_by_what_defines_it(small: TrainConfig) -> None:
    cell = Cell(config=small)
    assert cell.key == Cell(config=replace(small, threads=2, keep_checkpoints=5, save_every=4)).key
    others = [
        replace(small, seed=small.seed + 1),
        replace(small, steps=small.steps + 1),
        replace(small, recalibration=replace(QUIET, drop=0.5)),
    ]
    assert len({cell.key, *(Cell(config=c).key for c in others), Cell(config=small, start=cell).key}) == 5


def test_a_field_at_its_default_does_not_change_a_name(small: TrainConfig) -> None:
    default = TrainConfig()
    assert Cell(config=replace(small, weight_decay=default.weight_decay)).key == Cell(config=small).key


def test_starts_come_first_and_each_run_once(small: TrainConfig, tmp_path: Path) -> None:
    start = Cell(config=small)
    later = [Cell(config=replace(small, steps=2), start=start), Cell(config=replace(small, steps=3), start=start)]
    todo = missing([*later, later[0]], tmp_path)
    assert [cell.key for cell in todo] == [start.key, later[0].key, later[1].key]
    assert steps_of(later, tmp_path) == small.steps + 5


def test_runs_are_done_once_and_go_on_from_where_they_start(small: TrainConfig, tmp_path: Path) -> None:
    start = Cell(config=small)
    later = Cell(config=replace(small, lr=1e-5), start=start)
    told: list[Any] = []
    run_cells([later], tmp_path, jobs=1, progress=lambda *args: told.append(args))
    assert start.is_finished(tmp_path)
    assert later.is_finished(tmp_path)
    # It begins where the other ended, and its own weights are not kept.
    first, last = later.records(tmp_path)[0]["loss"], start.records(tmp_path)[-1]["eval_loss"]
    assert abs(first - last) < 0.5 < start.records(tmp_path)[0]["loss"] - last
    assert not (later.folder(tmp_path) / "checkpoints").exists()
    assert (start.folder(tmp_path) / "checkpoints").exists()
    assert later.summary(tmp_path)["steps"] == small.steps
    assert "torch" in later.versions(tmp_path)
    told.clear()
    run_cells([later, start], tmp_path, jobs=1, progress=lambda *args: told.append(args))
    assert told == []


def test_an_interrupted_run_goes_on_and_ends_alike(small: TrainConfig, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(name: str, step: int, record: dict[str, Any] | None) -> None:
        if step == 4:
            raise Stop

    cell = Cell(config=replace(small, save_every=2))
    with pytest.raises(Stop):
        run_cells([cell], tmp_path / "a", jobs=1, progress=stop)
    assert not cell.is_finished(tmp_path / "a")
    run_cells([cell], tmp_path / "a", jobs=1, progress=lambda *_: None)
    run_cells([cell], tmp_path / "b", jobs=1, progress=lambda *_: None)
    assert cell.summary(tmp_path / "a")["eval_loss"] == cell.summary(tmp_path / "b")["eval_loss"]
    steps = [record["step"] for record in read_records(cell.folder(tmp_path / "a") / "metrics.jsonl")]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", "{"),
        ("summary.json", "{}"),
        ("summary.json", '{"seconds": "3"}'),
        ("config.json", "{}"),
        ("config.json", '{"versions": {"torch": 2}}'),
    ],
)
def test_a_damaged_run_is_named_with_its_mend(small: TrainConfig, tmp_path: Path, name: str, content: str) -> None:
    cell = Cell(config=small)
    cell.folder(tmp_path).mkdir()
    (cell.folder(tmp_path) / name).write_text(content)
    read = cell.summary if name == "summary.json" else cell.versions
    with pytest.raises(ValueError, match=rf"{name} .*; delete the folder .* and the run is done again"):
        read(tmp_path)


def test_values_of_another_kind_are_named(small: TrainConfig, tmp_path: Path) -> None:
    cell = Cell(config=small)
    cell.folder(tmp_path).mkdir()
    whole = {**dict.fromkeys(MEANS, 1.0), "seconds": 3, "diverged_at": None, "saved_bytes": {"moe": 1, "model": 2}}
    path = cell.folder(tmp_path) / "summary.json"
    path.write_text(json.dumps(whole))
    assert cell.summary(tmp_path) == whole
    for name, value in (("eval_loss", "2"), ("kept_share", [1]), ("saved_bytes", {"moe": 1}), ("seconds", None)):
        path.write_text(json.dumps({**whole, name: value}))
        with pytest.raises(ValueError, match=rf"summary\.json is damaged .*\({name}=.* must be .*; delete the folder"):
            cell.check(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", '{"command": ', "cannot be read as JSON"),
        ("config.json", '{"command": "train"}', "the file is damaged"),
        ("metrics.jsonl", '{"step": 1}\n{\n{"step": 3}\n', "line 2: not valid JSON"),
        ("report.html", None, "is a folder, where a file belongs"),
    ],
)
def test_damage_to_an_interrupted_run_is_told_before_others_are_trained(
    small: TrainConfig, tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    cell = Cell(config=small)
    cell.check(tmp_path)
    folder = cell.folder(tmp_path)
    folder.mkdir()
    begun = {"command": "train", "train": {"recalibration": {}}, "corpus": {"sha256": ""}}
    (folder / "config.json").write_text(json.dumps(begun))
    cell.check(tmp_path)
    (folder / name).mkdir() if content is None else (folder / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{said}.*; delete the folder .*, and the run is done again"):
        cell.check(tmp_path)


def test_a_run_whose_weights_are_gone_is_told_before_others_go_on_from_it(small: TrainConfig, tmp_path: Path) -> None:
    config = StudyConfig(model=small.model, text=small.text, steps=20, seq=16, seeds=(0,), regimes=("near_zero",))
    start = next(cells[0] for cells in STUDY.first(config)[0].cells((0,)).values()).start
    assert start is not None
    folder = start.folder(tmp_path)
    folder.mkdir()
    summary = {**dict.fromkeys(MEANS, 1.0), "seconds": 3, "diverged_at": None, "saved_bytes": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.json").write_text(json.dumps({"command": "train", "versions": {"torch": "2"}}))
    with pytest.raises(
        ValueError, match=r"has no weights left to go on from; delete the folder .*, and the run is done"
    ):
        check(STUDY, config, tmp_path / "out", tmp_path)


@pytest.mark.parametrize(
    ("name", "entry", "said"),
    [
        ("quota", "report.html", r"report\.html is a folder, where a file belongs"),
        ("quota", "summary.json", r"summary\.json is a folder, where a file belongs"),
    ],
)
def test_what_a_study_would_trip_over_at_its_end_is_told_first(
    small: TrainConfig, tmp_path: Path, name: str, entry: str, said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"command": "study", "study": name}))
    (tmp_path / entry).mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=said):
        run_named(name, {"text": small.text, "steps": 20, "seq": 16}, tmp_path, store=tmp_path / "store")
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_kill_leaves_of_a_file_does_not_keep_a_run_from_being_done(small: TrainConfig, tmp_path: Path) -> None:
    cell = Cell(config=small)
    cell.folder(tmp_path).mkdir()
    (cell.folder(tmp_path) / ".config.json.123.tmp").write_text("{")
    run_cells([cell], tmp_path, jobs=1, progress=lambda *_: None)
    assert cell.is_finished(tmp_path)


def test_two_processes_do_not_work_in_one_store(small: TrainConfig, tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ValueError, match="another"):
        run_cells([Cell(config=small)], tmp_path, jobs=1, progress=lambda *_: None)
