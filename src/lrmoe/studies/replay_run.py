"""``lrmoe balance --trace`` and ``--workload``: its settings, its table and its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import lrmoe
from lrmoe.studies.costs import KINDS
from lrmoe.studies.paper_config import assumptions
from lrmoe.studies.replay import Outcome, Record, Setting, compare
from lrmoe.studies.replay_config import ReplayConfig
from lrmoe.studies.routing import Routing
from lrmoe.studies.systems import SYSTEMS
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
            "assumed": assumptions(self.setting.price.model, self.setting.price.hardware),
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
    a policy planned), ``summary.json`` and ``config.json`` there.

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
    said = [
        f"loads: {summary['source']}",
        f"{shape['records']:,} records ({shape['steps']:,} steps, {layers} layer{'s' * (layers > 1)}), "
        f"{shape['experts']} experts on {shape['ranks']} ranks, {' to '.join(sorted(pairs, key=len))} pairs a record",
    ]
    if produced["skew_mean"] is None:
        return [*said, "there is no load: no pair of any record goes to any expert, so nothing is even or uneven"]
    said.append(
        f"as produced: busiest over mean rank {produced['skew_mean']:.3f} (95 %: {produced['skew_p95']:.3f}, most "
        f"{produced['skew_max']:.3f}); in the emptiest record {produced['experts_used']} experts and "
        f"{produced['ranks_used']} ranks have load, {produced['sources_used']} ranks have tokens"
    )
    if shape["ranks"] == 1:
        said.append("one rank: it computes every expert, so there is nothing to balance")
    return [*said, f"times of a layer: {summary['assumed']}"]


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
                f"{record['against_fixed']:.2f} x; busiest rank {_ratio(record['forward_mean'])})"
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
        *(
            "-" if record[key] is None else f"{record[key]:.3f}"
            for key in ("forward_mean", "forward_p95", "kept_mean", "kept_p95")
        ),
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
    return f"{_ratio(record['forward_mean'])}, {f'**{ratio}**' if 'slower' in record['verdict'] else ratio}"


def _ratio(value: float | None) -> str:
    return "without load" if value is None else f"{value:.2f}"


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
