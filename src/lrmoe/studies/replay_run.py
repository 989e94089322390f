"""``lrmoe balance --trace`` and ``--workload``: its settings, its table and its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import lrmoe
from lrmoe.config import require_count, require_number
from lrmoe.studies.balance import Expert
from lrmoe.studies.costs import KINDS
from lrmoe.studies.replay import Choice, Outcome, Record, Setting, compare, parse_choices
from lrmoe.studies.routing import WORKLOADS, Routing, recorded, synthetic
from lrmoe.studies.systems import SYSTEMS, Sizes
from lrmoe.training.config import described
from lrmoe.training.files import check_free, clear_run, locked, write_json, write_records

HEADINGS = (
    "policy",
    "drop",
    "forward",
    "95 %",
    "kept",
    "kept 95 %",
    "replicas",
    "W",
    "Gr",
    "O",
    "tokens",
    "held",
    "plan ms",
    "decide ms",
    "MoE ms",
    "hidden ms",
    "/ fixed",
    "against fixed ownership",
)
NOTE = (
    "forward, kept: largest over mean rows of a rank in the forward, and of those the backward keeps; mean and 95th "
    "percentile over records. replicas: instances away from an expert's first host, mean of a record. W, Gr, O, "
    "tokens: weights, "
    "gradients, optimizer state and rows on the wire in a step, all ranks and layers. held: weights, gradients and "
    "optimizer state of the fullest rank. plan: CPU time of a record; decide: of a step. MoE: modelled time of all MoE "
    "layers in a step, nothing hidden; hidden: if copies hide behind the computing of their layer. / fixed: MoE over "
    "that of fixed ownership under the same drop."
)
SYNTHETIC_STEPS = 40
_SIZES = {"experts": 128, "ranks": 8, "tokens": 4096, "top_k": 8, "seed": 0, "steps": SYNTHETIC_STEPS}
_WIDTHS = {"dim": 2048, "expert_dim": 768}


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What is played to which policies.

    The loads come from exactly one of ``trace`` and ``workload``. Sizes that are None are those of a trace, or 128
    experts, 8 ranks, 4096 tokens and 8 experts a token for a workload; experts' widths that are None those that a trace
    names, or 2048 and 768.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    trace: str | None = described(None, "routing trace: run folder of lrmoe train --trace, its trace/ or a part")
    workload: str | None = described(None, f"synthetic run: {', '.join(WORKLOADS)}")
    policies: str | None = described(
        None, f"comma-separated, options after colons, e.g. symi,laer:node_size=4; default: {', '.join(SYSTEMS)}"
    )
    steps: int | None = described(
        None, f"optimizer steps: of a workload ({SYNTHETIC_STEPS}); of a trace the first so many"
    )
    layers: int | None = described(None, "MoE layers that memory is counted for; default: those of the trace, 1")
    skew: float | None = described(None, "of the workload zipf: largest over mean rows of a rank (2)")
    experts: int | None = described(None, "experts of a workload (128)")
    ranks: int | None = described(None, "ranks of a workload (8), or to deal the loads of a trace out over")
    tokens: int | None = described(None, "tokens of a rank, of a workload (4096)")
    top_k: int | None = described(None, "experts a token, of a workload (8)")
    seed: int | None = described(None, "of a workload's draws (0)")
    drop: float = described(0.2, "share of the rows that the backward may leave out")
    quota: Literal["expert", "level"] = described("expert", "how the drop is spread over experts")
    slots: int = described(1, "experts a rank may hold on top of its own")
    capacity: float | None = described(None, "rows whose backward a rank can hold; default: no limit")
    floor: int = described(1024, "rows that a replica of UltraEP must take where its fast path fails")
    dim: int | None = described(None, "model width; default: the trace's, else 2048")
    expert_dim: int | None = described(None, "expert width; default: the trace's, else 768")
    flops: float = described(4e14, "operations a second that a rank reaches")
    bandwidth: float = described(4e11, "bytes a second between a rank and the others, each way")

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.workload is None):
            raise ValueError("give either a trace or a workload: each says what the loads are")
        for name in ("experts", "tokens", "top_k", "seed", "skew") if self.trace is not None else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)!r} is of workloads; leave it out with a trace")
        for name in ("steps", "layers", "ranks"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), least=1)
        require_count("slots", self.slots)
        require_count("floor", self.floor, least=1)
        if not 0.0 <= require_number("drop", self.drop) < 1.0:
            raise ValueError(f"drop={self.drop!r} must be in [0, 1): the fraction of pairs the backward may leave out")
        if self.capacity is not None and not require_number("capacity", self.capacity) > 0:
            raise ValueError(f"capacity={self.capacity!r} must be a positive number")
        self.expert({})  # Checks its part.

    def choices(self) -> list[Choice]:
        """The policies, fixed ownership first."""
        return parse_choices(self.policies)

    def routing(self) -> Routing:
        """The loads.

        Raises:
            ValueError: if the trace cannot be used, or a workload cannot be had.
        """
        if self.trace is not None:
            return recorded(Path(self.trace), ranks=self.ranks, steps=self.steps)
        assert self.workload is not None
        sizes = {
            name: default if getattr(self, name) is None else getattr(self, name) for name, default in _SIZES.items()
        }
        return synthetic(self.workload, skew=self.skew, **sizes)

    def expert(self, about: dict[str, Any]) -> Expert:
        """Its widths and the rates; ``about`` is what a trace says of its model."""
        widths = {}
        for name, default in _WIDTHS.items():
            own, told = getattr(self, name), about.get(name)
            widths[name] = own if own is not None else told if isinstance(told, int) and told > 0 else default
        return Expert(flops=self.flops, bandwidth=self.bandwidth, **widths)

    def setting(self, routing: Routing) -> Setting:
        """What the policies share."""
        _, ranks, experts = routing.shape
        layers = len(set(routing.layer)) if self.layers is None else self.layers
        return Setting(
            sizes=Sizes(experts=experts, ranks=ranks, layers=layers, expert=self.expert(routing.about)),
            slots=self.slots,
            capacity=self.capacity,
            floor=self.floor,
            quota=self.quota,
        )


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What :func:`run_replay` found."""

    routing: Routing
    setting: Setting
    outcomes: list[Outcome]

    def summary(self) -> Record:
        """What ``summary.json`` holds: the loads as they came out, the sizes, and a record a policy and drop."""
        records, ranks, experts = self.routing.shape
        return {
            "source": self.routing.source,
            "synthetic": self.routing.synthetic,
            "shape": {
                "records": records,
                "steps": len(set(self.routing.step)),
                "microbatches": len(set(self.routing.microbatch)),
                "layers": [self.routing.layers[layer] for layer in sorted(set(self.routing.layer))],
                "ranks": ranks,
                "experts": experts,
            },
            "produced": self.routing.produced(),
            "sizes": asdict(self.setting.sizes),
            "traffic": {name: system.describes for name, system in SYSTEMS.items()},
            "policies": [outcome.record for outcome in self.outcomes],
            "notes": notes([outcome.record for outcome in self.outcomes]),
        }


def run_replay(
    config: ReplayConfig,
    out: Path | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ReplayResult:
    """Plays the loads to every policy and, if ``out`` is given, writes ``metrics.jsonl`` (a line for every record that
    a policy planned), ``summary.json``, ``config.json`` and ``report.html`` there.

    Raises:
        ValueError: if a setting or the trace is wrong, or ``out`` is not free; nothing is written then.
    """
    if out is not None:
        check_free(out, overwrite=overwrite)
    choices = config.choices()
    routing = config.routing()
    setting = config.setting(routing)
    outcomes = compare(choices, routing, setting, drop=config.drop, progress=progress)
    result = ReplayResult(routing=routing, setting=setting, outcomes=outcomes)
    if out is not None:
        _write(out, config, result)
    return result


def describe(summary: Record) -> list[str]:
    """What the loads are and what they came out as, in lines for a reader."""
    shape, produced = summary["shape"], summary["produced"]
    pairs = {f"{produced[name]:,}" for name in ("pairs_min", "pairs_max")}
    layers = len(shape["layers"])
    return [
        f"loads: {summary['source']}",
        f"{shape['records']:,} records ({shape['steps']:,} steps, {layers} layer{'s' * (layers > 1)}), "
        f"{shape['experts']} experts on {shape['ranks']} ranks, {' to '.join(sorted(pairs, key=len))} pairs a record",
        f"as produced: busiest over mean rank {produced['skew_mean']:.3f} (95 %: {produced['skew_p95']:.3f}, most "
        f"{produced['skew_max']:.3f}); in the emptiest record {produced['experts_used']} experts and "
        f"{produced['ranks_used']} ranks have load, {produced['sources_used']} ranks have tokens",
    ]


def notes(records: list[Record]) -> list[str]:
    """Who cannot run and why, and who does worse than fixed ownership."""
    said = []
    for record in records:
        who = f"{record['policy']}, drop {record['drop']:.0%}" if record["drop"] else record["policy"]
        if record["reason"] is not None:
            said.append(f"{who} cannot run: {record['reason']}")
        elif record["verdict"]:
            said.append(
                f"{who}: {record['verdict']} ({record['time_ms']['total']:.3g} ms a step, "
                f"{record['against_fixed']:.2f} x; busiest rank {record['forward_mean']:.2f})"
            )
    return said


def cells(record: Record) -> list[str]:
    """One row of the table."""
    name, drop = record["policy"], f"{record['drop']:.0%}"
    if record["reason"] is not None:
        return [name, drop, *["-"] * (len(HEADINGS) - 3), record["verdict"]]
    ratio = record["against_fixed"]
    return [
        name,
        drop,
        *(f"{record[key]:.3f}" for key in ("forward_mean", "forward_p95", "kept_mean", "kept_p95")),
        f"{record['replicas']:.1f}",
        *(_size(record["bytes"][kind]) for kind in KINDS),
        _size(record["memory"]["total"]),
        f"{record['plan_ms']:.2f}",
        f"{record['decide_ms']:.2f}",
        *(f"{record['time_ms'][key]:.3g}" for key in ("total", "hidden")),
        "-" if ratio is None else f"{ratio:.2f}",
        record["verdict"],
    ]


def short_cell(record: Record) -> str:
    """Busiest over mean rank in the forward, and the time over fixed ownership's, in bold Markdown where it is more."""
    if record["reason"] is not None:
        return "cannot run"
    ratio = f"{record['against_fixed']:.2f}"
    return f"{record['forward_mean']:.2f}, {f'**{ratio}**' if 'slower' in record['verdict'] else ratio}"


def _size(number_of_bytes: float) -> str:
    """Three digits with a binary unit; a dash for nothing."""
    if not number_of_bytes:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if number_of_bytes < 1000:
            return f"{number_of_bytes:.3g} {unit}"
        number_of_bytes /= 1024
    return f"{number_of_bytes:.3g} GiB" if number_of_bytes < 1000 else f"{number_of_bytes / 1024:,.3g} TiB"


def _write(out: Path, config: ReplayConfig, result: ReplayResult) -> None:
    from lrmoe.report.replay import write_replay_page

    lines = [
        {"policy": outcome.record["policy"], "drop": outcome.record["drop"], **line}
        for outcome in result.outcomes
        for line in outcome.lines
    ]
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        clear_run(out)
        write_records(out / "metrics.jsonl", lines)
        write_json(out / "summary.json", result.summary())
        write_json(out / "config.json", {"command": "balance", "version": lrmoe.__version__, **asdict(config)})
        write_replay_page(out)
