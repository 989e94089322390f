"""``lrmoe plan``: what fits, under which setting, and how fast it would be."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, get_args

from lrmoe.commands.options import add_fields, add_out, need
from lrmoe.commands.pages import write_page
from lrmoe.config import Quota
from lrmoe.studies.paper_config import read_settings
from lrmoe.studies.plan_config import PlanConfig

ALIASES = {"num_ranks": "ep", "ranks": "ep"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """All settings."""
    add_out(parser, "lrmoe plan")
    names = {"model": "MODEL", "hardware": "NAME", "trace": "PATH"}
    add_fields(
        parser, fields(PlanConfig), choices={"quota": get_args(Quota), "elementwise": ("plain", "fused")}, names=names
    )


def run(given: dict[str, Any]) -> int:
    """The verb."""
    out, overwrite = given.pop("out", None), given.pop("overwrite", False)
    config = read_settings(PlanConfig, given, out, overwrite=overwrite, verb="plan")
    need("rich", *(["numpy"] if "trace" in given else []), *(["plotly"] if out is not None else []))
    from lrmoe.studies.plan_run import HEADINGS, NOTE, cells, describe, item_rows, plan
    from lrmoe.terminal import console, print_table

    with console.status("reading the loads") as status:
        summary = plan(
            config, out, overwrite=overwrite, progress=lambda who: status.update(f"planning {who.replace('[', '')}")
        )
    console.print("\n".join(describe(summary)), markup=False)
    print_table(HEADINGS, [cells(record) for record in summary["options"]], NOTE)
    print_table(*item_rows(summary), note=f"Memory of the fullest rank: {summary['shown']}.")
    console.print("\n".join(summary["notes"]), markup=False)
    console.print(f"recommendation: {summary['recommendation']}", markup=False)
    if out is not None:
        write_page(out)
    return 0
