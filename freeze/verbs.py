"""What the command line prints and writes at small settings."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from freeze import records

ROOT = Path(__file__).parents[1]
TRAIN = "--model qwen3-moe-nano --text text --batch 2 --seq 32 --eval-sequences 4"
RUN = f"train {TRAIN} --steps 6 --log-every 3 --eval-every 3 --save-every 3 --report-to none"
SMALL = "--text text --steps 20 --batch 2 --seq 32 --memorize-bytes 256"
VERBS = {
    "help": "--help",
    "train": f"{RUN} --trace --out train",
    "train_input": f"{RUN} --save input --remainder mean --gradient-checkpointing --grad-accum 2 --out train_input",
    "train_guard": f"{RUN} --drop 0.6 --selector topq --warmup-steps 2 --out train_guard",
    "train_glm": f"{RUN} --model glm4-moe-tiny --router-grad exact --out train_glm",
    "train_ranks": f"{RUN} --ep 2 --policy lrmoe --slots 1 --trace --out train_ranks",
    "train_symi": f"{RUN} --ep 2 --policy symi --out train_symi",
    "report": "report train",
    "compare": f"compare {TRAIN} --steps 20 --log-every 5 --eval-every 10 --seeds 0,1 --out compare",
    "plan": "plan --out plan",
    "plan_trace": "plan --trace train_ranks --quota level --recompute --steps 4 --budget-gib 1 --out plan_trace",
    "plan_short": "plan --budget-gib 40 --skew 3 --draws 2 --max-drop 0.3 --out plan_short",
    "pressure": "paper pressure --draws 2 --pressures 1,4,12,20,30 --out pressure",
    "balance": "balance --skew 2 --out balance",
    "balance_shape": "balance --shape hot_rank --drop 0.3 --slots 2 --capacity 600 --out balance_shape",
    "balance_workload": "balance --workload rotating --steps 12 --out balance_workload",
    "balance_trace": "balance --trace train_ranks --out balance_trace",
    "doctor": "doctor --model qwen3-moe-nano --device cpu",
    "index": "report .",
    "paper_index": "paper report .",
    "bad_value": "train --drop 20 --out never",
    "bad_name": "study nope --out never",
    "bad_folder": "report nowhere",
}
STUDIES = {
    "ablation": "--seeds 0 --regimes scratch,near_zero,fine_tune",
    "router_gradient": "--seeds 0,1",
    "quota": "--seeds 0,1",
    "error_budget": "--seeds 0",
    "schedule": "--seeds 0",
    "remainder": "--seeds 0,1",
}
PAPER = {
    "recipes": "--seeds 0",
    "scale": "--seeds 0",
    "anatomy": "--seeds 0 --regimes scratch --set probe_steps=2,20 --set batches=2",
}
TIME_TO_LOSS = (
    "paper time_to_loss --out study_time_to_loss --text text --steps 8 --set eval_every=4 --set lr_warmup_steps=2"
)
# Of a record: what another run may have otherwise, first of those that measure nothing (their times are modelled).
VOLATILE = re.compile(r"date|machine|version|created|torch$|python|planning_(ms|seconds)")
MEASURED = re.compile(VOLATILE.pattern + r"|second|_s$|_ms$|time|minutes|wall|when")
STAMPS = re.compile(r"\d{4}-\d\d-\d\d[ T][\d:]+( UTC)?|\bv?\d+\.\d+\.\d+(\+\w+)?")
TIMES = re.compile(STAMPS.pattern + r"|[\d.,]+\s?(ms|µs|s|min|minutes|seconds|h)\b")
ON_PAPER = ("plan", "pressure", "balance")


def save_verbs(folder: Path) -> None:
    for case, command in VERBS.items():
        records.write(folder, case, lambda c=command: _carried_out(c, folder.parent / "scratch"))  # type: ignore[misc]


def save_studies(folder: Path) -> None:
    scratch = folder.parent / "scratch"
    for case, options in (STUDIES | PAPER).items():
        command = f"{'study' if case in STUDIES else 'paper'} {case} --out study_{case} --cells cells {SMALL} {options}"
        records.write(folder, case, lambda c=command: _carried_out(c, scratch))  # type: ignore[misc]
    records.write(folder, "time_to_loss", lambda: _untimed(_carried_out(TIME_TO_LOSS, scratch)))


def _untimed(record: dict[str, Any]) -> dict[str, Any]:
    """Of a study whose tables are times but for a few columns: these columns."""
    timed = re.compile(r"over |steady|range|ratio|quickest|fastest|wins|beaten|answer|apart")
    lines = record["files"]["metrics.jsonl"]
    rows = [{key: value for key, value in line.items() if not timed.search(key)} for line in lines]
    return {"exit": record["exit"], "files": sorted(record["files"]), "rows": rows}


def _carried_out(command: str, scratch: Path) -> dict[str, Any]:
    """Runs ``lrmoe``, or ``python -m paper`` where that is the first word, in a folder of its own beside the records,
    and reads all that it left."""
    scratch.mkdir(parents=True, exist_ok=True)
    _make_text(scratch / "text")
    words = command.split()
    module = words.pop(0) if words[0] == "paper" else "lrmoe.cli"
    out = scratch / (words[words.index("--out") + 1] if "--out" in words else words[1] if words[0] == "report" else "-")
    if "--out" in words:
        shutil.rmtree(out, ignore_errors=True)
    run = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=scratch, capture_output=True, text=True, check=False,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1",
             "PYTHONPATH": os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])},
    )  # fmt: skip
    settled = Settled(*((VOLATILE, STAMPS) if words[0] in ON_PAPER else (MEASURED, TIMES)))
    files = {}
    if out.is_dir() and words != ["report", "."]:
        files = {
            str(path.relative_to(out)): _read(path, settled) for path in sorted(out.rglob("*")) if _tells(path, out)
        }
    elif words == ["report", "."]:
        files = {path.name: _read(path, settled) for path in sorted(scratch.glob("*.html"))}
    printed = {name: settled.lines(text) for name, text in (("stdout", run.stdout), ("stderr", run.stderr))}
    if words[0] == "balance" and {"--trace", "--workload"} & set(words):
        # With a column of measured times among the others; the records have them all.
        del printed["stdout"]
    return {"exit": run.returncode, **printed, "files": files}


def _make_text(folder: Path) -> None:
    """Words of a small vocabulary, the same on every machine."""
    if folder.exists():
        return
    folder.mkdir()
    generator = np.random.Generator(np.random.PCG64(0))
    words = ["".join(chr(97 + letter) for letter in generator.integers(0, 26, 2 + number % 7)) for number in range(400)]
    for number in range(3):
        chosen = generator.zipf(1.3, 30_000) % len(words)
        (folder / f"{number}.txt").write_text(
            "\n".join(" ".join(words[word] for word in chosen[at : at + 12]) for at in range(0, len(chosen), 12)),
            encoding="utf-8",
        )


def _tells(path: Path, out: Path) -> bool:
    """Whether a file is a result, and not the state to go on from."""
    inside = path.relative_to(out).parts
    if "checkpoints" in inside:
        return path.suffix == ".safetensors"
    return path.is_file() and "cells" not in inside and "tensorboard" not in inside and not path.name.startswith(".")


def _read(path: Path, settled: Settled) -> Any:
    if path.suffix == ".json":
        return settled.record(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".jsonl":
        return [settled.record(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.suffix == ".html":
        page = Page(settled)
        page.feed(path.read_text(encoding="utf-8"))
        return {"words": page.words, "tables": page.tables, "data": page.data}
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: hashlib.sha256(arrays[name].tobytes()).hexdigest() for name in sorted(arrays)}
    if path.suffix in (".md", ".txt"):
        return settled.lines(path.read_text(encoding="utf-8"))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Settled:
    """Records and text without what another run has otherwise: keys of records, and words."""

    keys: re.Pattern[str]
    words: re.Pattern[str]

    def record(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.record(inner) for key, inner in value.items() if not self.keys.search(key)}
        if isinstance(value, list):
            return [self.record(inner) for inner in value]
        return self.words.sub("TIME", value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        return " ".join(self.words.sub("TIME", text).split())

    def lines(self, text: str) -> list[str]:
        """Without what only the width of a column changes: rules and runs of blanks."""
        settled = (re.sub(r"[\s─━┄-]{2,}", "  ", self.words.sub("TIME", line)).strip() for line in text.splitlines())
        return [line for line in settled if line and "left)" not in line]


class Page(HTMLParser):
    """Words, cells of tables, and the data of the figures, without the markup around them."""

    def __init__(self, settled: Settled) -> None:
        super().__init__()
        self._settled = settled
        self.words: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.data: Any = None
        self._in: list[str] = []
        self._is_data = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._in.append(tag)
        self._is_data = tag == "script" and ("id", "page-data") in attributes
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("td", "th") and self.tables and self.tables[-1]:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while tag in self._in and self._in.pop() != tag:
            pass

    def handle_data(self, text: str) -> None:
        if self._is_data:
            self.data = self._settled.record(json.loads(text))
            self._is_data = False
        elif "script" in self._in or "style" in self._in or not text.strip():
            return
        elif ("td" in self._in or "th" in self._in) and self.tables and self.tables[-1] and self.tables[-1][-1]:
            self.tables[-1][-1][-1] += self._settled.text(text)
        else:
            self.words.append(self._settled.text(text))
