"""``lrmoe balance``: its settings, its table and its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import lrmoe
from lrmoe.studies.balance import Record, contenders, measure
from lrmoe.studies.balance_config import BalanceConfig
from lrmoe.studies.paper_config import FASTER
from lrmoe.studies.price import Price, advice, break_even
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
    "Largest rows of a rank over the mean rows of a rank, at home and with replicas; of the backward, kept rows over "
    "the mean of the kept rows. Replicas, forward rows they take, rows dropped beyond the drop, weights and gradients "
    "on the wire: sums over the load matrices."
)


@dataclass(frozen=True, kw_only=True)
class BalanceResult:
    """What :func:`balance` found.

    Args:
        source: what the loads are.
        shape: matrices, ranks, experts.
        loaded: matrices with any pair; what is said of ratios and times is of these.
        tokens: of a rank in these, the mean.
        assumed: what the times rest on, in words.
        policies: a record of :func:`lrmoe.studies.balance.measure` a policy.
        break_even: one of :func:`lrmoe.studies.price.break_even` a policy with replicas; none where there is nothing to
            balance.
    """

    source: str
    shape: tuple[int, int, int]
    loaded: int
    tokens: int
    assumed: str
    policies: list[Record]
    break_even: list[Record]

    @property
    def notes(self) -> list[str]:
        """Why a policy does not fit, and from how many tokens on replicas pay."""
        said = [f"{record['policy']}: {record['reason']}" for record in self.policies if not record["fits"]]
        matrices, ranks, _ = self.shape
        if not self.loaded:
            return [*said, "there is no load: no pair in these loads goes to any expert, so nothing is even or uneven"]
        if self.loaded < matrices:
            said.append(
                f"{matrices - self.loaded} of {matrices} load matrices hold no pair: ratios and times are of the others"
            )
        if ranks == 1:
            return [
                *said,
                "one rank: it computes every expert, so there is nothing to balance and nowhere to put a replica",
            ]
        if not self.break_even:
            return said
        return [
            *said,
            f"times of a layer: {self.assumed}",
            *map(advice, self.break_even),
            self.verdict,
        ]

    @property
    def paying(self) -> list[Record]:
        """Break-evens of what fits and pays at the loads' own size."""
        fits = {record["policy"] for record in self.policies if record["fits"]}
        return [one for one in self.break_even if one["policy"] in fits and one["here"] and one["here"]["pays"]]

    @property
    def verdict(self) -> str:
        """Whether to use replicas for loads like these at their own size."""
        here = f"at the {self.tokens:,} tokens a rank that these loads have"
        if not self.paying:
            return (
                f"{here} leave replicas off (slots=0): none brings a layer to at most {FASTER:.0%} of its time without"
            )
        told = ", ".join(f"{one['policy']} {one['here']['planned'] / one['here']['home']:.2f}" for one in self.paying)
        return f"{here} replicas pay; a layer's time with them over without: {told}"


def balance(config: BalanceConfig, out: Path | None = None, *, overwrite: bool = False) -> BalanceResult:
    """Plans the loads under every policy and, if ``out`` is given, writes ``metrics.jsonl`` (a record a policy),
    ``summary.json`` and, last, ``config.json`` there.

    Raises:
        ValueError: if a setting or the loads' file is wrong, or ``out`` is not free; nothing is written then.
    """
    if out is not None:
        check_free(out, overwrite=overwrite)
    source, loads = config.load()
    asked: Record = {"drop": config.drop, "quota": config.quota, "slots": config.slots, "floor": config.floor}
    policies = [measure(one, loads, config.expert) for one in contenders(capacity=config.capacity, **asked)]
    shape, ranks = config.shape_of_experts(), len(loads[0])
    loaded = [lam_GE for lam_GE in loads if bool(lam_GE.any())]
    pairs = sum(int(lam_GE.sum()) for lam_GE in loaded)
    tokens = round(pairs / (len(loaded) * ranks * shape.top_k)) if loaded else 0
    price = Price(model=shape, hardware=config.machine())
    breaks = [
        break_even(one, loaded, prices=[price], at=tokens)[0]
        for one in contenders(**asked)
        if one.policy.slots and loaded and ranks > 1
    ]
    result = BalanceResult(
        source=source,
        shape=(len(loads), *loads[0].shape),
        loaded=len(loaded),
        tokens=tokens,
        assumed=config.assumed,
        policies=policies,
        break_even=breaks,
    )
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
    """Headings and rows of the break-even's table: a row a size, for each policy a layer's milliseconds with replicas
    over those without."""
    headings = ["tokens a rank", *(f"{record['policy']}, ms / at home" for record in records)]
    rows = []
    for sizes in zip(*(record["sizes"] for record in records), strict=True):
        shown = (f"{size['planned']:.3f} / {size['home']:.3f}" if size["replicas"] else "-" for size in sizes)
        rows.append([f"{sizes[0]['tokens']:,}", *shown])
    return headings, rows


def _write(out: Path, config: BalanceConfig, result: BalanceResult) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        clear_run(out)
        write_records(out / "metrics.jsonl", [{"step": step, **record} for step, record in enumerate(result.policies)])
        write_json(out / "summary.json", {**asdict(result), "notes": result.notes})
        write_json(out / "config.json", {"command": "balance", "version": lrmoe.__version__, **asdict(config)})
