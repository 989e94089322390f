"""The command line: exit codes, one-line errors, and that bad input leaves no file."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import lrmoe
from lrmoe.cli import main
from lrmoe.config import LRMoEConfig
from lrmoe.training.config import TrainConfig
from lrmoe.training.presets import PRESETS

TINY = ["--batch", "2", "--seq", "16", "--eval-sequences", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=259, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, max_position_embeddings=64, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "[bold]text.txt"
    path.write_text("a text to train on, " * 50)
    return str(path)


def run(*arguments: str) -> int:
    """Exit code of the command, argparse's own exits included."""
    try:
        return main([*arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    return lines[0]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"lrmoe {lrmoe.__version__}\n"


@pytest.mark.parametrize("verb", ["train", "compare", "report", "balance", "plan", "doctor"])
def test_help_of_every_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    assert "usage: lrmoe" in capsys.readouterr().out


def test_train_takes_every_setting_and_names_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--help") == 0
    shown = capsys.readouterr().out
    # The run gives the recalibration its seed and its length.
    names = {f.name for f in [*fields(TrainConfig), *fields(LRMoEConfig)]} - {"recalibration", "total_steps"}
    assert {name for name in names if f"--{name.replace('_', '-')}" not in shown} == set()
    assert all(preset in "".join(shown.split()) for preset in PRESETS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "--out"),
        (["train", "--out", "{out}", "--drop", "1.5"], "error: --drop 1.5 must be in"),
        (["train", "--out", "{out}", "--drop", "much"], "--drop"),
        (["train", "--out", "{out}", "--selector", "best"], "--selector"),
        (["train", "--out", "{out}", "--dorp", "0.2"], "--dorp"),
        (["train", "--out", "{out}", "--error-budget", "-1"], "--error-budget -1.0 must be"),
        (["train", "--out", "{out}", "--steps", "0"], "--steps 0 must be"),
        (["train", "--out", "{out}", "--model", "nothing"], "--model nothing is neither a preset"),
        (["train", "--out", "{out}", "--text", "{out}/nowhere"], "cannot be read"),
        (["train", "--out", "{out}", "--text", "{empty}"], "is empty"),
        (["train", "--out", "{out}", "--text", "{short}", "--seq", "64"], "has 100 tokens"),
        (["train", "--out", "{out}", "--text", "a\nb"], r"--text 'a\\nb' cannot be read"),
        (["train", "--out", "{out}", "--resume"], "no run to resume"),
        (["train", "--out", "{short}"], "is a file"),
        (["train", "--out", ""], "--out: the name is empty"),
        (["train", "--out", "{out}", "--text", ""], "--text '' names no file"),
        (["report", ""], "DIR: the name is empty"),
        (["compare", "--out", "{out}", "--variant", "x"], "has no name"),
        (["compare", "--out", "{out}", "--variant", "x: drop=2"], "drop=2"),
        (["compare", "--out", "{out}", "--seeds", "1,a"], "'1,a'"),
        (["compare", "--out", "{out}", "--seeds", "1,1"], "--seeds 1,1 must be"),
        (["compare", "--out", "{out}", "--jobs", "0"], "--jobs 0 must be"),
        (["compare", "--out", "{out}", "--model", "a", "--start-from", "b"], "exclude each other"),
        (["compare", "--out", "{out}", "--start-from", "{out}"], "--start-from .*out is neither a preset"),
        (["report", "{out}"], "not a folder"),
        (["doctor", "--model", "nothing"], "--model nothing is neither a preset"),
        (["no-such-verb"], "no-such-verb"),
        (["pressure"], "lrmoe pressure left the package .*: give python -m paper pressure, .* in a clone of LRMoE$"),
        (["pressure", "--help"], "give python -m paper pressure"),
        (["study", "anatomy"], "lrmoe study anatomy left the package .*: give python -m paper anatomy, "),
        (["study", "--out", "{out}", "time_to_loss", "--set", "ranks=2"], "give python -m paper time_to_loss, "),
        ([], "COMMAND"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("x" * 100)
    places = {"out": tmp_path / "out", "empty": tmp_path / "empty.txt", "short": tmp_path / "short.txt"}
    before = sorted(tmp_path.rglob("*"))
    assert run(*(re.sub(r"{(\w+)}", lambda m: str(places[m[1]]), a) for a in arguments)) == 2
    assert re.search(message, one_error_line(capsys))
    assert sorted(tmp_path.rglob("*")) == before


def test_train_resume_and_report(model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    given = ["train", "--model", model, "--text", text, "--steps", "3", "--drop", "0.5", "--log-every", "1", *TINY]
    assert run(*given, "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert "[bold]text.txt" in shown
    assert str(out / "report.html") in shown
    summary = json.loads((out / "summary.json").read_text())
    assert f"{summary['eval_loss']:.4f}" in shown
    assert json.loads((out / "config.json").read_text())["train"]["recalibration"]["drop"] == 0.5
    assert run(*given, "--out", str(out)) == 2
    assert "--resume" in one_error_line(capsys)
    assert run("train", "--out", str(out), "--resume", "--lr", "1") == 2
    assert "--lr 0.002, now 1.0" in one_error_line(capsys)
    assert run("train", "--out", str(out), "--resume") == 0, capsys.readouterr().err
    again = json.loads((out / "summary.json").read_text())
    assert (again["eval_loss"], again["train_loss"]) == (summary["eval_loss"], summary["train_loss"])
    (out / "report.html").unlink()
    assert run("report", str(out)) == 0
    assert (out / "report.html").stat().st_size > 1000


def test_diverged_run_ends_with_exit_code_1(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    given = ["train", "--model", model, "--text", text, "--steps", "20", "--log-every", "1", "--lr", "1e30", *TINY]
    assert run(*given, "--out", str(out)) == 1
    assert "lower --lr" in one_error_line(capsys)
    assert (out / "report.html").exists()


def test_compare_prints_and_writes_the_table(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c"
    given = ["compare", "--model", model, "--text", text, "--steps", "2", "--log-every", "1", "--seeds", "0,1", *TINY]
    variants = ["--variant", "half [red]: drop=0.5", "--variant", "budget: drop=0.5 error_budget=0"]
    assert run(*given, *variants, "--metric", "grad_norm", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    table = (out / "table.md").read_text()
    for name in ("C0", "half [red]", "budget"):
        assert name in shown
        assert f"| {name} |" in table
    stored = json.loads((out / "runs" / "half-red" / "seed-1" / "config.json").read_text())
    assert stored["train"]["recalibration"]["metric"] == "grad_norm"
    assert run("compare", "--out", str(out), "--resume") == 0
    assert (out / "table.md").read_text() == table


def test_doctor_lists_its_checks(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--model", model, "--drop", "0.5", "--selector", "topq") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok   ") for line in lines[:-1])
    assert any("gradients at drop=0.5 equal the loop" in line for line in lines)
    assert lines[-1] == f"{model}: {len(lines) - 1} checks, all is well"


def test_doctor_of_a_model_without_experts_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert run("doctor", "--model", str(tmp_path)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL layers found: no MoE layer") for line in lines)
    assert lines[-1].endswith("1 failed")


@pytest.mark.parametrize(
    ("verb", "package"),
    [(["train", "--out", "x"], "transformers"), (["compare", "--out", "x"], "rich"), (["report", "there"], "plotly")],
)
def test_missing_package_says_what_to_install(verb: list[str], package: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    code = f"import sys; sys.modules[{package!r}] = None; from lrmoe.cli import main; sys.exit(main({verb!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(lrmoe.__file__).parents[1]), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f'lrmoe {verb[0]}: error: this command needs {package}: in a clone of LRMoE, pip install -e ".[train]"'
    ]
    assert [path for path in tmp_path.iterdir() if path != tmp_path / "there"] == []


DAMAGED: list[tuple[str, dict[str, Any] | str, str]] = [
    ("train", "[" * 100_000, "cannot be read as JSON"),
    ("train", {}, "train=None"),
    ("train", {"train": []}, r"train=\[\]"),
    ("train", {"train": {}}, "train.recalibration=None"),
    ("train", {"train": {"recalibration": {}}}, "corpus=None"),
    ("train", {"train": {"recalibration": {}}, "corpus": {"sha256": ""}}, "not of this version of lrmoe"),
    ("compare", {"train": {"recalibration": {}}, "corpus": {"sha256": ""}}, "variants=None"),
    (
        "compare",
        {
            "train": {"recalibration": {}}, "corpus": {"sha256": ""}, "variants": [1], "seeds": [0],
            "pretrain_steps": 0,
        },
        "variant 1 has no name",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "stored", "message"), DAMAGED)
def test_a_damaged_run_is_not_resumed(
    verb: str, stored: dict[str, Any] | str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = stored if isinstance(stored, str) else json.dumps({"command": verb, **stored})
    (tmp_path / "config.json").write_text(text)
    assert run(verb, "--out", str(tmp_path), "--resume") == 2
    assert re.search(message, one_error_line(capsys))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes only there")
def test_names_that_are_not_utf_8_are_shown_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    out = tmp_path / os.fsdecode(b"caf\xe9")
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"command": "train", "corpus": {"source": os.fsdecode(b"\xe9.txt")}}))
    (out / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    said = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(said, encoding="ascii", write_through=True))
    assert run("report", str(out)) == 0
    assert rb"caf\udce9" in said.getvalue()
    assert r"\udce9.txt" in (out / "report.html").read_text(encoding="utf-8")
