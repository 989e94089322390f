"""The page about the engine runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from distributed.world import run_world

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def printed(group: dist.ProcessGroup) -> tuple[float, dict[str, Any]]:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    scope: dict[str, Any] = {}
    # The second one is for four GPUs or more; test_fsdp.py does the same.
    assert len(snippets) == 2
    exec(compile(snippets[0], str(PAGE), "exec"), scope)
    return scope["metrics"]["kept_share"], scope["ep"].metrics()


def test_the_documentation_runs() -> None:
    for kept_share, planned in run_world(2, printed):
        # Two of five steps are warm-up.
        assert abs(kept_share - (2 + 3 * 0.8) / 5) < 0.01
        assert planned["plans"] in (0, 10)
