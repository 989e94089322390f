"""Files of a run folder: written whole or not at all, read back after a kill."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lrmoe import strict_json

# What a run or a comparison writes into its folder; nothing else is ever deleted.
OWN_FILES = ("config.json", "metrics.jsonl", "summary.json", "table.md", "report.html")
OWN_FOLDERS = ("checkpoints", "tensorboard", "wandb", "trace", "pretrained", "runs")
OWN_ENTRIES = (*OWN_FILES, *OWN_FOLDERS)
LOCK = "run.lock"


def write_text(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in one move: a reader sees the old file or the new one.

    Raises:
        ValueError: if ``path`` is a folder.
    """
    check_file(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Names that the system does not decode come as lone surrogates, which no UTF-8 file can hold.
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_file(path: Path) -> None:
    """Checks what lies at ``path``, if anything does.

    Raises:
        ValueError: if it is a folder, or something else that is no file.
    """
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "not a regular file"
        raise ValueError(f"{path} is {what}, where a file belongs; move it away or delete it")


def check_entries(out: Path) -> None:
    """Checks what a command finds of its own in ``out`` before it goes on there.

    Raises:
        ValueError: if a folder lies where a file of a run belongs, or a file where a folder does.
    """
    for name in OWN_FILES:
        check_file(out / name)
    for name in OWN_FOLDERS:
        if (out / name).exists() and not (out / name).is_dir():
            raise ValueError(f"{out / name} is a file, where a folder belongs; move it away or delete it")


def write_json(path: Path, value: object) -> None:
    """Writes ``value`` indented; numbers that are not finite as :mod:`lrmoe.strict_json` does."""
    write_text(path, strict_json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Reads one JSON object.

    Raises:
        ValueError: if the file is missing, malformed or not an object.
    """
    check_file(path)
    try:
        value = strict_json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give the folder that lrmoe train or lrmoe compare wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold one JSON object")
    return value


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Replaces a JSON-lines file by ``records``."""
    write_text(path, "".join(strict_json.dumps(record) + "\n" for record in records))


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Adds one line to a JSON-lines file, in one write."""
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write(strict_json.dumps(record) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; none if it is missing. A last line cut short by a kill is left out.

    Raises:
        ValueError: for any other malformed line, with its number; a record is an object with a step. Also if the file
            is not UTF-8 text, or no file.
    """
    if not path.exists():
        return []
    check_file(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = strict_json.loads(line)
        except (ValueError, RecursionError) as error:
            # Every complete line ends with a newline, so the text after the last one is a torn write.
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not valid JSON: {error}") from None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise ValueError(f"{path}, line {number}: not an object with an integer step")
        records.append(record)
    return records


def check_out_folder(out: Path, *, command: str, resume: bool, overwrite: bool, program: str = "lrmoe") -> None:
    """Checks, without touching anything, that a run may write into ``out``.

    Raises:
        ValueError: if ``out`` is a file, is not empty and neither option is given, is to be overwritten although no
            run wrote it, or is to be resumed although there is nothing to resume, or what is there is a folder where a
            file belongs.
    """
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other; give one")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file; give a folder")
    check_can_be_made(out)
    entries = [entry.name for entry in out.iterdir() if not is_passing(entry.name)] if out.is_dir() else []
    if resume:
        if "config.json" not in entries:
            raise ValueError(f"out={str(out)!r} holds no run to resume (no config.json); leave out --resume")
    elif entries and not overwrite:
        raise ValueError(
            f"out={str(out)!r} is not empty; give another folder, --resume to continue the run in it or --overwrite "
            "to delete that run"
        )
    if (resume or (overwrite and entries)) and "config.json" in entries:
        stored = read_json(out / "config.json")
        found = stored.get("command")
        if found != command:
            raise ValueError(f"out={str(out)!r} was not written by {program} {command} (config.json says {found!r})")
        if resume:
            check_entries(out)
            _check_stored(stored, out / "config.json")
    elif overwrite and entries:
        raise ValueError(f"out={str(out)!r} holds no run (no config.json), so --overwrite will not delete it")


def is_passing(name: str) -> bool:
    """Whether an entry of a folder is a lock, or what a kill left of a file that was being written."""
    return name == LOCK or re.fullmatch(r"\..+\.\d+\.tmp", name) is not None


def check_can_be_made(out: Path, *, field: str = "out") -> None:
    """Checks that ``out`` is a folder that can be written to, or can become one.

    Raises:
        ValueError: naming ``field`` and what is in the way.
    """
    if out.is_symlink() and not out.exists():
        raise ValueError(f"{field}={str(out)!r} is a link to nothing; give a folder")
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise ValueError(f"{field}={str(out)!r} cannot be made: {str(there)!r} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{field}={str(out)!r} cannot be written: no permission in {str(there)!r}")


def check_free(out: Path, *, overwrite: bool, command: str = "balance", program: str = "lrmoe") -> None:
    """Checks that ``lrmoe balance``, or another verb that does not resume, may write into ``out``.

    Raises:
        ValueError: if it holds anything and is not to be overwritten, or what another command wrote.
    """
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise ValueError(f"out={str(out)!r} is not empty; give another folder, or --overwrite to replace what it holds")
    check_out_folder(out, command=command, resume=False, overwrite=overwrite, program=program)


def _check_stored(stored: dict[str, Any], path: Path) -> None:
    """Checks the build of what a run is resumed from; the settings in it are checked by those that take them."""
    needed: list[tuple[str, type]] = [
        ("train", dict),
        ("train.recalibration", dict),
        ("corpus", dict),
        ("corpus.sha256", str),
    ]
    if stored["command"] == "compare":
        needed += [("variants", list), ("seeds", list), ("pretrain_steps", int)]
    for name, kind in needed:
        value: Any = stored
        for key in name.split("."):
            value = value.get(key)
        if not isinstance(value, kind):
            raise ValueError(f"{path}: {name}={value!r}; the file is damaged or of another version of lrmoe")
    for variant in stored.get("variants", []):
        if not isinstance(variant, dict) or not isinstance(variant.get("name"), str):
            raise ValueError(f"{path}: variant {variant!r} has no name; the file is damaged")


def clear_run(out: Path) -> None:
    """Deletes what a run wrote in ``out``, and nothing else. ``config.json``, the mark of a run, goes last."""
    for name in reversed(OWN_ENTRIES):
        path = out / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds the folder for this process; the lock goes with the process, however it ends.

    Raises:
        ValueError: if another process is writing there.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no advisory locks of this kind.
        yield
        return
    held = False
    while not held:
        with open(out / LOCK, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(
                    f"out={str(out)!r} is in use by another lrmoe process; wait for it or end it"
                ) from None
            # Who held it before may have removed the file since it was opened: then this lock keeps nobody out.
            with suppress(FileNotFoundError):
                held = os.path.samestat(os.fstat(file.fileno()), os.stat(out / LOCK))
            if held:
                try:
                    yield
                finally:
                    (out / LOCK).unlink(missing_ok=True)
