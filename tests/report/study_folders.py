"""A small study as ``lrmoe study`` writes it, with made-up numbers and hostile names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lrmoe.studies.results import Column, Figure, Series, StudyResult, Table

EVIL = "<img src=x onerror=alert(1)>"


def study_result(**changes: Any) -> StudyResult:
    """Two tables, and a chart of each kind: lines with bars and a band, points by category, logarithmic axes."""
    columns = [
        Column(key="variant", label="variant", form="text"),
        Column(key="loss", label="validation loss, nats a token", form="4"),
        Column(key="difference", label="minus no drop", form="+4", meaning="mean of the paired differences"),
        Column(key="each", label="each seed", form="text"),
        Column(key="kept", label="kept pairs", form="percent"),
        Column(key="steps", label="steps", form="integer"),
        Column(key="time", label="against fixed", form="ratio", meaning="time over that of fixed ownership"),
    ]
    rows = [
        {"variant": "C0", "loss": 3.21, "difference": 0.0, "each": "", "kept": 1.0, "steps": 1200, "time": 1.0},
        {
            "variant": f"C20 pps {EVIL}",
            "loss": 3.2187654,
            "difference": -0.00123,
            "each": "-0.0020, -0.0004",
            "kept": 0.8,
            "steps": 1200,
            "time": 0.876,
        },
        {
            "variant": "C50",
            "loss": float("nan"),
            "difference": None,
            "each": "",
            "kept": 0.5,
            "steps": 1200,
            "time": None,
        },
    ]
    tables = [
        Table(
            name="scratch",
            title="From scratch",
            settings={"model": "qwen3-moe-nano", "steps": 1200, "text": EVIL},
            columns=columns,
            rows=rows,
            note="The seeds of no drop lie 0.0150 apart.",
        ),
        Table(name="near-zero", title="Near zero loss", settings={}, columns=columns[:3], rows=rows[:1]),
    ]
    figures = [
        Figure(
            name="rate",
            title=f"Loss above no drop {EVIL}",
            reading="Inside the shaded band a difference is no larger than the seed spread.",
            x_label="pairs left out, %",
            y_label="loss minus no drop, nats a token",
            series=[
                Series(
                    name="pps", x=[10, 20, 50], y=[0.001, 0.002, 0.03], low=[0, -0.01, 0.02], high=[0.01, 0.01, 0.05]
                ),
                Series(name=EVIL, x=[10, 20, 50], y=[0.004, 0.01, None]),
            ],
            band=(-0.015, 0.015),
            band_label="seed spread of no drop",
        ),
        Figure(
            name="by-regime",
            title="By regime",
            reading="Each point is a regime.",
            x_label="regime",
            y_label="difference, nats a token",
            series=[
                Series(
                    name=name,
                    x=["from scratch with warm-up", "near zero", "fine-tuning"],
                    y=[shift, shift + 0.01, shift - 0.01],
                    low=[shift - 0.01] * 3,
                    high=[shift + 0.02] * 3,
                    kind="points",
                )
                for name, shift in (("pps", 0.0), ("topq", 0.02), ("random", 0.01))
            ],
        ),
        Figure(
            name="error",
            title="Error against batches",
            reading="A straight line falls with the root of the batches.",
            x_label="batches",
            y_label="relative error",
            series=[Series(name="no drop", x=[1, 10, 100], y=[1.0, 0.3, 0.0])],
            log_x=True,
            log_y=True,
        ),
    ]
    values: dict[str, Any] = {
        "study": "ablation",
        "title": "Which pairs to keep",
        "question": "Does the loss hold when a part of the backward is left out?",
        "tables": tables,
        "figures": figures,
        "conclusions": ["20 % dropped costs -0.0012 with pps.", f"Nothing of {EVIL} is markup."],
        "advice": ["Use pps at 20 %."],
        "provenance": {
            "command": "lrmoe study ablation --seeds 0,1 --out runs/studies/ablation",
            "versions": {"torch": "2.13.0", "lrmoe": "0.1.0"},
            "machine": {"system": "Linux", "cores": 2},
            "runs": 6,
            "run_seconds": 1234.5,
        },
    }
    return StudyResult(**{**values, **changes})


def study_folder(folder: Path, **changes: Any) -> Path:
    """What a finished study leaves."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"command": "study", "study": "ablation", "settings": {}}))
    (folder / "summary.json").write_text(json.dumps(study_result(**changes).to_dict()))
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder
