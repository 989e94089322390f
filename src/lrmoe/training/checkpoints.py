"""Which checkpoints of a run folder are complete, and how a checkpoint becomes one of them."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

# The Trainer writes this file last; a checkpoint without it was cut short, or is being deleted.
_LAST_WRITTEN = "trainer_state.json"

# Where a checkpoint is written, under its own name, until it is complete.
STAGING = ".incomplete"


def checkpoints_of(run: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run folder as (step, folder), oldest first."""
    return _complete(run / "checkpoints")


def newest_checkpoint(run: Path) -> Path | None:
    """The folder of the newest complete checkpoint of a run folder, or None."""
    found = checkpoints_of(run)
    return found[-1][1] if found else None


def publish(staging: Path, *, keep: int) -> None:
    """Moves the checkpoints in ``staging`` to the folder around it, each in one move, and deletes all complete ones but
    the newest ``keep``."""
    folder = staging.parent
    for finished in staging.glob("checkpoint-*"):
        shutil.rmtree(folder / finished.name, ignore_errors=True)
        os.replace(finished, folder / finished.name)
    for _, old in _complete(folder)[:-keep]:
        # In one move out of sight, so that a kill leaves no half of it behind.
        os.replace(old, staging / old.name)
    shutil.rmtree(staging, ignore_errors=True)


def _complete(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for entry in folder.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", entry.name)
        if match and (entry / _LAST_WRITTEN).is_file():
            found.append((int(match[1]), entry))
    return sorted(found)
