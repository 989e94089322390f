"""The balancing page: ranks' loads before and after under each policy with a slider over steps, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lrmoe.report.replay_charts import COLOURS, PARTS, evenness, panel_frame, time_bars
from lrmoe.report.replay_data import Played, frames, read_played
from lrmoe.report.replay_table import replay_table
from lrmoe.report.text import counted, escape, fixed, percent, short_layer_names, whole
from lrmoe.training.files import write_text

# The colours are those of the script.
_BARS = [("#d3d9e2", "every expert at home"), ("#2f7fc1", "forward as planned"), ("#0b3c66", "kept by the backward")]


def write_replay_page(folder: Path) -> Path:
    """Writes ``report.html`` into a folder of ``lrmoe balance --trace`` or ``--workload``.

    Raises:
        ValueError: if a file is missing or malformed; names it.
    """
    played = read_played(folder)
    try:
        page = render_replay(played)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        name = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder / 'summary.json'} is damaged or of another version of lrmoe ({name})") from error
    path = folder / "report.html"
    # Names that the system does not decode come as lone surrogates, which no UTF-8 file can hold.
    write_text(path, page.encode("utf-8", "backslashreplace").decode("utf-8"))
    return path


def render_replay(played: Played) -> str:
    """The page, as HTML."""
    from plotly.offline import get_plotlyjs

    from lrmoe.report.page import asset, inline_json

    data = frames(played)
    data["layers"] = short_layer_names(data["layers"])
    figures = {f"evenness-{i}": evenness(played, drop) for i, drop in enumerate(played.drops)}
    figures["time"] = time_bars(played)
    title = _title(played)
    settings = escape(json.dumps(played.config, indent=2, ensure_ascii=False))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} – LRMoE balancing</title>
<link rel="icon" href="data:,">
<style>{asset("report.css")}{asset("replay.css")}</style>
</head>
<body>
<header>
<p class="eyebrow">LRMoE · Balancing</p>
<h1>{title}</h1>
<p class="lead">{_lead(played)}</p>
{_facts(played)}
{_notices(played)}
</header>
<main>
<noscript><p class="notice">The charts are drawn by a script inside this file; allow scripts to see them.</p></noscript>
{_bars(played, data)}
{replay_table(played.records)}
{_charts(played, figures)}
{_method(played)}
<h2>Settings</h2>
<section class="card"><details><summary>config.json</summary>
<pre tabindex="0">{settings}</pre></details></section>
</main>
<footer>Written by LRMoE from {escape(played.path.resolve().name)}/. A record is one layer's forward in one microbatch;
a row is a token and one of the experts chosen for it.</footer>
<script>{get_plotlyjs()}</script>
<script type="application/json" id="replay-data">{
        inline_json({"figures": figures, "bars": data, "panel": panel_frame()})
    }</script>
<script>{asset("replay.js")}</script>
</body>
</html>
"""


def _title(played: Played) -> str:
    shape = played.summary["shape"]
    what = played.config.get("workload")
    kind = f"Synthetic loads “{what}”" if played.summary["synthetic"] else "Recorded loads"
    return escape(f"{kind}: {shape['experts']} experts on {counted(shape['ranks'], 'rank')}")


def _lead(played: Played) -> str:
    produced = played.summary["produced"]
    sentences = [
        f"With every expert at home, the busiest rank has {fixed(produced['skew_mean'], 2)} times the mean rows "
        f"({fixed(produced['skew_p95'], 2)} at the 95th percentile)."
    ]
    for drop in played.drops:
        ran = [r for r in played.records if r["drop"] == drop and r["against_fixed"] is not None]
        others = [r for r in ran if r["system"] != "fixed"]
        if not others:
            continue
        under = f"With {percent(drop, 0)} of the backward dropped" if drop else "Without recalibration"
        best = min(others, key=lambda r: r["time_ms"]["total"])
        worse = [f"<b>{escape(r['policy'])}</b>" for r in others if "slower" in r["verdict"]]
        if best["against_fixed"] < 1:
            said = (
                f"<b>{escape(best['policy'])}</b> has the shortest modelled time, {_times(best)} of fixed ownership's"
            )
        else:
            said = "no policy beats fixed ownership in modelled time"
        end = f"; slower than fixed ownership: {', '.join(worse)}." if worse else "."
        sentences.append(f"{under}, {said}{end}")
    return " ".join(sentences)


def _times(record: dict[str, Any]) -> str:
    return f"{fixed(record['against_fixed'], 2)} ×"


def _facts(played: Played) -> str:
    shape, produced, sizes = played.summary["shape"], played.summary["produced"], played.summary["sizes"]
    expert = sizes["expert"]
    pairs = sorted({whole(produced[name]) for name in ("pairs_min", "pairs_max")}, key=len)
    items = [
        ("Loads", "synthetic" if played.summary["synthetic"] else "recorded"),
        ("Steps", whole(shape["steps"])),
        ("Records", whole(shape["records"])),
        ("MoE layers", f"{len(shape['layers'])}, held for {sizes['layers']}"),
        ("Pairs a record", " to ".join(pairs)),
        ("Experts with load", f"at least {produced['experts_used']} of {shape['experts']}"),
        ("Ranks with load", f"at least {produced['ranks_used']} of {shape['ranks']}"),
        ("Slots beyond home", whole(played.config["slots"])),
        ("Expert", f"{whole(expert['dim'])} × {whole(expert['expert_dim'])}"),
        ("Rates", f"{expert['flops'] / 1e12:,.3g} Top/s, {expert['bandwidth'] / 1e9:,.3g} GB/s"),
    ]
    terms = "".join(f"<div><dt>{term}</dt><dd>{escape(value)}</dd></div>" for term, value in items)
    return f'<dl class="facts">{terms}</dl>'


def _notices(played: Played) -> str:
    notices = [f"Loads: {played.summary['source']}."]
    if played.summary["synthetic"]:
        notices[0] = (
            f"These loads are {played.summary['source']}. No router made them; every source rank has draws of its own."
        )
    reasons = dict.fromkeys((record["policy"], record["reason"]) for record in played.records if record["reason"])
    for label, reason in reasons:
        drops = [r["drop"] for r in played.records if (r["policy"], r["reason"]) == (label, reason)]
        under = "" if len(drops) == len(played.drops) else f", {percent(drops[0], 0)} dropped,"
        notices.append(f"{label}{under} cannot run: {reason}")
    worse: dict[tuple[str, str], list[float]] = {}
    for record in played.records:
        if record["verdict"] and record["reason"] is None:
            worse.setdefault((record["policy"], record["verdict"]), []).append(record["drop"])
    if worse:
        names = [
            label + ("" if len(drops) == len(played.drops) else f", {percent(drops[0], 0)} dropped") + f" ({verdict})"
            for (label, verdict), drops in worse.items()
        ]
        notices.append(f"Worse than fixed ownership: {'; '.join(names)}.")
    items = "".join(f"<li>{escape(notice)}</li>" for notice in notices)
    return f'<div class="notice" role="note"><b>Please note</b><ul>{items}</ul></div>'


def _bars(played: Played, data: dict[str, Any]) -> str:
    def select(identity: str, label: str, options: list[str], chosen: int = 0) -> str:
        shown = "".join(
            f'<option value="{i}"{" selected" if i == chosen else ""}>{escape(option)}</option>'
            for i, option in enumerate(options)
        )
        return f'<label for="{identity}">{label}<select id="{identity}" autocomplete="off">{shown}</select></label>'

    controls = ""
    if len(data["layers"]) > 1:
        controls += select("bars-layer", "Layer", data["layers"])
    if len(data["drops"]) > 1:
        names = ["all rows" if not drop else f"{percent(1 - drop, 0)} of the rows" for drop in data["drops"]]
        controls += select("bars-drop", "Backward keeps", names, len(names) - 1)
    last = max(len(data["frames"]) - 1, 0)
    controls += (
        '<label class="slider" for="bars-step"><span>Optimizer step <output id="bars-step-value" for="bars-step">'
        f'</output></span><input type="range" id="bars-step" min="0" max="{last}" value="0" step="1" '
        'autocomplete="off"></label>'
    )
    panels = "".join(
        f'<section class="card panel" data-policy="{i}"><h3>{escape(policy["label"])} '
        '<output class="ratio"></output></h3>'
        f'<div class="plot" role="img" aria-label="Rows of each rank under {escape(policy["label"])}"></div>'
        '<p class="empty" hidden></p></section>'
        for i, policy in enumerate(data["policies"])
    )
    note = "Rows of each rank in one layer of one microbatch. The dotted line is the mean: what an even load would be."
    if len(data["frames"]) < data["all"]:
        note += f" The slider stops at {len(data['frames'])} of {whole(data['all'])} microbatches."
    return (
        f'<h2>Load of the ranks, before and after</h2><p class="intro">{note}</p>'
        f'<div class="bars-head"><div class="controls">{controls}</div>{_key(_BARS)}</div>'
        f'<div class="panels">{panels}</div>'
    )


def _key(entries: list[tuple[str, str]]) -> str:
    """What the colours of a chart say: a legend of plotly's own would take the chart's room on a narrow screen."""
    shown = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for colour, name in entries)
    return f'<p class="key">{shown}</p>'


def _charts(played: Played, figures: dict[str, Any]) -> str:
    def card(name: str, title: str, note: str, entries: list[tuple[str, str]]) -> str:
        if figures[name] is None:
            return f'<section class="card"><h3>{title}</h3><p class="empty">No policy could run.</p></section>'
        return (
            f'<section class="card"><h3>{title}</h3><p class="note">{note}</p>{_key(entries)}'
            f'<div class="plot" data-figure="{name}" role="img" aria-label="{title}. {note}"></div></section>'
        )

    even = card(
        "evenness-0",
        "How even, step by step",
        "Busiest over mean forward rows of a rank, mean over a step’s records, nothing dropped; 1 is even. A policy "
        "that plans from earlier steps is late where the loads move.",
        [
            (COLOURS[played.of(label, 0.0)["system"]], label + (" (dashed)" if label == "fixed" else ""))
            for label in played.labels
            if (label, 0.0) in played.lines
        ],
    )
    times = card(
        "time",
        "Where the modelled time goes",
        "All MoE layers in a step. Nothing is taken to be hidden; planning is not in here.",
        [(colour, title) for _, title, colour in PARTS],
    )
    return f'<h2>Over time, and in time</h2><div class="stack">{even}{times}</div>'


def _method(played: Played) -> str:
    used = dict.fromkeys(record["system"] for record in played.records)
    items = "".join(f"<li><b>{escape(name)}</b>: {escape(played.summary['traffic'][name])}.</li>" for name in used)
    return (
        '<h2>What is counted, and how</h2><section class="card">'
        "<p>Rows, replicas and bytes are counted from the plans; planning is CPU time of this machine; all other times "
        "are arithmetic: a row takes 6 D F operations forward and twice that backward if it is kept, a transfer as "
        "long as its busiest rank needs at the stated rate each way. Latency and the network’s topology are left out. "
        "W, Gr and O are an expert’s weights (2 bytes each), gradients (4) and optimizer state (12). Policies see the "
        "records in order, as in a training run. Besides rows, each system sends:</p>"
        f'<ul class="plain">{items}</ul></section>'
    )
