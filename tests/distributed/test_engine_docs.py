"""The page about the engine runs as it is printed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from distributed.world import run_world

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def printed(group: dist.ProcessGroup, folder: str) -> tuple[float, dict[str, Any]]:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    scope: dict[str, Any] = {}
    # The second one is for four GPUs or more; test_fsdp.py does the same.
    assert len(snippets) == 3
    exec(compile(snippets[0], str(PAGE), "exec"), scope)
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(compile(snippets[2], str(PAGE), "exec"), scope)
    finally:
        os.chdir(before)
    assert scope["step"] == 5
    return scope["metrics"]["kept_share"], scope["ep"].metrics()


def test_the_documentation_runs(tmp_path: Path) -> None:
    for kept_share, planned in run_world(2, printed, str(tmp_path)):
        # Two of five steps are warm-up.
        assert abs(kept_share - (2 + 3 * 0.8) / 5) < 0.01
        assert planned["plans"] in (0, 10)
