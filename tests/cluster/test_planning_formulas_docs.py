"""The formulas' page: its example runs and its figures are the model's."""

from __future__ import annotations

import re
from pathlib import Path

from lrmoe import cluster

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def test_the_example_runs() -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    example = next(snippet for snippet in snippets if "cluster.layer_time" in snippet)
    names: dict[str, object] = {}
    exec(example, names)
    layer = names["layer"]
    assert isinstance(layer, cluster.LayerTime)
    assert 0 < layer.balanced <= layer.seconds


def test_figures_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    tokens = 1 << 15
    pair = (cluster.token_buffers(cluster.model("qwen3-30b-a3b"), tokens=tokens).saved_bytes - 8) / (8 * tokens) + 8
    assert f"= {pair:.0f} bytes" in text
    for kind in ("qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe"):
        assert f"`{kind}`" in text
