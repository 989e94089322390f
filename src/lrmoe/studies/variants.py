"""Variants of a comparison, as a user writes them: ``"C20 pps: drop=0.2 selector=pps warmup_steps=40"``."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from lrmoe.config import LRMoEConfig

# A variant cannot set what belongs to the whole comparison.
FIELDS = tuple(f.name for f in fields(LRMoEConfig) if f.name not in ("seed", "total_steps"))
# Without a guard, so that each drops what its name says.
DEFAULT = (
    "C0: drop=0",
    "C20 pps: drop=0.2 selector=pps guard_variance=none",
    "C20 topq: drop=0.2 selector=topq guard_tail=none",
    "C20 random: drop=0.2 selector=random guard_variance=none",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A recalibration under a name. ``settings`` holds what differs from the comparison's common configuration."""

    name: str
    settings: dict[str, Any]

    @property
    def folder(self) -> str:
        """The name as a folder name: letters, digits, dots and dashes."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-.")

    def to_dict(self) -> dict[str, Any]:
        """The name and the settings in one object."""
        return {"name": self.name, **self.settings}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Variant:
        """The inverse of :meth:`to_dict`."""
        return cls(name=values["name"], settings={key: value for key, value in values.items() if key != "name"})

    def config(self, common: LRMoEConfig) -> LRMoEConfig:
        """Raises ValueError, naming the variant, for a value that its field does not take."""
        try:
            return LRMoEConfig(**{**common.to_dict(), **self.settings})
        except ValueError as error:
            raise ValueError(f"variant {self.name!r}: {error}") from None


def parse_variant(text: str) -> Variant:
    """Reads ``NAME: FIELD=VALUE FIELD=VALUE ...``; fields are those of :class:`LRMoEConfig`, separated by spaces or
    commas.

    Raises:
        ValueError: for a missing name, an unknown or repeated field, or a value of the wrong type.
    """
    name, colon, rest = text.partition(":")
    name = " ".join(name.split())
    if not colon or not name:
        raise ValueError(f'variant {text!r} has no name; write it as "NAME: drop=0.2 selector=pps"')
    settings: dict[str, Any] = {}
    for part in re.split(r"[\s,]+", rest.strip()):
        if not part:
            continue
        key, equals, value = part.partition("=")
        if not equals or key not in FIELDS:
            raise ValueError(f"variant {name!r}: {part!r} is not FIELD=VALUE with a field of {', '.join(FIELDS)}")
        if key in settings:
            raise ValueError(f"variant {name!r}: {key} is given twice")
        settings[key] = parse_value(key, value, f"variant {name!r}: ")
    variant = Variant(name=name, settings=settings)
    if not variant.folder:
        raise ValueError(f"variant {name!r}: the name needs a letter or a digit, it becomes a folder's name")
    return variant


def parse_value(field: str, text: str, where: str = "") -> Any:
    """A value of an :class:`LRMoEConfig` field from its text.

    Raises:
        ValueError: if the text is no number where one is needed.
    """
    kind = str(LRMoEConfig.__dataclass_fields__[field].type)
    if "None" in kind and text.lower() == "none":
        return None
    for name, convert in (("float", float), ("int", int)):
        if name in kind:
            try:
                return convert(text)
            except ValueError:
                raise ValueError(
                    f"{where}{field}={text!r} is no {'number' if name == 'float' else 'integer'}"
                ) from None
    return text


def parse_variants(texts: list[str]) -> list[Variant]:
    """Reads all variants; the default four if there are none, and ``C0: drop=0`` in front if none has ``drop=0``.

    Raises:
        ValueError: also for two variants whose names give the same folder.
    """
    variants = [parse_variant(text) for text in texts or DEFAULT]
    if not any(v.settings.get("drop") == 0 for v in variants):
        variants.insert(0, parse_variant(DEFAULT[0]))
    taken: dict[str, str] = {}
    for variant in variants:
        other = taken.setdefault(variant.folder.lower(), variant.name)
        if other != variant.name or [v.name for v in variants].count(variant.name) > 1:
            raise ValueError(f"variants {other!r} and {variant.name!r} need names that differ in letters or digits")
    return variants
