"""Writes docs/results/studies.md from the records of ``lrmoe study`` and of the paper's studies.

Each file in docs/results/studies is a ``summary.json`` of a study. The page has their tables and the sentences
that the studies themselves drew from them, and nothing else.

    python docs/make_studies.py
"""

from __future__ import annotations

from pathlib import Path

from lrmoe import moved, strict_json
from lrmoe.report.study_page import study_of
from lrmoe.studies.results import StudyResult, markdown
from lrmoe.studies.study_config import NAMES

RESULTS = Path(__file__).parent / "results"
HEAD = """# Studies

Made by `python docs/make_studies.py` from the records in [studies/](studies), which `lrmoe study` wrote. Nothing is
typed in by hand. How to read the tables, and how to run the studies on your own model: [studies.md](../studies.md).
What follows for training: [when-to-use.md](../when-to-use.md). Commands are those that ran: what was
`lrmoe study recipes`, `anatomy` and `time_to_loss` then is `python -m paper recipes` and so on now
([the paper's studies](../../paper/README.md)).
"""
ORDER = (*NAMES, *moved.STUDIES)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_section(read(name), name) for name in ORDER if file(name).exists())])


def file(name: str) -> Path:
    """Where a study's records are."""
    return RESULTS / "studies" / f"{name}.json"


def read(name: str) -> StudyResult:
    """A study's records."""
    return study_of(strict_json.loads(file(name).read_text()))


def _section(result: StudyResult, name: str) -> str:
    made = result.provenance
    machine = ", ".join(f"{value}" for value in made["machine"].values())
    versions = ", ".join(f"{package} {version}" for package, version in made["versions"].items())
    took = ""
    if "runs" in made:
        took = f" {made['runs']} runs, {made['run_seconds'] / 60:.0f} minutes of one core in all, shared ones included."
    parts = [
        f"## {result.title}\n",
        f"{result.question}\n",
        f"    {made['command']}\n",
        f"File: [{name}.json](studies/{name}.json). {versions}; {machine} cores.{took}\n",
    ]
    for table in result.tables:
        settings = ", ".join(f"{key} {value}" for key, value in table.settings.items())
        parts.append(f"### {result.title}: {table.title}\n\n{settings}.\n\n{markdown(table)}")
    parts.append("".join(f"- {sentence}\n" for sentence in (*result.conclusions, *result.advice)))
    return "\n".join(parts)


if __name__ == "__main__":
    (RESULTS / "studies.md").write_text(page())
