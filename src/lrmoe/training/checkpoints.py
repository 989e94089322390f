"""Which checkpoint of a run folder can be continued from."""

from __future__ import annotations

import re
from pathlib import Path

# The Trainer writes this file last, so a checkpoint that a kill cut short lacks it.
_LAST_WRITTEN = "trainer_state.json"


def checkpoints_of(run: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run folder as (step, folder), oldest first."""
    found = []
    for folder in (run / "checkpoints").glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match and (folder / _LAST_WRITTEN).is_file():
            found.append((int(match[1]), folder))
    return sorted(found)


def newest_checkpoint(run: Path) -> Path | None:
    """The folder of the newest complete checkpoint of a run folder, or None."""
    found = checkpoints_of(run)
    return found[-1][1] if found else None
