"""Presets and one's own hardware."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from lrmoe.cluster import Hardware, hardware

FIELDS = {
    "flops": 4e14,
    "memory_bytes": 8e10,
    "memory_bandwidth": 2e12,
    "intra_bytes_per_s": 2e11,
    "inter_bytes_per_s": 2.5e10,
}


@pytest.mark.parametrize("name", ["H100", "h200", "A100"])
def test_presets_say_where_they_are_from(name: str) -> None:
    found = hardware(name)
    assert found.name == name.upper()
    assert "data sheet" in found.source
    assert found.intra_bytes_per_s > found.inter_bytes_per_s


def toml(fields: dict[str, object]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")
def test_ones_own_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(toml({**FIELDS, "ranks_per_node": 4}))
    found = hardware(path)
    assert (found.name, found.flops, found.ranks_per_node) == ("mine", 4e14, 4)
    path.write_text("flops = \n")
    with pytest.raises(ValueError, match=r"mine\.toml cannot be read"):
        hardware(path)


def test_ones_own_in_json_comes_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    mine = Hardware(name="cluster", **FIELDS, glu_bytes_per_s=1e9)
    path.write_text(json.dumps(asdict(mine)))
    assert hardware(str(path)) == mine
    path.write_text("[]")
    with pytest.raises(ValueError, match="holds list"):
        hardware(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": -1}, "flops=-1 must be a finite number above 0"),
        ({"memory_bytes": "80GB"}, "memory_bytes='80GB' must be a number"),
        ({"gemm_efficiency": 1.5}, "gemm_efficiency=1.5 must be at most 1"),
        ({"ranks_per_node": 0}, "ranks_per_node=0 must be an integer >= 1"),
        ({"latency_s": -1e-6}, "latency_s=-1e-06 must be a finite number >= 0"),
        ({"glu_bytes_per_s": 0}, "glu_bytes_per_s=0 must be a finite number above 0"),
        ({"flop": 1}, "flop is no field of a hardware; they are flops"),
        ({"name": 3}, "name=3 must be text"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**FIELDS, **change}))
    with pytest.raises(ValueError, match=message) as error:
        hardware(path)
    assert "mine.json" in str(error.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({name: value for name, value in FIELDS.items() if name != "flops"}))
    with pytest.raises(ValueError, match="flops is missing"):
        hardware(path)
    with pytest.raises(ValueError, match=r"hardware='b200' is no preset \(h100, h200, a100\)"):
        hardware("b200")
