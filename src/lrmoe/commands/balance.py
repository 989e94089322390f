"""``lrmoe balance``: given loads planned under each policy, or a run's loads played to them."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args

from lrmoe.balance.shapes import SHAPES, WORKLOADS
from lrmoe.commands.options import add_fields, add_out, need, only_of
from lrmoe.commands.pages import write_page
from lrmoe.config import Quota
from lrmoe.problems import Problems
from lrmoe.studies.balance_config import BalanceConfig
from lrmoe.studies.replay_config import ReplayConfig
from lrmoe.studies.sources import check_files
from lrmoe.training.files import check_free

Config = TypeVar("Config", BalanceConfig, ReplayConfig)
ALIASES = {"num_ranks": "ranks", "num_experts": "experts"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of both kinds of loads."""
    add_out(parser, "lrmoe balance")
    shared = {field.name for field in fields(BalanceConfig)}
    add_fields(
        parser,
        (*fields(BalanceConfig), *(field for field in fields(ReplayConfig) if field.name not in shared)),
        choices={"shape": SHAPES, "quota": get_args(Quota), "workload": WORKLOADS},
        names={"trace": "PATH", "policies": "NAME,...", "model": "MODEL", "hardware": "NAME"},
    )


def run(given: dict[str, Any]) -> int:
    """The verb."""
    out, overwrite = given.pop("out", None), given.pop("overwrite", False)
    if "trace" in given or "workload" in given:
        return _replay(given, out, overwrite)
    only_of("--trace or --workload", given, BalanceConfig)
    config = _checked(BalanceConfig, given, out, overwrite)
    need("rich", *(["plotly"] if out is not None else []))
    from lrmoe.studies.balance_run import HEADINGS, NOTE, balance, break_even_rows, cells
    from lrmoe.terminal import console, print_table

    result = balance(config, out, overwrite=overwrite)
    matrices, ranks, experts = result.shape
    console.print(f"loads: {result.source}; {matrices} x {experts} experts on {ranks} ranks", markup=False)
    print_table(HEADINGS, [cells(record) for record in result.policies], NOTE)
    if result.break_even:
        print_table(
            *break_even_rows(result.break_even),
            note="Modelled time of a layer, forward and backward, with replicas and with every expert at home.",
        )
    console.print("\n".join(result.notes), markup=False)
    if out is not None:
        write_page(out)
    return 0


def _replay(given: dict[str, Any], out: Path | None, overwrite: bool) -> int:
    only_of("--loads, --shape or --skew alone", given, ReplayConfig)
    config = _checked(ReplayConfig, given, out, overwrite)
    need("rich", "numpy", *(["plotly"] if out is not None else []))
    from lrmoe.studies.replay_run import HEADINGS, NOTE, cells, describe, run_replay
    from lrmoe.terminal import console, print_table

    with console.status("reading the loads") as status:
        result = run_replay(
            config,
            out,
            overwrite=overwrite,
            progress=lambda who: status.update(f"playing the loads to {who.replace('[', '')}"),
        )
    summary = result.summary()
    console.print("\n".join(describe(summary)), markup=False)
    print_table(HEADINGS, [cells(record) for record in summary["policies"]], NOTE)
    console.print("\n".join(summary["notes"]), markup=False)
    if out is not None:
        write_page(out)
    return 0


def _checked(kind: type[Config], given: dict[str, Any], out: Path | None, overwrite: bool) -> Config:
    """The config; ValueError with all that can be told to be wrong before torch is imported."""
    problems = Problems()
    with problems:
        config = kind(**given)
    with problems:
        check_files(loads=given.get("loads"), trace=given.get("trace"))
    with problems:
        if out is not None:
            check_free(out, overwrite=overwrite)
    problems.tell()
    return config
