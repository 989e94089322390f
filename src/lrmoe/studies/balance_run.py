"""``lrmoe balance``: its settings, its table and its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import lrmoe
from lrmoe.studies.balance import Record, advice, break_even, contenders, measure
from lrmoe.studies.balance_config import BalanceConfig
from lrmoe.training.files import check_free, clear_run, locked, write_json, write_records

HEADINGS = (
    "policy",
    "forward, home",
    "forward",
    "backward, home",
    "backward",
    "replicas",
    "moved rows",
    "more dropped",
    "replica GiB",
    "fits",
)
NOTE = (
    "Largest rows of a rank over the mean rows of a rank, at home and with replicas; of the backward, rows it keeps. "
    "Replicas, forward rows they take, rows dropped beyond the drop, weights and gradients on the wire: sums over the "
    "load matrices."
)


@dataclass(frozen=True, kw_only=True)
class BalanceResult:
    """What :func:`balance` found.

    Args:
        source: what the loads are.
        shape: matrices, ranks, experts.
        policies: a record of :func:`lrmoe.studies.balance.measure` a policy.
        break_even: one of :func:`lrmoe.studies.balance.break_even` a policy with replicas.
    """

    source: str
    shape: tuple[int, int, int]
    policies: list[Record]
    break_even: list[Record]

    @property
    def notes(self) -> list[str]:
        """Why a policy does not fit, and from how many tokens on replicas pay."""
        reasons = [f"{record['policy']}: {record['reason']}" for record in self.policies if not record["fits"]]
        return reasons + [advice(record) for record in self.break_even]


def balance(config: BalanceConfig, out: Path | None = None, *, overwrite: bool = False) -> BalanceResult:
    """Plans the loads under every policy and, if ``out`` is given, writes ``metrics.jsonl`` (a record a policy),
    ``summary.json``, ``config.json`` and, last, ``report.html`` there.

    Raises:
        ValueError: if a setting or the loads' file is wrong, or ``out`` is not free; nothing is written then.
    """
    if out is not None:
        check_free(out, overwrite=overwrite)
    source, loads = config.load()
    asked: Record = {"drop": config.drop, "quota": config.quota, "slots": config.slots, "floor": config.floor}
    policies = [measure(one, loads, config.expert) for one in contenders(capacity=config.capacity, **asked)]
    breaks = [
        break_even(one, loads, top_k=config.choices, expert=config.expert)
        for one in contenders(**asked)
        if one.policy.slots
    ]
    result = BalanceResult(source=source, shape=(len(loads), *loads[0].shape), policies=policies, break_even=breaks)
    if out is not None:
        _write(out, config, result)
    return result


def cells(record: Record) -> list[str]:
    """One row of the table, without ``fits`` where the reason is elsewhere."""

    def show(name: str, form: str) -> str:
        return "-" if record[name] is None else form.format(record[name])

    sent = record["replica_bytes"]
    return [
        record["policy"],
        *(show(name, "{:.3f}") for name in ("forward_home", "forward", "backward_home", "backward")),
        *(show(name, "{:,}") for name in ("replicas", "moved_rows", "extra_dropped")),
        "-" if sent is None else f"{sent / 2**30:.3f}",
        "yes" if record["fits"] else "no",
    ]


def break_even_rows(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the break-even's table: a row a size, for each policy saved / cost in milliseconds."""
    headings = ["tokens a rank", *(f"{record['policy']}, ms saved / cost" for record in records)]
    rows = []
    for sizes in zip(*(record["sizes"] for record in records), strict=True):
        rows.append([f"{sizes[0]['tokens']:,}", *(f"{size['saved']:.3f} / {size['cost']:.3f}" for size in sizes)])
    return headings, rows


def _write(out: Path, config: BalanceConfig, result: BalanceResult) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        clear_run(out)
        write_records(out / "metrics.jsonl", [{"step": step, **record} for step, record in enumerate(result.policies)])
        write_json(out / "summary.json", {**asdict(result), "notes": result.notes})
        write_json(out / "config.json", {"command": "balance", "version": lrmoe.__version__, **asdict(config)})
        from lrmoe.report import write_report

        write_report(out)
