"""The tables of a batch under pressure, for a terminal, from the summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from lrmoe.studies.paper_config import ELEMENTWISE, GIB
from lrmoe.studies.replay import Record
from paper.pressure.pair_bytes import Accounting
from paper.pressure.published import BACKWARD_MS, MEMORY, THROUGHPUT

ACCOUNTINGS: tuple[Accounting, ...] = get_args(Accounting)
HEADINGS = ("pressure", "policy", "completes", "worst", "batch", "backward", "kept, least", "busiest", "demand GiB")
NOTE = (
    "completes: share of all routed rows that their rank has room for; worst: of the worst record. batch: the part of "
    "the batch that every rank has room for, which the fullest decides. backward: rows whose backward is computed. "
    "kept, least: of an expert's rows. busiest: over mean rows of a rank. demand: rows' bytes on the fullest rank."
)


def counting(which: str) -> str:
    """A way of counting, in words."""
    return "operator's bytes" if which == "operator" else "kept rows alone"


def table(summary: Record, which: Accounting, levels: Sequence[float]) -> list[list[str]]:
    """Rows of the terminal's table."""
    rows = []
    for level in levels:
        for one in summary["policies"]:
            if (one["accounting"], one["pressure"]) != (which, level):
                continue
            if one["reason"] is not None:
                rows.append([f"{level:g}", one["policy"], *["-"] * (len(HEADINGS) - 2)])
                continue
            shares = (f"{100 * one[name]:.1f} %" for name in ("completes", "completes_least", "batch", "backward"))
            rest = (f"{100 * one['kept_least']:.0f} %", f"{one['busiest']:.2f}", f"{one['demand'] / GIB:.2f}")
            rows.append([f"{level:g}", one["policy"], *shares, *rest])
    return rows


def shown_levels(levels: Sequence[float]) -> list[float]:
    """Few enough for a terminal: every fifth of many."""
    return list(levels) if len(levels) <= 6 else [level for level in levels if level in (1, 5, 10, 15, 20, 28, 40)]


def published_rows(summary: Record) -> tuple[list[str], list[list[str]]]:
    """The paper's memory and backward beside ours: headings and rows."""
    headings = ["", "published", *(f"skew {row['skew']:g}" for row in summary["published"]["rows"])]
    rows = []
    names: dict[Literal["fixed", "lrmoe"], str] = {"fixed": "Megatron-LM", "lrmoe": "LRMoE"}
    for name, title in names.items():
        for which in ACCOUNTINGS:
            for part in ("buffers", "subtotal"):
                cells = []
                for row in summary["published"]["rows"]:
                    value = row[name]["buffers"][which]
                    if part == "subtotal":
                        value += row["base"] + (row["replicas"] if name == "lrmoe" else 0.0)
                    cells.append(f"{value:.2f}")
                rows.append([f"{title}, {part}, GiB ({counting(which)})", f"{MEMORY[name][part]:.2f}", *cells])
        for key, label in (("backward_ms", "all phases"), ("experts_ms", "experts alone")):
            for how in ELEMENTWISE:
                cells = [f"{row[name][key][how]:.2f}" for row in summary["published"]["rows"]]
                rows.append([f"{title}, backward, ms ({label}, {how})", f"{BACKWARD_MS[name]:.2f}", *cells])
    return headings, rows


def throughput_rows(summary: Record) -> tuple[list[str], list[list[str]]]:
    """The order at one pressure for every skew: headings and rows."""
    headings = ["skew", "counted", "by", *THROUGHPUT, "as published"]
    rows = [["published", "", "", *(f"{100 * share:.1f} %" for share in THROUGHPUT.values()), ""]]
    for one in summary["order"]:
        if one["reason"] is not None:
            rows.append(
                [f"{one['skew']:g}", counting(one["accounting"]), "", *["-"] * len(THROUGHPUT), "cannot be had"]
            )
            continue
        for name in ("completes", "batch"):
            shares = (f"{100 * one[name][policy]:.1f} %" for policy in THROUGHPUT)
            verdict = "yes" if one["as_published"][name] else "no"
            rows.append([f"{one['skew']:g}", counting(one["accounting"]), name, *shares, verdict])
    return headings, rows
