"""What the commands of ``lrmoe`` and of the paper leave, for pages and for the index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lrmoe.report import kinds
from lrmoe.report.index_entry import Entry
from lrmoe.report.index_records import read_policies
from lrmoe.report.kinds import Kind
from paper.pressure.page import write_pressure_page


def read_pressure(entry: Entry, config: dict[str, Any], summary: dict[str, Any] | None) -> None:
    """Of ``python -m paper pressure``; see :data:`lrmoe.report.index_records.Fill`."""
    policies = read_policies(entry, config, summary, "policies")
    if not policies:
        return
    # Of the two ways of counting, the one of an operator that there is.
    reach: dict[str, float] = {}
    for one in policies:
        if one["accounting"] == "operator" and one["reason"] is None and one["batch"] > 1 - 1e-9:
            reach[one["policy"]] = max(reach.get(one["policy"], 0.0), one["pressure"])
    fitting = "; ".join(f"{policy} {times:g} x" for policy, times in reach.items())
    entry.outcome = f"largest batch that fits whole: {fitting or 'none'}"


KINDS: Mapping[str, Kind] = {**kinds.KINDS, "pressure": Kind(write=write_pressure_page, fill=read_pressure)}
"""By ``command`` of a folder's ``config.json``."""
