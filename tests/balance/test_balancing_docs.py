"""The page about balancing runs as it is printed, and its table is the one of the benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lrmoe.studies.skew import cells

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "balancing.md"


def test_the_snippets_run() -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(snippets) == 3
    scope: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), scope)
    assert scope["kept"] == [200, 200, 200, 200]
    assert scope["placed"] == [450, 200, 150, 200]


def test_the_table_is_the_benchmarks() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for record in json.loads((DOCS / "results" / "balance.json").read_text())["records"]:
        assert f"| {' | '.join(cells(record))} |" in page
