"""The argument: what fixed ownership, UltraEP and LRMoE can do with the same skewed loads under the same capacity.

A capacity is a number of rows whose backward a rank can hold. Two are looked at: nine tenths of the mean load, where no
exact plan fits whatever it moves; and what UltraEP's best plan needs, where all but fixed ownership fit and it is the
replicas that differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lrmoe.balance import get
from lrmoe.studies.balance import measure
from lrmoe.studies.loads import skew_of
from lrmoe.studies.price import Contender

Record = dict[str, Any]
BELOW_MEAN = 0.9

HEADINGS = (
    "loads",
    "max/mean",
    "UltraEP needs",
    "LRMoE at 0.9",
    "dropped",
    "UltraEP",
    "LRMoE, no drop",
    "LRMoE",
    "LRMoE, level",
)
"""Of the table that :func:`cells` fills."""


def argue(label: str, lam_GE: Tensor, *, drop: float = 0.2, slots: int = 2) -> Record:
    """Both capacities for one load matrix.

    Args:
        label: what the loads are; say so if they are synthetic.
        lam_GE: (G, E).
        drop: share of the backward's rows that LRMoE may leave out.
        slots: replicas a rank may hold.

    Returns:
        ``loads`` (the label), ``skew`` (largest over mean rows of a rank), ``rows``, ``slots``, ``drop``, and under
        ``below_mean`` and ``at_ultraep`` the ``capacity`` in rows, ``capacity_over_mean`` and the ``policies``' records
        of :func:`lrmoe.studies.balance.measure`. Of UltraEP with a floor of 1024 rows and of 1, the one counts that
        leaves the lower maximum, or of equal ones the fewer replicas.
    """
    rows = int(lam_GE.sum())
    mean_rows = rows / lam_GE.shape[0]
    most, floor = _best_ultraep(lam_GE, slots)
    record: Record = {"loads": label, "skew": skew_of(lam_GE), "rows": rows, "slots": slots, "drop": drop}
    for name, capacity in (("below_mean", int(BELOW_MEAN * mean_rows)), ("at_ultraep", most)):
        exact = get("ultraep", slots=slots, floor=floor, capacity=capacity)
        mine = get("lrmoe", slots=slots, capacity=capacity, forward_cost=0.0, backward_cost=1.0)
        dropping = Contender(label="lrmoe", policy=mine, drop=drop)
        contenders = [
            Contender(label="fixed", policy=get("fixed", capacity=capacity)),
            Contender(label="ultraep", policy=exact),
            Contender(label="ultraep, dropped after", policy=exact, drop=drop),
            Contender(label="lrmoe, no drop", policy=mine),
            dropping,
            replace(dropping, label="lrmoe, level", quota="level"),
        ]
        record[name] = {
            "capacity": capacity,
            "capacity_over_mean": capacity / mean_rows,
            "policies": [measure(contender, [lam_GE]) for contender in contenders],
        }
    return record


def cells(record: Record) -> list[str]:
    """One row of the table.

    ``UltraEP needs`` is the busiest rank's rows over the mean. ``LRMoE at 0.9`` and the last four columns, at the
    capacity that UltraEP needs, give replicas / forward rows that they take; ``dropped`` is the share of all rows that
    LRMoE's backward left out at 0.9.
    """
    below, level = (
        {policy["policy"]: policy for policy in record[name]["policies"]} for name in ("below_mean", "at_ultraep")
    )
    mine = below["lrmoe"]
    return [
        record["loads"],
        f"{record['skew']:.2f}",
        f"{record['at_ultraep']['capacity_over_mean']:.2f}",
        _moved(mine),
        f"{100 * (1 - mine['kept_rows'] / record['rows']):.1f} %" if mine["fits"] else "-",
        *(_moved(level[name]) for name in ("ultraep", "lrmoe, no drop", "lrmoe", "lrmoe, level")),
    ]


def _moved(policy: Record) -> str:
    return f"{policy['replicas']} / {policy['moved_rows']:,}" if policy["fits"] else "does not fit"


def _best_ultraep(lam_GE: Tensor, slots: int) -> tuple[int, int]:
    """The largest rows of a rank under the better of two floors, and that floor."""
    found = []
    for floor in (1024, 1):
        plan = get("ultraep", slots=slots, floor=floor).plan(lam_GE)
        found.append((int(plan.rows_EG.sum(0).max()), plan.num_replicas, floor))
    most, _, floor = min(found, key=lambda one: one[:2])
    return most, floor
