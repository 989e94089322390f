"""Plants a fault in a copy of the source, and sees whether the tests notice."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

CAUGHT, MISSED, STALE, TIMEOUT, BROKEN = "caught", "MISSED", "stale", "timeout", "broken"

# What a test fails with where the fault does not even run: that is no catch.
_NOT_RUN = re.compile(r"^E .*\b(?:ImportError|ModuleNotFoundError|SyntaxError|NameError|UnboundLocalError)\b.*", re.M)
_SUMMARY = "short test summary info"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.M)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A wrong step of a refactoring.

    Args:
        name: letters, digits and dashes.
        why: what is wrong with it, in a few words.
        edits: (old, new) texts. Each ``old`` occurs once in the source, in whatever file.
        tests: files or folders that are to notice, as pytest takes them.
    """

    name: str
    why: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of it: ``result``, the first ``test`` that failed, what was ``said``, and how long it took."""

    result: str
    test: str = ""
    said: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        where = f" by {self.test}" if self.test else ""
        return f"{self.result}{where}, {self.seconds:.0f} s" + (f"\n    {self.said}" if self.said else "")


def try_fault(fault: Fault, *, timeout_s: float) -> Outcome:
    """Runs the fault's tests on a copy of the source that has it."""
    with _copy() as copy:
        if stale := _plant(fault.edits, copy):
            return Outcome(result=STALE, said=stale)
        return _run(fault.tests, copy, timeout_s)


def try_nothing(faults: Sequence[Fault], *, timeout_s: float) -> Outcome:
    """Runs all their tests on the source as it is: they have to pass, so that a failure means the fault."""
    tests = sorted({test for fault in faults for test in fault.tests})
    with _copy() as copy:
        return _run(tests, copy, timeout_s * len(tests))


@contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lrmoe-fault-") as scratch:
        # Tests find other files of the project beside the source.
        for entry in ROOT.iterdir():
            if entry != SOURCE:
                (Path(scratch) / entry.name).symlink_to(entry)
        # With the compiled files, which stay those of what is not changed.
        yield Path(shutil.copytree(SOURCE, Path(scratch) / "src"))


def _plant(edits: Sequence[tuple[str, str]], copy: Path) -> str:
    """Makes the edits; returns why one of them has no place, or nothing."""
    for old, new in edits:
        places = {path: text.count(old) for path in _texts(copy) if old in (text := _read(path))}
        if (count := sum(places.values())) != 1:
            return f"{old!r} occurs {count} times in the source"
        (path,) = places
        path.write_text(_read(path).replace(old, new), encoding="utf-8")
    return ""


def _texts(copy: Path) -> list[Path]:
    return [path for path in sorted((copy / "lrmoe").rglob("*")) if path.is_file() and path.suffix != ".pyc"]


def _read(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")


def _run(tests: Sequence[str], copy: Path, timeout_s: float) -> Outcome:
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    asked = [sys.executable, "-c", "import lrmoe; print(lrmoe.__file__)"]
    imported = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    if not Path(imported.strip()).is_relative_to(copy):
        raise RuntimeError(f"tests would import lrmoe from {imported.strip()}, not from the copy at {copy}")
    options = ["-x", "-q", "-o", "addopts=", "-m", "not slow", "-p", "no:cacheprovider", "--tb=short", "-rfE"]
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # With the ranks that tests start, which end with it.
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Outcome(result=TIMEOUT, seconds=time.monotonic() - start)
    return _outcome(process.returncode, output, time.monotonic() - start)


def _outcome(code: int, output: str, seconds: float) -> Outcome:
    if code == 0:
        return Outcome(result=MISSED, seconds=seconds)
    failed = _FAILED.search(output, output.find(_SUMMARY))
    test, said = (failed[1], failed[2] or "") if failed else ("", "\n".join(output.splitlines()[-5:]))
    not_run = _NOT_RUN.search(output)
    # 1: a test failed. All else: pytest could not collect them, or found none.
    if code != 1 or not_run:
        return Outcome(result=BROKEN, test=test, said=not_run[0].strip() if not_run else said, seconds=seconds)
    return Outcome(result=CAUGHT, test=test, said=said, seconds=seconds)
