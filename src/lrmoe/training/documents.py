"""Text to train on: the Python standard library by default, a file or a folder on request."""

from __future__ import annotations

import os
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 2**30
_LIBRARY_EXCLUDES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """What was read. ``names`` are relative paths with ``/``, in the order of ``texts``; ``skipped`` says, for each
    path that was left out, why."""

    source: str
    names: list[str]
    texts: list[bytes]
    skipped: dict[str, str]


def read_documents(path: str | Path | None) -> Documents:
    """Reads a file, a folder (all files below it, sorted by relative path), or the standard library for None.

    A folder's files are skipped, with the reason kept, where they are empty, hidden, unreadable, not UTF-8 text, not
    regular files, seen before under another name, or symbolic links to folders; links to files are followed.

    Raises:
        ValueError: if the path is missing or is no file or folder, a file given by name is unusable, nothing is
            left, or there is more than 1 GiB.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        version = f"{sysconfig.get_python_version()}"
        return _read_folder(root, f"Python {version} standard library", is_library=True)
    check_text(path)
    path = Path(path)
    if path.is_dir():
        return _read_folder(path, str(path), is_library=False)
    data, problem = _read_file(path)
    if problem == "empty":
        raise ValueError(f"text={str(path)!r} is empty; give a file with text in it")
    if problem:
        raise ValueError(f"text={str(path)!r} cannot be used: {problem}")
    return Documents(source=str(path), names=[path.name], texts=[data], skipped={})


def check_text(path: str | Path, *, field: str = "text") -> None:
    """Checks what can be told of a text without reading it.

    Raises:
        ValueError: naming ``field``, if the path is missing, is no file or folder, or a file of more than 1 GiB.
    """
    if not str(path):
        raise ValueError(f"{field}='' names no file; leave it out for the Python standard library")
    try:
        status = Path(path).stat()
    except (OSError, ValueError) as error:
        raise ValueError(f"{field}={str(path)!r} cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{field}={str(path)!r} is neither a file nor a folder")
    if status.st_size > MAX_BYTES:
        raise ValueError(_too_large(str(path), field))


def _read_folder(root: Path, source: str, *, is_library: bool) -> Documents:
    names: list[str] = []
    texts: list[bytes] = []
    skipped: dict[str, str] = {}
    seen: set[tuple[int, int]] = set()
    total = 0
    for name, problem in sorted(_walk(root, is_library), key=lambda entry: os.fsencode(entry[0])):
        path = root / name
        data = b""
        if problem is None:
            try:
                status = path.stat()
            except OSError as error:
                problem = _reason(error)
            else:
                identity = (status.st_dev, status.st_ino)
                if not stat.S_ISREG(status.st_mode):
                    problem = "not a regular file"
                elif identity in seen:
                    problem = "the same file under another name"
                elif total + status.st_size > MAX_BYTES:
                    raise ValueError(_too_large(source))
                else:
                    seen.add(identity)
                    data, problem = _read_file(path)
        if problem is None:
            names.append(name)
            texts.append(data)
            total += len(data)
        else:
            skipped[name] = problem
    if not texts:
        first = "; ".join(f"{name!r}: {problem}" for name, problem in list(skipped.items())[:3])
        raise ValueError(f"text={source!r} holds no text ({first or 'no file in it'}); give a file or folder with text")
    return Documents(source=source, names=names, texts=texts, skipped=skipped)


def _walk(root: Path, is_library: bool) -> list[tuple[str, str | None]]:
    """Relative paths below ``root``, each with a reason to skip it or None. Never follows a link to a folder."""
    entries: list[tuple[str, str | None]] = []

    def failed(error: OSError) -> None:
        entries.append((Path(os.path.relpath(error.filename, root)).as_posix(), _reason(error)))

    for folder, subfolders, files in os.walk(root, onerror=failed):
        relative = Path(os.path.relpath(folder, root))
        # sysconfig's data files and the config folder hold paths of the machine that built Python.
        if is_library:
            subfolders[:] = [s for s in subfolders if s not in _LIBRARY_EXCLUDES and not s.startswith("config-")]
            files = [f for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata")]
        for name in list(subfolders):
            problem = "hidden" if name.startswith(".") else None
            if problem is None and os.path.islink(os.path.join(folder, name)):
                problem = "symbolic link to a folder"
            if problem:
                subfolders.remove(name)
                entries.append(((relative / name).as_posix(), problem))
        entries += [((relative / f).as_posix(), "hidden" if f.startswith(".") else None) for f in files]
    return entries


def _read_file(path: Path) -> tuple[bytes, str | None]:
    try:
        data = path.read_bytes()
    except OSError as error:
        return b"", _reason(error)
    if not data:
        return b"", "empty"
    if b"\0" in data:
        return b"", "binary (holds a zero byte)"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return b"", "not UTF-8 text"
    return data, None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).lower()


def _too_large(source: str, field: str = "text") -> str:
    return f"{field}={source!r} is larger than {MAX_BYTES >> 30} GiB, which is held in memory; give a part of it"
