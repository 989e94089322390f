"""Numbers in a page as browsers read them fast: little-endian, in base64."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence


def packed(values: Sequence[float | None], shape: tuple[int, int]) -> dict[str, str]:
    """A table of numbers as plotly reads it, row by row in single precision; what is None is a gap."""
    numbers = array("f", (math.nan if value is None else value for value in values))
    return {"dtype": "f4", "bdata": _base64(numbers), "shape": f"{shape[0]}, {shape[1]}"}


def counts(values: array[int]) -> dict[str, str]:
    """Numbers >= 0, exactly, in the narrowest of two, four and eight bytes (a double, exact up to 2^53) that holds
    them: ``{"dtype": "u2" | "u4" | "f8", "bdata": base64}``."""
    most = max(values, default=0)
    dtype, code = ("u2", "H") if most < 2**16 else ("u4", "I") if most < 2**32 else ("f8", "d")
    return {"dtype": dtype, "bdata": _base64(array(code, values))}


def _base64(numbers: array[int] | array[float]) -> str:
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")
