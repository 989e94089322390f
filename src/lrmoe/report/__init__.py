"""Records of a run turned into a page: ``write_report(run_dir)``. Needs the ``train`` extra (plotly)."""

from lrmoe.report.kinds import write_report

__all__ = ["write_report"]
