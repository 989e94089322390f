"""``lrmoe balance``: its settings, its table and its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

import lrmoe
from lrmoe.studies.balance import Expert, Record, advice, break_even, contenders, measure
from lrmoe.studies.loads import SHAPES, read_loads, shaped_loads, skewed_loads
from lrmoe.training.config import described
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
STEPS = 4
"""Of the shapes that change from step to step."""


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """What is planned, and how.

    The loads come from exactly one of ``loads``, ``shape`` and ``skew`` (2 if none is given). Sizes that are None are
    128 experts, 8 ranks, 4096 tokens and 8 experts a token for a skew, 16, 4, 512 and 2 for a shape, and for a file
    what it holds, with 8 experts a token.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    loads: str | None = described(None, "JSON file: matrix (ranks, experts) of pairs, several, or one load an expert")
    skew: float | None = described(None, "synthetic loads, or of --workload zipf: largest over mean rows of a rank (2)")
    shape: str | None = described(None, f"synthetic loads of a shape: {', '.join(SHAPES)}")
    experts: int | None = described(None, "experts of synthetic loads (128; 16 for a shape)")
    ranks: int | None = described(
        None,
        "ranks of synthetic loads (8; 4 for a shape), of a file with one load an expert, or to deal a trace out over",
    )
    tokens: int | None = described(None, "tokens of a rank, of synthetic loads (4096; 512 for a shape)")
    top_k: int | None = described(None, "experts a token (8; 2 for a shape)")
    seed: int | None = described(None, "of loads with a skew, or of a workload (0)")
    drop: float = described(0.2, "share of the rows that the backward may leave out")
    quota: Literal["expert", "level"] = described("expert", "how the drop is spread over experts")
    slots: int = described(1, "replicas a rank may hold, of policies with a total: experts on top of its own")
    capacity: float | None = described(None, "rows whose backward a rank can hold; default: no limit")
    floor: int = described(1024, "rows that a replica of UltraEP must take where its fast path fails")
    dim: int = described(2048, "model width, of the break-even and of modelled times")
    expert_dim: int = described(768, "expert width")
    flops: float = described(4e14, "operations a second that a rank reaches")
    bandwidth: float = described(4e11, "bytes a second between a rank and the others, each way")

    def __post_init__(self) -> None:
        given = [name for name in ("loads", "skew", "shape") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: each says what the loads are; give one")
        for name in ("experts", "tokens", "seed") if self.loads is not None else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)!r} is of synthetic loads; leave it out with loads")
        if self.shape is not None and self.seed is not None:
            raise ValueError(f"seed={self.seed!r} has no effect on a shape, which draws nothing; leave it out")
        self.expert  # noqa: B018  Checks its part.

    @property
    def expert(self) -> Expert:
        """Sizes and rates of the break-even."""
        return Expert(dim=self.dim, expert_dim=self.expert_dim, flops=self.flops, bandwidth=self.bandwidth)

    @property
    def choices(self) -> int:
        """Experts a token."""
        return self.top_k if self.top_k is not None else 2 if self.shape else 8

    def load(self) -> tuple[str, list[Tensor]]:
        """What the loads are, in words, and the matrices.

        Raises:
            ValueError: if the file cannot be used, or a size or the skew is out of range.
        """
        if self.loads is not None:
            matrices = read_loads(Path(self.loads), self.ranks)
            return self.loads, matrices
        experts, ranks, tokens = (16, 4, 512) if self.shape else (128, 8, 4096)
        sizes = {
            "num_experts": experts if self.experts is None else self.experts,
            "num_ranks": ranks if self.ranks is None else self.ranks,
            "tokens": tokens if self.tokens is None else self.tokens,
            "top_k": self.choices,
        }
        if self.shape is not None:
            steps = STEPS if self.shape in ("rotating", "burst") else 1
            return f"synthetic, {self.shape}", [shaped_loads(self.shape, step=step, **sizes) for step in range(steps)]
        skew = 2.0 if self.skew is None else self.skew
        return f"synthetic, max/mean {skew:g}", [skewed_loads(skew, seed=self.seed or 0, **sizes)]


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
