"""``lrmoe plan``: its settings, its tables and its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import lrmoe
from lrmoe.studies.paper_config import FASTER
from lrmoe.studies.plan import Option, Planner, recommend, study
from lrmoe.studies.plan_config import PlanConfig
from lrmoe.studies.replay import Record
from lrmoe.training.files import check_free, clear_run, locked, write_json, write_records

HEADINGS = (
    "policy",
    "save",
    "no drop GiB",
    "fits",
    "least drop",
    "GiB then",
    "MoE ms then",
    "/ fixed",
    "/ even",
    "/ fixed, most drop",
    "replicas",
    "busiest",
    "pays from",
)
NOTE = (
    "no drop: memory of the fullest rank in the worst microbatch with every row kept. least drop: the least that fits; "
    "-: not even the largest that is accepted, which what follows then shows. MoE: modelled time of all MoE layers in "
    "a microbatch. / fixed: over fixed ownership's without a drop; / even: over perfectly even ranks without replicas. "
    "most drop: at the largest drop that is accepted. replicas: of a record. busiest: over mean rows of a rank. pays "
    f"from: tokens a rank from which on replicas bring the time to at most {FASTER:.0%} of fixed ownership's, with the "
    "same save and no drop."
)


def plan(
    config: PlanConfig,
    out: Path | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Record:
    """Looks at every policy, slots and save mode. With ``out`` writes ``metrics.jsonl`` (a line a setting),
    ``summary.json`` and ``config.json`` there.

    Returns:
        What ``summary.json`` holds: the case, ``options`` (records of :func:`lrmoe.studies.plan.study`), ``memory`` and
        ``time`` of the recommended setting, ``recommendation`` and ``notes``.

    Raises:
        ValueError: if a setting, a file or the loads are wrong, or ``out`` is not free; nothing is written then.
    """
    if out is not None:
        check_free(out, overwrite=overwrite, command="plan")
    case = config.case()
    records = study(case, progress)
    best, sentence = recommend(records, case)
    shown = best if best is not None else min(records, key=lambda one: float(one["bytes"]))
    planner = Planner(case)
    option = Option(policy=shown["policy"], slots=shown["slots"])
    drop = case.max_drop if shown["drop"] is None else shown["drop"]
    layers = len(set(case.routing.layer)) if case.routing.about else 1
    summary: Record = {
        "source": case.routing.source,
        "synthetic": case.routing.synthetic,
        "produced": case.routing.produced(),
        "layers_of_loads": layers,
        "model": asdict(case.model),
        "parameters": case.model.params,
        "active_parameters": case.model.active_params,
        "hardware": asdict(case.hardware),
        "ranks": case.ranks,
        "tokens": case.tokens,
        "budget": case.budget,
        "max_drop": case.max_drop,
        "elementwise": case.elementwise,
        "options": records,
        "recommended": None if best is None else {name: best[name] for name in ("policy", "slots", "save", "drop")},
        "shown": f"{shown['label']}, save={shown['save']}, {drop:.0%} dropped",
        "memory": planner.memory(option, drop, shown["save"]).to_dict(),
        "recommendation": sentence,
    }
    summary["notes"] = notes(summary, config)
    if out is not None:
        _write(out, config, summary)
    return summary


def describe(summary: Record) -> list[str]:
    """What is planned for, in lines for a reader."""
    shape, produced = summary["model"], summary["produced"]
    return [
        f"model: {shape['name']}, {summary['parameters'] / 1e9:.1f} billion parameters "
        f"({summary['active_parameters'] / 1e9:.1f} active), {shape['moe_layers']} MoE layers of "
        f"{shape['num_experts']} experts, {shape['top_k']} a token",
        f"cluster: {summary['ranks']} ranks of {summary['hardware']['name']}, {summary['budget'] / 2**30:.4g} GiB "
        f"each; {summary['tokens']:,} tokens a rank and microbatch",
        f"loads: {summary['source']}; busiest over mean rank {produced['skew_mean']:.2f} (most "
        f"{produced['skew_max']:.2f})",
    ]


def notes(summary: Record, config: PlanConfig) -> list[str]:
    """What the numbers rest on, and what a drop would bring."""
    said = []
    if summary["layers_of_loads"] < summary["model"]["moe_layers"]:
        count = summary["layers_of_loads"]
        said.append(
            f"{count} layer{'s' * (count > 1)} of loads stand{'s' * (count == 1)} for all "
            f"{summary['model']['moe_layers']}: where the hot ranks of layers differ, ranks hold less than shown"
        )
    if config.max_drop:
        best = min(summary["options"], key=lambda one: float(one["at_most_drop"]["over_fixed"]))
        said.append(
            f"with the largest accepted drop, {config.max_drop:.0%}, {best['label']} with save={best['save']} takes "
            f"{best['at_most_drop']['over_fixed']:.2f} of fixed ownership's MoE time; a drop changes gradients, what "
            "that does to the loss depends on selector, rate and regime, see docs/method.md"
        )
    said.append("the forward computes every row: a drop makes the backward's buffers smaller, nothing else")
    return said


def cells(record: Record) -> list[str]:
    """One row of the table."""
    crossover = record["crossover"]
    pays = "-" if not record["slots"] else "never" if crossover is None else f"{crossover:,.0f}"
    return [
        record["label"],
        record["save"],
        f"{record['exact_bytes'] / 2**30:.2f}",
        "yes" if record["fits_exactly"] else "no",
        "-" if record["drop"] is None else f"{record['drop']:.0%}",
        f"{record['bytes'] / 2**30:.2f}",
        f"{1e3 * record['seconds']:.4g}",
        f"{record['over_fixed']:.3f}",
        f"{record['over_even']:.3f}",
        f"{record['at_most_drop']['over_fixed']:.3f}",
        f"{record['replicas']:.1f}",
        f"{record['busiest']:.2f}",
        pays,
    ]


def item_rows(summary: Record) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the itemised memory; buffers of one pass are there only while it runs."""
    rows = [
        [item["name"], f"{item['bytes'] / 2**30:.3f}", item["when"]]
        for item in summary["memory"]["items"]
        if item["bytes"]
    ]
    rows.append(["at the fullest moment", f"{summary['memory']['total'] / 2**30:.3f}", ""])
    return ["item", "GiB", "when"], rows


def _write(out: Path, config: PlanConfig, summary: Record) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        clear_run(out)
        write_records(out / "metrics.jsonl", [{"step": i, **line} for i, line in enumerate(summary["options"])])
        write_json(out / "summary.json", summary)
        write_json(out / "config.json", {"command": "plan", "version": lrmoe.__version__, **asdict(config)})
