"""Commands that left the package for the folder ``paper`` of the repository, and where they are now."""

from __future__ import annotations

VERBS = ("pressure",)
"""Of ``lrmoe``."""
STUDIES = ("recipes", "scale", "anatomy", "time_to_loss")
"""Of ``lrmoe study``."""


def where(command: str, verb: str) -> str:
    """In a sentence, what to type in the place of ``command``.

    Args:
        command: as it was.
        verb: of ``python -m paper``.
    """
    return (
        f"{command} left the package with the paper's reproduction: give python -m paper {verb}, with the same "
        "options, in a clone of LRMoE"
    )


def page(verb: str, folder: str) -> str:
    """In a sentence, what writes the page of a folder that one of :data:`VERBS` has left."""
    return (
        f"{verb} left the package with the paper's reproduction: python -m paper report {folder}, in a clone of LRMoE, "
        "writes its page"
    )
