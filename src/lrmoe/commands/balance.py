"""``lrmoe balance``: given loads planned under each policy, or a run's loads played to them."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from lrmoe.commands.options import add_fields, add_out, need, only_of
from lrmoe.config import Quota


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of both kinds of loads."""
    from lrmoe.studies.balance_run import BalanceConfig
    from lrmoe.studies.loads import SHAPES
    from lrmoe.studies.replay_run import ReplayConfig
    from lrmoe.studies.routing import WORKLOADS

    add_out(parser, "balance")
    shared = {field.name for field in fields(BalanceConfig)}
    add_fields(
        parser,
        (*fields(BalanceConfig), *(field for field in fields(ReplayConfig) if field.name not in shared)),
        choices={"shape": SHAPES, "quota": get_args(Quota), "workload": WORKLOADS},
        names={"trace": "PATH", "policies": "NAME,..."},
    )


def run(given: dict[str, Any]) -> int:
    """The verb."""
    need("rich", *(["plotly"] if given.get("out") is not None else []))
    from lrmoe.studies.balance_run import HEADINGS, NOTE, BalanceConfig, balance, break_even_rows, cells
    from lrmoe.terminal import console, print_table

    out, overwrite = given.pop("out", None), given.pop("overwrite", False)
    if "trace" in given or "workload" in given:
        return _replay(given, out, overwrite)
    only_of("--trace or --workload", given, BalanceConfig)
    result = balance(BalanceConfig(**given), out, overwrite=overwrite)
    matrices, ranks, experts = result.shape
    console.print(f"loads: {result.source}; {matrices} x {experts} experts on {ranks} ranks", markup=False)
    print_table(HEADINGS, [cells(record) for record in result.policies], NOTE)
    if result.break_even:
        print_table(*break_even_rows(result.break_even), note="Expert time saved against replica traffic, a layer.")
    console.print("\n".join(result.notes), markup=False)
    if out is not None:
        console.print(f"report: {out / 'report.html'}", markup=False)
    return 0


def _replay(given: dict[str, Any], out: Path | None, overwrite: bool) -> int:
    need("numpy", *(["plotly"] if out is not None else []))
    from lrmoe.studies.replay_run import HEADINGS, NOTE, ReplayConfig, cells, describe, run_replay
    from lrmoe.terminal import console, print_table

    only_of("--loads, --shape or --skew alone", given, ReplayConfig)
    with console.status("reading the loads") as status:
        result = run_replay(
            ReplayConfig(**given),
            out,
            overwrite=overwrite,
            progress=lambda who: status.update(f"playing the loads to {who.replace('[', '')}"),
        )
    summary = result.summary()
    console.print("\n".join(describe(summary)), markup=False)
    print_table(HEADINGS, [cells(record) for record in summary["policies"]], NOTE)
    console.print("\n".join(summary["notes"]), markup=False)
    if out is not None:
        console.print(f"report: {out / 'report.html'}", markup=False)
    return 0
