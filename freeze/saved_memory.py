"""Saved bytes and temporaries of a layer, by ``benchmarks/memory.py``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from freeze import records

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "memory.py"


def save(folder: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        records.write(folder, dtype, lambda dtype=dtype: _rows(dtype))  # type: ignore[misc]


def _rows(dtype: str) -> Any:
    shape = [f"--{name}={value}" for name, value in {"T": 96, "D": 64, "F": 32, "E": 8, "K": 2}.items()]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "memory.json"
        command = [sys.executable, str(SCRIPT), *shape, "--dtype", dtype, "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text(encoding="utf-8"))["rows"]
