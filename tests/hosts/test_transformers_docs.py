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
    # The resumed run ends where the uninterrupted one did.
    assert all(torch.equal(tensor, trained[2][name]) for name, tensor in trained[3].items())
