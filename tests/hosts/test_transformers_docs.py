"""The page about Transformers runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch


def test_the_documentation_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(snippets) == 5
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    trained: list[dict[str, torch.Tensor]] = []
    for snippet in snippets:
        exec(compile(snippet, "docs/transformers.md", "exec"), scope)
        trained.append({name: tensor.clone() for name, tensor in scope["model"].state_dict().items()})
    assert scope["exact"].config._experts_implementation == "lrmoe"
    assert "kept 0.80 of the pairs" in capsys.readouterr().out
    # The resumed run ends where the uninterrupted one did, in units of how far that went. Not to the bit everywhere:
    # what from_pretrained maps from a file lies at other addresses, and some products round by them.
    before, whole, resumed = (torch.cat([tensor.flatten() for tensor in trained[n].values()]) for n in (1, 2, 3))
    assert (resumed - whole).norm() < 1e-3 * (whole - before).norm()
