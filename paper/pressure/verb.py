"""``python -m paper pressure``: what completes when the batch grows and the memory of a rank does not."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, get_args

from lrmoe.commands.options import add_fields, add_out, need
from lrmoe.commands.pages import write_page
from lrmoe.config import Save
from lrmoe.studies.paper_config import read_settings
from paper import PROGRAM
from paper.pressure.config import PressureConfig

ALIASES = {"num_ranks": "ep", "ranks": "ep"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """All settings."""
    add_out(parser, f"{PROGRAM} pressure")
    names = {"model": "MODEL", "hardware": "NAME", "trace": "PATH", "policies": "NAME,...", "pressures": "X,X,..."}
    add_fields(
        parser, fields(PressureConfig), choices={"save": get_args(Save), "elementwise": ("plain", "fused")}, names=names
    )


def run(given: dict[str, Any]) -> int:
    """The verb."""
    out, overwrite = given.pop("out", None), given.pop("overwrite", False)
    config = read_settings(PressureConfig, given, out, overwrite=overwrite, verb="pressure", program=PROGRAM)
    need("rich", *(["numpy"] if "trace" in given else []), *(["plotly"] if out is not None else []))
    from lrmoe.terminal import console, print_table
    from paper.pressure.run import pressure
    from paper.pressure.tables import (
        ACCOUNTINGS,
        HEADINGS,
        NOTE,
        published_rows,
        shown_levels,
        table,
        throughput_rows,
    )

    with console.status("reading the loads") as status:
        summary = pressure(
            config, out, overwrite=overwrite, progress=lambda who: status.update(f"planning {who.replace('[', '')}")
        )
    console.print(f"loads: {summary['source']}; {summary['budget'] / 2**30:.1f} GiB a rank for one layer", markup=False)
    for which in ACCOUNTINGS:
        print_table(HEADINGS, table(summary, which, shown_levels(config.levels)), summary["counted"][which])
    console.print(NOTE, markup=False)
    print_table(*throughput_rows(summary), note=f"The systems at {config.at:g} x, for other skews; synthetic loads.")
    if summary["published"]["rows"]:
        print_table(
            *published_rows(summary),
            note="As published, of how many layers is not said, and one layer at 1 x here; see the page (--out).",
        )
    console.print("\n".join(summary["notes"]), markup=False)
    if out is not None:
        from paper.kinds import KINDS

        write_page(out, KINDS)
    return 0
