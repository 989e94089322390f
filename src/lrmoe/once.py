"""Warnings that a user reads once."""

from __future__ import annotations

import warnings


class Once:
    """Warns of each kind of thing the first time it happens."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, kind: str, message: str) -> None:
        """UserWarning with ``message``, if none of this kind was given before."""
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(message, UserWarning, stacklevel=3)
