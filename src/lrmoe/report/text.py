"""Numbers and strings as a reader sees them. Every string that a user supplied goes through :func:`escape`."""

from __future__ import annotations

import html
import math

from lrmoe.labels import layer_label

DASH = "–"
MINUS = "−"


def escape(text: object) -> str:
    """Safe inside HTML text, in a quoted attribute and in a plotly label (plotly decodes the same entities)."""
    return html.escape(str(text), quote=True)


def fixed(value: float | None, digits: int) -> str:
    """A number with ``digits`` decimals and a true minus sign; a dash where there is none."""
    if value is None:
        return DASH
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    text = f"{abs(value):,.{digits}f}"
    return f"{MINUS}{text}" if round(value, digits) < 0 else text


def signed(value: float | None, digits: int) -> str:
    """:func:`fixed` with a plus sign on what is above zero, for differences."""
    text = fixed(value, digits)
    is_positive = value is not None and math.isfinite(value) and round(value, digits) > 0
    return f"+{text}" if is_positive else text


def percent(share: float | None, digits: int = 1) -> str:
    """A share in [0, 1] in percent."""
    return DASH if share is None else f"{fixed(100 * share, digits)} %"


def whole(value: int) -> str:
    return f"{value:,}"


def counted(number: int, noun: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float | None) -> str:
    """A time with three significant digits and the unit that suits it."""
    if seconds is None or not math.isfinite(seconds):
        return fixed(seconds, 0)
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{_significant(seconds / scale)} {unit}"
    return "0 s" if seconds == 0 else f"{_significant(seconds / 1e-6)} µs"


def size(number_of_bytes: float | None) -> str:
    """A memory size in binary units."""
    if number_of_bytes is None or not math.isfinite(number_of_bytes):
        return fixed(number_of_bytes, 0)
    value = float(number_of_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{_significant(value)} {unit}"
        value /= 1024
    return f"{_significant(value)} TiB"


def _significant(value: float) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return fixed(value, digits)


def short_layer_names(names: list[str]) -> list[str]:
    """Module paths without what all have in common: ``model.layers.3.mlp.experts`` becomes ``layer 3``.

    The result has no duplicates; where shortening would make some, or there is one layer only, names stay whole
    except for a trailing layer number.
    """
    names = list(map(layer_label, names))
    parts = [name.split(".") for name in names]
    depth = min((len(p) for p in parts), default=0)
    start = 0
    while len(names) > 1 and start < depth - 1 and len({p[start] for p in parts}) == 1:
        start += 1
    end = 0
    while len(names) > 1 and end < depth - start - 1 and len({p[-1 - end] for p in parts}) == 1:
        end += 1
    if len(names) == 1:
        numbers = [p for p in parts[0] if p.isdigit()]
        return [f"layer {numbers[0]}"] if len(numbers) == 1 else names
    short = [".".join(p[start : len(p) - end]) for p in parts]
    short = [f"layer {name}" if name.isdigit() else name for name in short]
    return short if len(set(short)) == len(short) else names
