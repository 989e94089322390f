"""The paper's claims, tried: studies of LRMoE beside what arXiv 2610.37720 reports, run as ``python -m paper VERB`` in
a clone of the repository. Not a part of the package ``lrmoe``, which knows nothing of it."""

PROGRAM = "python -m paper"
"""What is typed before a verb."""
