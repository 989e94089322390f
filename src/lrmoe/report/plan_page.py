"""The page of ``lrmoe plan``: the recommendation, every setting's memory and time, and what they consist of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lrmoe.report import palette
from lrmoe.report.charts import Figure, layout
from lrmoe.report.frame import Frame, advice, chart, facts, notices, table
from lrmoe.report.paper_page import Study, write_paper_page
from lrmoe.report.text import DASH, duration, escape, fixed, percent, size, whole
from lrmoe.studies.paper_config import FASTER

Record = dict[str, Any]
_EXACT, _DROPPED, _TIME, _MOST = palette.PALE, "#0b5cad", palette.BLUE, palette.ORANGE


def write_plan_page(folder: Path) -> Path:
    """Writes ``report.html`` into a folder of ``lrmoe plan``.

    Raises:
        ValueError: if a file is missing or damaged; names it.
    """
    return write_paper_page(folder, _page)


def _page(study: Study) -> Frame:
    summary = study.summary
    shape = summary["model"]
    figures = {"memory": _memory(summary), "time": _time(summary)}
    return Frame(
        kind="Plan on paper",
        title=f"{shape['name']} on {whole(summary['ranks'])} × {summary['hardware']['name']}",
        lead=f"<b>{escape(summary['recommendation'])}</b>",
        head=_facts(summary)
        + advice(_advice(study), basis=_BASIS)
        + notices(
            [
                ("No router made these loads: " if summary["synthetic"] else "Loads: ") + f"{summary['source']}.",
                *(f"{note[0].upper()}{note[1:]}." for note in summary["notes"]),
            ]
        ),
        body=_charts(figures) + _settings(summary) + _items(summary) + _method(summary),
        footer=study.footer,
        settings=study.config,
        figures=figures,
    )


_BASIS = (
    "It follows from the arithmetic below, which takes the memory of the rank with most and the time of the MoE layers "
    "alone. Nothing ran but planners."
)


def _advice(study: Study) -> list[str]:
    summary = study.summary
    chosen = _chosen(summary)
    said = []
    if chosen is None:
        least = min(summary["options"], key=lambda one: one["at_most_drop"]["bytes"])
        over = least["at_most_drop"]["bytes"] - summary["budget"]
        said.append(
            f"Do not start this run as it is: even “{_name(least)}” with {percent(summary['max_drop'], 0)} dropped is "
            f"{size(over)} over the budget of a rank. Halve the microbatch or the sequence, spread the experts over "
            "more ranks (--ep), recompute layers (--recompute) or shard the states (--optimizer-shards, "
            "--dense-shards), and plan again."
        )
    elif chosen["drop"]:
        said.append(
            f"Use “{_name(chosen)}” with {percent(chosen['drop'], 1)} of the backward dropped, and only because "
            "nothing fits without. Measure what that does to the loss with lrmoe compare before the long run."
        )
    else:
        left = summary["budget"] - chosen["exact_bytes"]
        said.append(
            f"Use “{_name(chosen)}” and drop nothing: it fits with {size(left)} to spare on the fullest rank. A drop "
            "is then a question of time and loss, not of memory."
        )
    having = [one for one in summary["options"] if one["slots"]]
    from_ = [one["crossover"] for one in having if one["crossover"] is not None]
    if summary["ranks"] == 1:
        said.append("Do not look for a balancing policy: on one rank there is nothing to balance.")
    elif from_ and summary["tokens"] < min(from_) and not any(one["pays"] for one in having):
        said.append(
            f"Hold no replicas for time at {whole(summary['tokens'])} tokens a rank: here they pay from about "
            f"{whole(round(min(from_)))} on."
        )
    if summary["synthetic"]:
        said.append(
            "Plan again with loads of your own model before relying on this: record them with lrmoe train --trace and "
            "give the run with --trace. Synthetic loads have the skew that they were asked for, and yours may not."
        )
    return said


def _chosen(summary: Record) -> Record | None:
    """The option that is recommended; None if nothing fits."""
    recommended = summary["recommended"]
    if not recommended:
        return None
    names = ("policy", "slots", "save")
    options: list[Record] = summary["options"]
    return next(one for one in options if all(one[name] == recommended[name] for name in names))


def _name(record: Record) -> str:
    return f"{record['label']}, {record['save']}"


def _facts(summary: Record) -> str:
    shape, machine = summary["model"], summary["hardware"]
    produced = summary["produced"]
    return facts(
        [
            (
                "Parameters",
                f"{summary['parameters'] / 1e9:.1f} billion, {summary['active_parameters'] / 1e9:.1f} active",
            ),
            ("MoE layers", f"{shape['moe_layers']}, of {shape['num_experts']} experts, {shape['top_k']} a token"),
            ("Expert", f"{whole(shape['dim'])} × {whole(shape['expert_dim'])}"),
            ("Tokens a rank", whole(summary["tokens"])),
            ("Budget a rank", size(summary["budget"])),
            (
                "Busiest rank at home",
                f"{fixed(produced['skew_mean'], 2)} × mean, most {fixed(produced['skew_max'], 2)}",
            ),
            ("Reached", f"{machine['flops'] * machine['gemm_efficiency'] / 1e12:,.0f} Top/s"),
            ("Links", f"{machine['intra_bytes_per_s'] / 1e9:,.0f} and {machine['inter_bytes_per_s'] / 1e9:,.0f} GB/s"),
        ]
    )


def _settings(summary: Record) -> str:
    chosen = _chosen(summary)
    headings = [
        ("Setting", "policy, save mode"),
        ("No drop", "fullest rank"),
        ("Fits", "in the budget"),
        ("Least drop", "that fits"),
        ("Then", "fullest rank"),
        ("MoE time", "a microbatch"),
        ("Against fixed", "no drop"),
        ("Against even", "no drop"),
        (f"At {percent(summary['max_drop'], 0)}", "against fixed"),
        ("Replicas", "a record"),
        ("Busiest", "over mean"),
        ("Pays from", "tokens a rank"),
    ]
    rows, marked = [], []
    for number, one in enumerate(summary["options"]):
        if one is chosen:
            marked.append(number)
        pays = DASH if not one["slots"] else "never" if one["crossover"] is None else whole(round(one["crossover"]))
        fits = '<span class="yes">yes</span>' if one["fits_exactly"] else '<span class="no">no</span>'
        rows.append(
            [
                escape(_name(one)),
                size(one["exact_bytes"]),
                fits,
                DASH if one["drop"] is None else percent(one["drop"], 0),
                size(one["bytes"]),
                duration(one["seconds"]),
                f"{fixed(one['over_fixed'], 3)} ×",
                f"{fixed(one['over_even'], 3)} ×",
                f"{fixed(one['at_most_drop']['over_fixed'], 3)} ×",
                fixed(one["replicas"], 1),
                fixed(one["busiest"], 2),
                pays,
            ]
        )
    note = (
        "Least drop: the smallest share of the backward’s rows to leave out so that every rank fits in every "
        "microbatch; a dash where not even the largest accepted drop does, which the columns after it then show. "
        "Against even: over "
        "ranks that all have the mean to do, without replicas. Pays from: tokens a rank from which on replicas bring "
        f"the time to at most {percent(FASTER, 0)} of fixed ownership’s, with the same save mode and no drop, as "
        "<code>lrmoe balance</code> has it. The recommended setting is marked."
    )
    return table("settings", headings, rows, note=note, title="Settings that were looked at", marked=marked)


def _charts(figures: dict[str, Figure]) -> str:
    memory = chart(
        "memory",
        "Memory of the fullest rank",
        "A bar that ends left of the dotted line, the budget, fits. A drop makes the backward’s buffers smaller and "
        "nothing else, so the two bars of a setting lie close together.",
        figure=figures["memory"],
        colours=[(_EXACT, "nothing dropped"), (_DROPPED, "at the least drop that fits, or the largest accepted")],
    )
    time = chart(
        "time",
        "Time of the MoE layers",
        "A bar that ends left of the dotted line is faster than fixed ownership without a drop. Modelled, with nothing "
        "taken to overlap.",
        figure=figures["time"],
        colours=[
            (_TIME, "at the least drop that fits, or the largest accepted"),
            (_MOST, "at the largest accepted drop"),
        ],
    )
    return f'<h2>Memory and time</h2><div class="grid">{memory}{time}</div>'


def _bars(names: list[str], series: list[tuple[str, str, list[float]]], title: str, mark: float, unit: str) -> Figure:
    labels = [escape(name).replace(", ", ",<br>", 1) if len(name) > 18 else escape(name) for name in names]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": labels,
            "x": [round(value, 4) for value in values],
            "name": name,
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}<br>{name}: %{{x:,.3f}}{unit}<extra></extra>",
        }
        for name, colour, values in series
    ]
    frame = layout(title, "", hovermode="closest", barmode="group", bargap=0.3, bargroupgap=0.06)
    frame["height"] = 100 + 40 * len(names)
    frame["xaxis"] |= {"tickformat": ",~r"}
    frame["yaxis"] |= {"autorange": "reversed", "type": "category", "ticksuffix": " "}
    frame["shapes"] = [
        {
            "type": "line",
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "x0": mark,
            "x1": mark,
            "line": {"color": palette.INK, "width": 1.5, "dash": "dot"},
        }
    ]
    return {"data": data, "layout": frame}


def _memory(summary: Record) -> Figure:
    options = summary["options"]
    series = [
        ("nothing dropped", _EXACT, [one["exact_bytes"] / 2**30 for one in options]),
        ("as planned", _DROPPED, [one["bytes"] / 2**30 for one in options]),
    ]
    return _bars(list(map(_name, options)), series, "GiB on the fullest rank", summary["budget"] / 2**30, " GiB")


def _time(summary: Record) -> Figure:
    options = summary["options"]
    series = [
        ("as planned", _TIME, [one["over_fixed"] for one in options]),
        ("largest drop", _MOST, [one["at_most_drop"]["over_fixed"] for one in options]),
    ]
    return _bars(list(map(_name, options)), series, "× fixed ownership’s", 1.0, " ×")


def _items(summary: Record) -> str:
    rows = [
        [
            escape(item["name"]),
            size(item["bytes"]),
            {"always": "always", "forward": "in the forward", "backward": "in the backward"}[item["when"]],
            escape(item["formula"]),
        ]
        for item in summary["memory"]["items"]
        if item["bytes"]
    ]
    rows.append(["at the fullest moment", f"<b>{size(summary['memory']['total'])}</b>", "", ""])
    headings = [("Item", "of the fullest rank"), ("Bytes", ""), ("There", ""), ("Formula", "")]
    note = (
        f"Of {escape(summary['shown'])}. Buffers of a pass are there only while it runs, so the larger of the two "
        "counts. T tokens of a rank, K choices, R rows it computes, M of them kept, E experts, G ranks, L MoE layers, "
        "D and F widths, P parameters of an expert; w, g, o, a bytes of a weight, gradient, optimizer state and "
        "activation."
    )
    drawn = table("memory-items", headings, rows, note=note, title="What the memory consists of")
    return f'<div class="words">{drawn}</div>'


def _method(summary: Record) -> str:
    machine = summary["hardware"]
    return (
        '<h2>What this rests on</h2><section class="card"><ul class="plain">'
        f"<li><b>Model</b>: {escape(summary['model']['source'])}.</li>"
        f"<li><b>Hardware</b>: {escape(machine['source'])}. Products reach {percent(machine['gemm_efficiency'], 0)} of "
        f"the peak and links {percent(machine['link_efficiency'], 0)} of theirs: assumptions.</li>"
        "<li><b>Memory</b> is that of the rank with most, in the microbatch with most. Fragmentation, the "
        "communication library’s own buffers and what other libraries hold are not in it.</li>"
        "<li><b>Time</b> is of the routed experts’ layers alone, forward and backward, each phase as slow as its "
        "slowest rank. Attention, the optimizer and everything else are left out.</li>"
        f"<li><b>Activations</b> between the projections run {escape(summary['elementwise'])}: <i>plain</i> as this "
        "library runs them on a GPU, in fp32 on all rows at once, <i>fused</i> in one kernel.</li>"
        "<li><b>Nothing is dropped unless nothing fits without</b>, and replicas are recommended for time only where "
        f"they bring it to at most {percent(FASTER, 0)} of fixed ownership’s. <code>lrmoe balance</code> judges the "
        "same loads in the same way, given the same <code>--model</code> and <code>--hardware</code>.</li>"
        "</ul></section>"
    )
