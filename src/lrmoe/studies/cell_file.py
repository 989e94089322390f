"""Files of finished work that studies keep: read back whole, or refused with what is wrong and the mend."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lrmoe.training.files import check_file, read_json

# What a value must be: in words, and whether it is.
Kind = tuple[str, Callable[[Any], bool]]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


NUMBER: Kind = ("a number", _is_number)
MAYBE_NUMBER: Kind = ("a number or null", lambda value: value is None or _is_number(value))
COUNT: Kind = ("an integer >= 0", lambda value: type(value) is int and value >= 0)
TEXT: Kind = ("a string", lambda value: isinstance(value, str))
TEXTS: Kind = (
    "an object of strings",
    lambda value: isinstance(value, dict) and all(isinstance(one, str) for one in value.values()),
)
OBJECT: Kind = ("an object", lambda value: isinstance(value, dict))
RECORDS: Kind = (
    "a list of objects",
    lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
)


def numbers(count: int) -> Kind:
    """A list of so many numbers."""
    return (
        f"a list of {count} numbers",
        lambda value: isinstance(value, list) and len(value) == count and all(map(_is_number, value)),
    )


def require(record: Mapping[str, Any], kinds: Mapping[str, Kind], *, where: str = "") -> None:
    """Checks the values of a record.

    Args:
        record: of a file.
        kinds: of the values that it must have, by name; it may have more.
        where: where the record is, for the error.

    Raises:
        ValueError: naming the first that is missing or of another kind.
    """
    for name, (words, holds) in kinds.items():
        if name not in record:
            raise ValueError(f"{where}{name} is missing")
        if not holds(record[name]):
            raise ValueError(f"{where}{name}={reprlib.repr(record[name])} must be {words}")


def read_whole(path: Path, check: Callable[[dict[str, Any]], None], *, mend: str) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Args:
        path: of the file.
        check: raises ValueError, saying what is wrong with the object.
        mend: what the user can do about a damaged file.

    Raises:
        ValueError: if the file is missing or damaged; names it, what is wrong and the mend.
    """
    check_file(path)
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; {mend}") from None
    try:
        check(found)
    except ValueError as error:
        raise ValueError(f"{path} is damaged or of another version of lrmoe ({error}); {mend}") from None
    return found
