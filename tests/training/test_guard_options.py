"""The guard's limits as options and in variants, and what a run's summary says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lrmoe.cli import main, parsers
from lrmoe.studies.variants import parse_variant
from lrmoe.training.config import TrainConfig
from lrmoe.training.summary import summarize


def test_limits_are_numbers_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = parsers()[0].parse_args(["train", "--out", "x", "--guard-variance", "none", "--guard-tail", "0.02"])
    assert (given.guard_variance, given.guard_tail) == (None, 0.02)
    variant = parse_variant("free: drop=0.5 guard_variance=none guard_tail=0.1")
    assert variant.settings == {"drop": 0.5, "guard_variance": None, "guard_tail": 0.1}
    out = tmp_path / "run"
    assert main(["train", "--out", str(out), "--guard-variance", "never"]) == 2
    assert "'never' is neither a number nor none" in capsys.readouterr().err
    assert main(["train", "--out", str(out), "--guard-tail", "-1"]) == 2
    assert "--guard-tail -1.0 must be a finite number above 0" in capsys.readouterr().err
    assert not out.exists()


def test_the_summary_names_the_layers_that_were_stopped(tmp_path: Path) -> None:
    def event(layer: str, kind: str) -> dict[str, object]:
        return {"step": 10, "layer": layer, "kind": kind, "value": 0.2, "limit": 0.1}

    line = {"step": 10, "loss": 1.0, "forward_seconds": 0.1, "backward_seconds": 0.1, "seconds": 1.0}
    lines = [
        {**line, "guard_events": [event("b", "stopped"), event("a", "stopped")]},
        # Of a run from before there was a guard.
        {**line, "step": 20},
        {**line, "step": 30, "guard_events": [event("b", "resumed"), event("c", "resumed"), event("b", "stopped")]},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summarize(TrainConfig(), tmp_path, diverged_at=None)["guarded"] == ["b", "a"]
