"""The page about balancing runs as it is printed, and its tables are those of the benchmarks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lrmoe.studies import replay_run

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "balancing.md"


def test_the_snippets_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS.parent)
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(snippets) == 4
    scope: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), scope)
    assert scope["kept"] == [200, 200, 200, 200]
    assert scope["lam_NGE"].shape == (40, 2, 32)
    assert [len(column) for column in scope["where"]] == [40, 40, 40]
    assert scope["placed"] == [450, 200, 150, 200]


def test_the_tables_of_traces_and_workloads_are_the_benchmarks() -> None:
    page, results = (path.read_text(encoding="utf-8") for path in (PAGE, DOCS / "results" / "README.md"))
    played = json.loads((DOCS / "results" / "replay.json").read_text())
    assert len(played) == 10
    for name, summary in played.items():
        assert len(summary["policies"]) == 18
        for drop, text in ((0.0, page), (0.2, results)):
            row = [replay_run.short_cell(record) for record in summary["policies"] if record["drop"] == drop]
            assert f"| {name} | {' | '.join(row)} |" in text
    timed = [replay_run.HEADINGS.index(name) for name in ("plan ms", "decide ms")]
    for record in played["trace"]["policies"]:
        row = [cell for place, cell in enumerate(replay_run.cells(record)) if place not in timed]
        assert f"| {' | '.join(row)} |" in results


def test_the_committed_trace_gives_the_committed_numbers() -> None:
    config = replay_run.ReplayConfig(trace=str(DOCS / "results" / "router_trace"), policies="ultraep,lrmoe", drop=0.0)
    records = replay_run.run_replay(config).summary()["policies"]
    played = json.loads((DOCS / "results" / "replay.json").read_text())["trace"]["policies"]
    for record in records:
        expected = next(one for one in played if (one["policy"], one["drop"]) == (record["policy"], 0.0))
        for name in ("forward_mean", "forward_p95", "replicas", "bytes", "memory", "against_fixed"):
            assert record[name] == pytest.approx(expected[name])
