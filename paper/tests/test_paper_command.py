"""The command line of the paper: what it needs to answer, how it names what was typed, and where the package's is."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lrmoe import moved
from lrmoe.cli import LRMOE
from lrmoe.studies.study_config import NAMES
from paper.__main__ import PAPER, main
from paper.catalog import CATALOG

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "accelerate", "plotly", "tensorboard", "rich", "numpy")
COMMAND = f"""
import sys
from paper.__main__ import PAPER, main
try:
    code = main(sys.argv[1:], PAPER)
except SystemExit as stop:
    code = stop.code or 0
print("imported:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, in which nothing is imported yet."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of an error."""
    assert main(arguments, PAPER) == 2
    line, end = capsys.readouterr().err.split("\n")
    assert end == ""
    return line


@pytest.mark.parametrize("verb", [[], *([verb] for verb in PAPER.verbs)], ids=" ".join)
def test_w3_help_imports_nothing_heavy(verb: list[str]) -> None:
    done = python(*verb, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m paper")
    assert done.stderr.split() == ["imported:"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["pressur"],
        ["pressure", "--min-keep", "0"],
        ["anatomy", "--out", "x", "--steps", "1"],
        ["report", "nowhere"],
    ],
    ids=" ".join,
)
def test_w3_bad_arguments_are_told_before_anything_heavy_is_imported(arguments: list[str], tmp_path: Path) -> None:
    done = python(*arguments, cwd=tmp_path)
    error, imported = done.stderr.splitlines()
    assert done.returncode == 2
    assert done.stdout == ""
    assert error.startswith("python -m paper")
    assert ": error: " in error
    assert imported.split() == ["imported:"]
    assert list(tmp_path.iterdir()) == []


def test_python_m_paper_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paper", "--version"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("lrmoe ")


def test_what_left_the_package_is_here_and_there_no_more() -> None:
    assert set(moved.VERBS) | set(moved.STUDIES) <= set(PAPER.verbs)
    assert set(moved.STUDIES) <= set(CATALOG)
    assert not set(moved.VERBS) & set(LRMOE.verbs)
    assert not set(moved.STUDIES) & set(NAMES)


def test_the_package_does_not_know_the_paper() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if name.partition(".")[0] == "paper"], path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pressure", "--policies", "nobody"], "--policies nobody: 'nobody' is not known"),
        (["time_to_loss", "--out", "x", "--set", "ranks=0"], "error: ranks=0 must be an integer >= 1"),
    ],
)
def test_w6_errors_name_options_as_typed(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in said(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_w10_all_that_is_wrong_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = said(capsys, "pressure", "--at", "0", "--min-keep", "0", "--floor", "0")
    for number, part in enumerate(["--at 0.0", "--min-keep 0.0", "--floor 0"], start=1):
        assert f"({number}) " in error
        assert part in error
    assert "(4) " not in error


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["time_to_loss", "--set", "ranks=0"], "ranks=0"),
        (["time_to_loss", "--model", "x"], "--model x is no setting of the study time_to_loss"),
        (["scale", "--regimes", "fine_tune"], "is no setting of the study scale"),
        (["recipes", "--regimes", "scratch"], "is no setting of the study recipes"),
        (["anatomy", "--set", "rates=2"], "rates=2"),
        (["anatomy", "--set", "speed=2"], "--set 'speed=2' is not FIELD=VALUE"),
        (["anatomy", "--text", "nowhere"], "--text nowhere cannot"),
        (["anatomy", "--set", "text=5"], "--text 5 cannot be read"),
        (["anatomy", "--seeds", "0,-1"], "--seeds -1 must"),
        (["time_to_loss", "--text", "nowhere"], "--text nowhere cannot"),
        (["time_to_loss", "--set", "drops=many"], "drops='many' must be a number"),
        (["time_to_loss", "--set", "targets=none"], "targets=None must be a number"),
    ],
)
def test_settings_that_only_one_study_has(
    wrong: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in said(capsys, *wrong, "--out", str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("anatomy", "table.md", r"table.md is a folder, where a file belongs"),
        ("time_to_loss", "cells", "cannot be made: "),
    ],
)
def test_what_a_study_would_trip_over_at_its_end_is_told_first(
    name: str, entry: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"command": "study", "study": name}))
    (tmp_path / entry).write_text("") if entry == "cells" else (tmp_path / entry).mkdir()
    before = sorted(tmp_path.iterdir())
    assert message in said(capsys, name, "--steps", "20", "--seq", "16", "--out", str(tmp_path))
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_of_another_command_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"command": "plan"}))
    error = said(capsys, "pressure", "--out", str(tmp_path), "--overwrite")
    assert "was not written by python -m paper pressure (config.json says 'plan')" in error
    assert "was not written by python -m paper anatomy" in said(capsys, "anatomy", "--out", str(tmp_path))
