"""Computing in the dtype that was meant, whatever autocast says around it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A block in which autocast is off, on devices that have it."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
