"""The command line: ``python -m paper VERB``, with the exit codes and the errors of ``lrmoe``."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from lrmoe.cli import SAME_AGAIN, Program, Verb, main
from paper import PROGRAM, report, study
from paper.pressure import verb as pressure
from paper.skew import verb as skew

_VERBS: Mapping[str, tuple[Verb, str]] = {
    "time_to_loss": (
        study.Study("time_to_loss", is_shared=False),
        "MoE-layer time to fixed losses, on one device and over ranks, beside the systems that balance.",
    ),
    "pressure": (
        pressure,
        "Grow the batch under a hard memory budget, and see what completes under each policy.",
    ),
    "skew": (skew, "What each system can do with skewed loads under the same capacity."),
    "anatomy": (study.Study("anatomy"), "Where the error of a drop comes from, by layer, step and batch."),
    "recipes": (
        study.Study("recipes"),
        "Whether a drop costs the same under accumulation, bfloat16 and checkpointing.",
    ),
    "scale": (study.Study("scale"), "Whether a drop costs less with twice the batch or twice the steps."),
    "report": (report, "Write report.html again from the records of a folder, or an index of a folder of them."),
}
PAPER = Program(
    name=PROGRAM,
    description="Try what the paper claims.",
    verbs=_VERBS,
    go_on=dict.fromkeys(("time_to_loss", "anatomy", "recipes", "scale"), SAME_AGAIN),
    moved={},
)

if __name__ == "__main__":
    sys.exit(main(program=PAPER))
