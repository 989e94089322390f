"""JSON that every reader takes, of values that may hold numbers which are not finite.

JSON knows no NaN and no infinity; Python writes them bare all the same, and then ``jq``, a browser, JavaScript, Go and
most others refuse the whole file. Here they are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``,
as ProtoJSON has them, and come back as floats. Not as null: a loss that overflowed is no loss that was not logged.
"""

from __future__ import annotations

import json
import math
from typing import Any

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: object, **options: Any) -> str:
    """``json.dumps`` with every float that is not finite as a string.

    Raises:
        TypeError, ValueError: as ``json.dumps`` does, for what JSON cannot hold.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        # Seldom needed, so that only then everything is gone through; what else is wrong is wrong again.
        return json.dumps(spelled(value), allow_nan=False, **options)


def loads(text: str | bytes) -> Any:
    """What :func:`dumps` wrote; also what other programs wrote, with bare NaN and Infinity.

    A string that is one of the three words comes back as the float, whoever wrote it.

    Raises:
        ValueError: as ``json.loads`` does. Also RecursionError.
    """
    value = json.loads(text)
    words: tuple[Any, ...] = ('"NaN"', 'Infinity"') if isinstance(text, str) else (b'"NaN"', b'Infinity"')
    return _read(value) if any(word in text for word in words) else value


def spelled(value: Any) -> Any:
    """``value``, of dictionaries, lists and scalars, with every float that is not finite as its word."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {spelled(key): spelled(each) for key, each in value.items()}
    return [spelled(each) for each in value] if isinstance(value, (list, tuple)) else value


def _read(value: Any) -> Any:
    if isinstance(value, str):
        return _FLOATS.get(value, value)
    if isinstance(value, dict):
        return {key: _read(each) for key, each in value.items()}
    return [_read(each) for each in value] if isinstance(value, list) else value
