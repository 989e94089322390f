"""Files of a run folder: what is read back, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from lrmoe.training.files import LOCK, check_out_folder, locked, read_json, read_records, write_text
from lrmoe.training.world import torchrun_size


def test_a_name_that_the_system_does_not_decode_is_written(tmp_path: Path) -> None:
    # As a variant's name, a text or a folder may come from the command line; a table is written when all is trained.
    write_text(tmp_path / "table.md", "caf\udce9 é\n")
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == "caf\\udce9 é\n"


def test_a_file_that_cannot_be_written_to_its_end_stays_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    write_text(tmp_path / "summary.json", "old\n")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_text(tmp_path / "summary.json", "new\n")
    assert (tmp_path / "summary.json").read_text() == "old\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_lock_that_its_holder_removes_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    real, calls = fcntl.flock, []

    def flock(*arguments: object) -> None:
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(arguments)
        real(*arguments)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path), pytest.raises(ValueError, match="in use by another"), locked(tmp_path):
        pass
    assert len(calls) == 3
    assert not (tmp_path / LOCK).exists()


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert read_records(path) == [{"step": 1}, {"step": 2}]
    assert read_records(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("line", ["{", "[1]", "3", "{}", '{"step": "1"}', '{"step": 1.5}', "[" * 100_000])
def test_a_line_that_is_no_record_is_refused_by_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not"):
        read_records(path)


def test_a_folder_in_a_file_s_place_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.mkdir()
    for use in (read_json, read_records, partial(write_text, text="{}")):
        with pytest.raises(ValueError, match=r"summary\.json is a folder, where a file belongs; move it away"):
            use(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_lines_that_are_not_utf_8_are_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not UTF-8 text \(byte 12\)"):
        read_records(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "table.md", "report.html", "checkpoints", "trace"])
def test_what_a_run_would_trip_over_at_its_end_is_found_when_it_is_resumed(tmp_path: Path, name: str) -> None:
    train = {"train": {"recalibration": {}}, "corpus": {"sha256": ""}}
    (tmp_path / "config.json").write_text(json.dumps({"command": "train", **train}))
    check_out_folder(tmp_path, command="train", resume=True, overwrite=False)
    kind = "folder" if "." in name else "file"
    (tmp_path / name).mkdir() if kind == "folder" else (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is a {kind}, where a .* belongs; move it away"):
        check_out_folder(tmp_path, command="train", resume=True, overwrite=False)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, "\ufeff{}"])
def test_what_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"config.json (cannot be read as JSON|must hold one JSON object)"):
        read_json(path)


def test_a_folder_that_cannot_be_made_is_found_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    check = partial(check_out_folder, command="train", resume=False, overwrite=False)
    for name in ("file/run", "file/a/b"):
        with pytest.raises(ValueError, match=r"cannot be made: .*file' is a file"):
            check(tmp_path / name)
    with pytest.raises(ValueError, match=r"link' is a link to nothing"):
        check(tmp_path / "link")
    check(tmp_path / "new" / "run")
    # Not by chmod: tests may run as root, whom no permission stops.
    monkeypatch.setattr("os.access", lambda folder, mode: Path(folder) != tmp_path)
    with pytest.raises(ValueError, match="no permission in"):
        check(tmp_path / "new" / "run")


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "two"), ("RANK", "-1")])
def test_environment_that_is_not_torchruns(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for key, given in {"WORLD_SIZE": "2", "RANK": "0", name: value}.items():
        monkeypatch.setenv(key, given)
    with pytest.raises(ValueError, match=f"the environment has {name}='{value}', which must be a number"):
        torchrun_size()
    monkeypatch.delenv("RANK")
    assert torchrun_size() is None
