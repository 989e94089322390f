"""Settings in errors, as they were typed: ``--batch 8`` for what a Python user calls ``batch=8``.

All of this library's errors name a setting as ``field=value``, with the value's repr. That is Python's spelling, and
the code that raises them does not know who called; the command line, which does, puts its own in its place here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_VALUE = rf"{_QUOTED}|\[[^\]]*\]|\([^)]*\)|[^\s,;:()]*[^\s,;:().]"
# Quoted text is a user's, who may have written anything; an apostrophe begins none. A field right behind a colon is one
# of what stands before it, say of a file or of a variant, and no option.
_SETTING = re.compile(rf"(?<!\w)(?:{_QUOTED})|(?<![\w./=-])(?<!: )(?P<field>[a-z]\w*)=(?P<value>{_VALUE})")
_PLAIN = re.compile(r"[\w@%+:,./~][\w@%+:,./~=-]*")


def as_options(message: str, options: Mapping[str, str]) -> str:
    """The message of an error with options for settings.

    Args:
        message: with settings as ``field=value``.
        options: for each field its option, with the dashes. Other fields are left as they are.
    """

    def spelled(found: re.Match[str]) -> str:
        option = options.get(found["field"] or "")
        return found[0] if option is None else f"{option}{_typed(found['value'])}"

    return _SETTING.sub(spelled, message)


def _typed(text: str) -> str:
    """The value as it follows its option; a repr stays one where a shell, or a reader, would need the quotes."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if value is True:
        return ""
    if isinstance(value, (list, tuple)):
        return f" {','.join(map(str, value))}"
    if isinstance(value, str):
        return f" {value if _PLAIN.fullmatch(value) else text}"
    return f" {text.lower() if value is None else text}"
