"""Checks that are told together: who mends one setting should not meet the next complaint only then."""

from __future__ import annotations

from types import TracebackType


class SeveralProblems(ValueError):
    """Some things that are wrong; the message numbers them."""

    def __init__(self, found: list[str]) -> None:
        super().__init__("; ".join(f"({number}) {text}" for number, text in enumerate(found, start=1)))
        self.found = found


class Problems:
    """What several checks find wrong.

    ``with problems:`` around each check notes its ValueError or OSError and goes on; :meth:`tell` raises what was
    noted, all in one.
    """

    def __init__(self) -> None:
        self._found: list[str] = []

    def __enter__(self) -> Problems:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, (ValueError, OSError)):
            return False
        texts = error.found if isinstance(error, SeveralProblems) else [str(error)]
        self._found += [text for text in texts if text not in self._found]
        return True

    def tell(self) -> None:
        """Raises ValueError if anything was noted, :class:`SeveralProblems` if it is more than one thing."""
        if len(self._found) == 1:
            raise ValueError(self._found[0])
        if self._found:
            raise SeveralProblems(self._found)
