"""Files of a run folder: what is read back, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from lrmoe.training.files import read_json, read_records


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


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, "\ufeff{}"])
def test_what_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"config.json (cannot be read as JSON|must hold one JSON object)"):
        read_json(path)
