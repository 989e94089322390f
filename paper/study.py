"""The verbs that are studies: ``python -m paper anatomy`` and the others, with the options of ``lrmoe study``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lrmoe.commands.study import add_settings, carry_out

if TYPE_CHECKING:
    from lrmoe.studies.catalog import Entry


@dataclass(frozen=True)
class Study:
    """A study as a verb.

    Attributes:
        name: of the study.
        is_shared: it has the settings that all studies of ``lrmoe study`` have.
    """

    name: str
    is_shared: bool = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Those of ``lrmoe study``; which of them this study has, it says when one of the others is given."""
        add_settings(parser)

    def run(self, given: dict[str, Any]) -> int:
        """Carries the study out and shows what it found."""
        return carry_out(self.name, given, _catalog, is_shared=self.is_shared)


def _catalog() -> Mapping[str, Entry]:
    from paper.catalog import CATALOG

    return CATALOG
