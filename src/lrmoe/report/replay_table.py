"""The balancing page's table, as HTML."""

from __future__ import annotations

from typing import Any

from lrmoe.report.text import DASH, duration, escape, fixed, percent, size

# What decides comes first: on a narrow screen the rest is to be scrolled to.
_COLUMNS = (
    ("Against fixed", "same drop"),
    ("MoE time", "a step, modelled"),
    ("Forward", "busiest / mean"),
    ("Kept rows", "busiest / mean"),
    ("Replicas", "a record"),
    ("Weights", "on the wire a step"),
    ("Gradients", "a step"),
    ("Optimizer", "a step"),
    ("Rows", "a step"),
    ("Held", "fullest rank"),
    ("Planning", "a record; deciding, a step"),
)
_NOTE = (
    "MoE time: modelled, of all MoE layers in a step, with nothing hidden; below it, if copies hide behind the "
    "computing of their layer. Busiest over mean rows of a rank: the mean over records, below it what 95 % of them do "
    "not exceed. Replicas: instances away from an expert’s first host. On the wire: all ranks and layers of a step. "
    "Held: weights, gradients and optimizer state of the fullest rank. Planning, and below it deciding between steps: "
    "CPU time, measured."
)


def replay_table(records: list[dict[str, Any]]) -> str:
    """A row a policy and drop."""
    head = "".join(f'<th scope="col">{name}<span class="unit">{unit}</span></th>' for name, unit in _COLUMNS)
    body = "".join(_row(record) for record in records)
    return (
        f'<h2 id="results">Results</h2><section class="card"><p class="note">{_NOTE}</p>'
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="results">'
        f'<table><thead><tr><th scope="col">Policy</th>{head}</tr></thead><tbody>{body}</tbody></table></div></section>'
    )


def name_of(record: dict[str, Any]) -> str:
    """A policy with its drop, as text."""
    return f"{record['policy']}, {percent(record['drop'], 0)} dropped" if record["drop"] else str(record["policy"])


def _row(record: dict[str, Any]) -> str:
    head = f'<tr><th scope="row"><span>{escape(name_of(record))}</span></th>'
    if record["reason"] is not None:
        return f'{head}<td class="reason" colspan="{len(_COLUMNS)}">cannot run: {escape(record["reason"])}</td></tr>'
    sent, seconds = record["bytes"], record["time_ms"]
    ratio = record["against_fixed"]
    verdict = f'<small class="worse">{escape(record["verdict"])}</small>' if record["verdict"] else ""
    cells = [
        f"{DASH if ratio is None else fixed(ratio, 2) + ' ×'}{verdict}",
        f"{duration(seconds['total'] / 1e3)}<small>{duration(seconds['hidden'] / 1e3)}</small>",
        f"{fixed(record['forward_mean'], 3)}<small>{fixed(record['forward_p95'], 3)}</small>",
        f"{fixed(record['kept_mean'], 3)}<small>{fixed(record['kept_p95'], 3)}</small>",
        fixed(record["replicas"], 1),
        *(size(sent[kind]) if sent[kind] else DASH for kind in ("weights", "gradients", "optimizer", "tokens")),
        size(record["memory"]["total"]),
        f"{duration(record['plan_ms'] / 1e3)}<small>{duration(record['decide_ms'] / 1e3)}</small>",
    ]
    return head + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
