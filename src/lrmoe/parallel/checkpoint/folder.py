"""Folders of checkpoints: one appears when it is complete, by one rename, or not at all.

    checkpoints/step-00000100/             complete
    checkpoints/.step-00000200.partial/    being written, or left by a process that was killed

A manifest, written last, lists the files with their sizes, so that a copy cut short is found out as well.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrmoe import strict_json

MANIFEST = "lrmoe.json"
_FORMAT = 1
_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"\.step-\d+\.(partial|replaced)")


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint of the latest step in ``folder``, or None. What a killed save left is passed over."""
    found = []
    root = Path(folder)
    for path in root.iterdir() if root.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and _incomplete(path) is None:
            found.append((int(match[1]), path))
    return max(found)[1] if found else None


def begin(folder: Path, step: int) -> None:
    """Makes an empty folder to write the checkpoint of ``step`` into; removes what killed saves left."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)
    partial_of(folder, step).mkdir()


def commit(partial: Path, step: int, written: Sequence[str], manifest: Mapping[str, Any]) -> None:
    """Makes what was written visible; an older checkpoint of the same step is replaced.

    Raises:
        OSError: if a file that some rank has ``written`` is not here.
    """
    files = {path.relative_to(partial).as_posix(): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
    lost = sorted(set(written) - set(files))
    if lost:
        raise OSError(f"{lost[0]} was written by another rank, but is not in {partial}: all ranks have to share a disk")
    with open(partial / MANIFEST, "w", encoding="utf-8", newline="\n") as file:
        file.write(strict_json.dumps({"format": _FORMAT, "step": step, "files": files, **manifest}))
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    final = final_of(partial.parent, step)
    replaced = partial.parent / f".{_name(step)}.replaced"
    if final.exists():
        os.rename(final, replaced)
    os.rename(partial, final)
    _sync(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def discard(partial: Path) -> None:
    """Removes what a failed save has written, as far as that can be."""
    shutil.rmtree(partial, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint.

    Raises:
        ValueError: if it is none, saying what is missing.
    """
    missing = _incomplete(path)
    if missing is not None:
        raise ValueError(f"{path} is no complete checkpoint: {missing}; take the one that newest(folder) names")
    manifest = _manifest(path)
    assert isinstance(manifest, dict)
    return manifest


def final_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` appears."""
    return folder / _name(step)


def partial_of(folder: Path, step: int) -> Path:
    """Where :func:`begin` puts the checkpoint of ``step``."""
    return folder / f".{_name(step)}.partial"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _manifest(path: Path) -> dict[str, Any] | str:
    try:
        manifest = strict_json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {MANIFEST}" if path.is_dir() else "there is no such folder"
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return f"{MANIFEST} is damaged"
    if manifest.get("format") != _FORMAT or type(manifest.get("step")) is not int:
        return f"{MANIFEST} is of format {manifest.get('format')!r}, this version of lrmoe reads format {_FORMAT}"
    return manifest


def _incomplete(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    manifest = _manifest(path)
    if isinstance(manifest, str):
        return manifest
    for name, size in manifest["files"].items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            return f"the file {name} is missing"
        if found != size:
            return f"the file {name} has {found} bytes instead of {size}"
    return None


def _sync(folder: Path) -> None:
    """Makes the entries of a folder survive a power cut, where the system can open folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
