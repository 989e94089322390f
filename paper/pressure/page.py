"""The page of ``python -m paper pressure``: what completes as the batch grows, and the published figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lrmoe.report import palette
from lrmoe.report.charts import Figure, layout
from lrmoe.report.frame import Frame, advice, chart, facts, notices, table
from lrmoe.report.paper_page import Study, write_paper_page
from lrmoe.report.replay_charts import COLOURS
from lrmoe.report.text import DASH, escape, fixed, percent, size, whole
from paper.pressure.published import THROUGHPUT
from paper.pressure.tables import published_rows

Record = dict[str, Any]
_COUNTED = {"operator": "What the operator holds", "kept": "Kept rows alone"}
_INLINE = {"operator": "what the operator holds", "kept": "kept rows alone"}
_SYSTEMS = {"lrmoe": "LRMoE", "ultraep": "UltraEP", "symi": "SYMI", "fixed": "Megatron-LM"}
_DEFINITIONS = (
    ("Pressure", "so many times the tokens of a rank; loads keep their proportions."),
    (
        "Completes",
        "the share of all routed rows that their rank has room for. Experts, slots and rows share one hard budget; "
        "what is beyond it on a rank does not complete there. This is what the page calls effective throughput.",
    ),
    (
        "Whole batch",
        "the part of the batch that every rank has room for: nobody waits for, or leaves out, anything. The fullest "
        "rank decides.",
    ),
    (
        "Backward computed",
        "rows whose backward is computed. All policies but LRMoE compute the backward of what completes. LRMoE "
        "computes the forward of every row and leaves out as many backward rows as it must, no expert below its least "
        "kept share (to a row): those rows count as completed, and not here.",
    ),
    (
        "History",
        "policies that plan from earlier steps have seen loads of these proportions once; synthetic loads then stay as "
        "they are, which is the best that can happen to them.",
    ),
)


def write_pressure_page(folder: Path) -> Path:
    """Writes ``report.html`` into a folder of ``python -m paper pressure``.

    Raises:
        ValueError: if a file is missing or damaged; names it.
    """
    return write_paper_page(folder, _page)


def _page(study: Study) -> Frame:
    summary, config = study.summary, study.config
    figures: dict[str, Figure] = {}
    parts = []
    for which, title in _COUNTED.items():
        parts.append(_counted(study, which, title, figures))
    parts += [_order(summary, config, figures), _published(summary), _needed(summary), _definitions(summary, config)]
    return Frame(
        kind="Batch under pressure, on paper",
        title=f"{summary['model']['name']}: one layer on {whole(config['ep'])} × {summary['hardware']['name']}",
        lead=_lead(summary, config),
        head=_facts(study)
        + advice(_advice(summary, config), basis=_BASIS)
        + notices(
            [
                ("No router made these loads: " if summary["synthetic"] else "Loads: ") + f"{summary['source']}.",
                "A budget for one layer: what the other layers hold of their forward is not in it; lrmoe plan counts a "
                "whole model.",
                *(note for note in summary["notes"] if "cannot run" in note),
            ]
        ),
        body="".join(parts),
        footer=study.footer,
        settings=config,
        figures=figures,
    )


def _records(summary: Record, which: str, policy: str | None = None) -> list[Record]:
    return [
        one
        for one in summary["policies"]
        if one["accounting"] == which and (policy is None or one["policy"] == policy) and one["reason"] is None
    ]


def _nearest(summary: Record, which: str, policy: str, at: float) -> Record | None:
    return next((one for one in _records(summary, which, policy) if one["pressure"] == at), None)


def _lead(summary: Record, config: Record) -> str:
    said = []
    for which in _COUNTED:
        mine = _records(summary, which, "lrmoe")
        whole_batch = [one["pressure"] for one in mine if one["completes"] > 1 - 1e-9]
        others = [
            one["pressure"]
            for one in summary["policies"]
            if one["accounting"] == which
            and one["policy"] not in ("lrmoe", "fixed")
            and one["reason"] is None
            and one["completes"] > 1 - 1e-9
        ]
        if not mine:
            continue
        kept = next((one for one in reversed(mine) if one["completes"] > 1 - 1e-9), None)
        share = f", there with {percent(kept['backward'], 0)} of the backward computed" if kept else ""
        best = f"; the best exact policy up to <b>{max(others):g} ×</b>" if others else ""
        said.append(
            f"Counting {_INLINE[which]}, LRMoE completes everything up to <b>{max(whole_batch, default=0):g} ×</b> the "
            f"batch{share}{best}."
        )
    return " ".join(said)


_BASIS = (
    "It follows from the rows that each rank has room for under the budget, counted from each policy’s plan. What a "
    "drop does to the loss is not in it."
)


def _advice(summary: Record, config: Record) -> list[str]:
    said = []
    reach: dict[str, float] = {}
    for one in summary["policies"]:
        if one["accounting"] == "operator" and one["reason"] is None and one["batch"] > 1 - 1e-9:
            reach[one["policy"]] = max(reach.get(one["policy"], 0.0), one["pressure"])
    exact = {policy: times for policy, times in reach.items() if policy != "lrmoe"}
    best = max(exact.values(), default=0.0)
    if exact:
        names = ", ".join(policy for policy, times in exact.items() if times == best)
        said.append(
            f"Up to {best:g} × the batch, drop nothing: {names} fits it whole with the operator of this library."
        )
    mine = reach.get("lrmoe", 0.0)
    if mine > best:
        kept = _nearest(summary, "operator", "lrmoe", mine)
        share = "" if kept is None else f", computing {percent(kept['backward'], 0)} of the backward"
        said.append(
            f"Beyond that and up to {mine:g} ×, lrmoe fits the whole batch{share}. Measure what such a drop does to "
            "the loss with lrmoe compare first, or accumulate gradients over smaller batches, which costs no accuracy."
        )
    elif mine == best and best:
        said.append("A drop carries no further here than balancing alone: leave it off unless its time is worth it.")
    elif not reach:
        said.append("No policy fits even 1 × the batch: raise the budget or start from fewer tokens a rank.")
    if summary["synthetic"]:
        said.append("Repeat this with loads recorded from your own model (--trace or --loads): these are synthetic.")
    return said


def _facts(study: Study) -> str:
    summary, config = study.summary, study.config
    return facts(
        [
            ("Tokens a rank at 1 ×", whole(summary["tokens"])),
            ("Budget a rank, one layer", size(summary["budget"])),
            ("Experts and slots, fullest", size(summary["held"])),
            ("Busiest rank at home", f"{fixed(summary['produced']['skew_mean'], 2)} × mean"),
            ("Slots beyond home", whole(config["slots"])),
            ("Least kept share", percent(config["min_keep"], 0)),
            ("Loads", "synthetic" if summary["synthetic"] else "recorded"),
            ("Save mode", str(config["save"])),
        ]
    )


def _counted(study: Study, which: str, title: str, figures: dict[str, Figure]) -> str:
    summary = study.summary
    policies = list(dict.fromkeys(one["policy"] for one in _records(summary, which)))
    key = [(_colour(summary, policy), policy + (" (dashed)" if policy == "fixed" else "")) for policy in policies]
    for name, column in (("completes", "completes"), ("batch", "batch"), ("backward", "backward")):
        figures[f"{which}-{name}"] = _lines(summary, which, column, policies)
    cards = "".join(
        chart(f"{which}-{name}", heading, note, figure=figures[f"{which}-{name}"], colours=key)
        for name, heading, note in (
            (
                "completes",
                "Completes",
                "Where a line leaves 100 %, some rank has no room for a part of its rows any more. Lines of policies "
                "that do alike lie on top of each other.",
            ),
            (
                "batch",
                "Whole batch",
                "The part of the batch that every rank has room for, which the fullest rank decides: the further right "
                "a line stays at 100 %, the larger a batch can be.",
            ),
            (
                "backward",
                "Backward computed",
                "What is left out to make room: a line below the one of Completes computes the forward of those rows "
                "and no backward.",
            ),
        )
    )
    shown = _levels(sorted({one["pressure"] for one in _records(summary, which)}))
    rows = []
    for policy in policies:
        cells = [escape(policy)]
        for level in shown:
            one = _nearest(summary, which, policy, level)
            if one is None:
                cells.append(DASH)
                continue
            kept = f"<small>{percent(one['kept_least'], 0)} kept</small>" if one["kept_least"] < 1 else ""
            cells.append(
                f"<b>{percent(one['completes'])}</b><small>{percent(one['batch'])} batch</small>"
                f"<small>{percent(one['backward'])} backward</small>{kept}"
            )
        rows.append(cells)
    note = (
        "Completes; below it the whole batch, and the rows whose backward is computed; where rows are left out, the "
        "least that an expert keeps of its own."
    )
    headings = [("Policy", ""), *((f"{level:g} ×", "") for level in shown)]
    drawn = table(f"table-{which}", headings, rows, note=note, level="h3", title=f"{title}: table")
    return (
        f'<h2>{title}</h2><p class="intro">{escape(summary["counted"][which])}</p>'
        f'<div class="grid three">{cards}</div><div class="spaced">{drawn}</div>'
    )


def _levels(levels: list[float]) -> list[float]:
    wanted = [level for level in levels if level in (1, 5, 10, 15, 20, 28, 40)]
    return levels if len(levels) <= 7 else wanted or levels[:7]


def _colour(summary: Record, policy: str) -> str:
    system = next(one["system"] for one in summary["policies"] if one["policy"] == policy)
    return COLOURS.get(system, palette.MUTED)


def _lines(summary: Record, which: str, column: str, policies: list[str]) -> Figure:
    data = []
    for policy in policies:
        own = _records(summary, which, policy)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [one["pressure"] for one in own],
                "y": [round(100 * one[column], 3) for one in own],
                "name": escape(policy),
                "line": {
                    "color": _colour(summary, policy),
                    "width": 2.5 if policy == "lrmoe" else 2,
                    "dash": "dash" if policy == "fixed" else "solid",
                },
                "marker": {"size": 4},
                "hovertemplate": "%{y:.1f} %",
            }
        )
    titles = {"completes": "routed rows that complete (%)", "batch": "batch that fits whole (%)"}
    frame = layout("times the batch (×)", titles.get(column, "rows with a backward (%)"), height=300)
    frame["xaxis"] |= {"tickformat": ",~g"}
    frame["yaxis"] |= {"range": [0, 104]}
    return {"data": data, "layout": frame}


def _order(summary: Record, config: Record, figures: dict[str, Figure]) -> str:
    at = f"{config['at']:g} ×"
    cards, key = "", [(COLOURS[system], title) for system, title in _SYSTEMS.items()]
    for which, title in _COUNTED.items():
        ran = [one for one in summary["order"] if one["accounting"] == which and one["reason"] is None]
        figures[f"order-{which}"] = _skews(ran)
        cards += chart(
            f"order-{which}",
            title,
            f"What of {at} the batch fits whole, for loads from even (1) to skewed: a line that stays up does not mind "
            "a busy rank.",
            figure=figures[f"order-{which}"] if ran else None,
            empty="No such loads can be had.",
            colours=key,
        )
    rows = [
        ["published", "", "", *(percent(THROUGHPUT[system]) for system in _SYSTEMS), ""],
    ]
    for one in summary["order"]:
        head = f"skew {one['skew']:g}"
        if one["reason"] is not None:
            rows.append([head, escape(_COUNTED[one["accounting"]]), "", *[DASH] * len(_SYSTEMS), "cannot be had"])
            continue
        for name, words in (("completes", "completes"), ("batch", "whole batch")):
            good = one["as_published"][name]
            verdict = '<span class="yes">yes</span>' if good else '<span class="no">no</span>'
            shares = [percent(one[name][system]) for system in _SYSTEMS]
            rows.append([head, escape(_COUNTED[one["accounting"]]), words, *shares, verdict])
    headings = [
        ("Loads", "busiest over mean"),
        ("Counted", ""),
        ("By", ""),
        *((title, "") for title in _SYSTEMS.values()),
        ("Order", "as published"),
    ]
    note = (
        "The published order is LRMoE, UltraEP, SYMI, Megatron-LM; it counts as reproduced where each is at least 0.1 "
        "points above the next. Near even loads the exact policies are alike, and SYMI’s whole slots make its ranks "
        "less even than they were. Where every rank is over its capacity whatever moves, all exact policies complete "
        "the same: then only the whole batch tells them apart."
    )
    drawn = table("order-table", headings, rows, note=note, level="h3", title="Who is ahead of whom")
    return (
        f'<h2>The order at {at}, for other skews</h2><p class="intro">Synthetic loads, {config["draws"]} draws for '
        f'each skew. {escape(_ranges(summary))}</p><div class="grid">{cards}</div><div class="spaced">{drawn}</div>'
    )


def _ranges(summary: Record) -> str:
    said = []
    for which, title in _COUNTED.items():
        for name, words in (("batch", "by the whole batch"), ("completes", "by what completes")):
            ran = [one for one in summary["order"] if one["accounting"] == which and one["reason"] is None]
            right = [f"{one['skew']:g}" for one in ran if one["as_published"][name]]
            said.append(f"{title}, {words}: as published at skews {', '.join(right) or 'none'}.")
    return " ".join(said)


def _skews(ran: list[Record]) -> Figure:
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": [one["skew"] for one in ran],
            "y": [round(100 * one["batch"][system], 3) for one in ran],
            "name": title,
            "line": {"color": COLOURS[system], "width": 2, "dash": "dash" if system == "fixed" else "solid"},
            "marker": {"size": 5},
            "hovertemplate": "%{y:.1f} %",
        }
        for system, title in _SYSTEMS.items()
    ]
    frame = layout("busiest rank over the mean (×)", "batch that fits whole (%)", height=300)
    frame["xaxis"] |= {"rangemode": "normal", "tickformat": ".3~g"}
    frame["yaxis"] |= {"range": [0, 104]}
    return {"data": data, "layout": frame}


def _published(summary: Record) -> str:
    told = summary["published"]
    if not told["rows"]:
        return ""
    headings, rows = published_rows(summary)
    note = (
        f"Ours: one layer at 1 ×, {whole(summary['tokens'])} tokens a rank, {percent(told['drop'], 0)} dropped, "
        f"{told['slots']} slots, {escape(summary['hardware']['name'])}; synthetic loads of each skew, none of them "
        "chosen for its result. Published: of how many layers and of which batch each figure is, is not said; see what "
        f"they say of each other. Base placement {fixed(told['rows'][0]['base'], 4)} GiB (published 0.42), replicas "
        f"{fixed(told['rows'][0]['replicas'], 4)} GiB (published 0.05)."
    )
    columns = [("What", ""), ("Published", ""), *((heading.capitalize(), "") for heading in headings[2:])]
    cells = [[escape(row[0]), *row[1:]] for row in rows]
    return table("published", columns, cells, note=note, title="The paper’s memory and backward beside ours")


def _needed(summary: Record) -> str:
    rows = [[escape(one["figure"]), escape(one["needs"])] for one in summary["published"]["needed"]]
    note = (
        "What is published does not give loads, bytes of a pair, SYMI’s and UltraEP’s slots, or the batch at 1 ×. "
        "For each figure, what one would have to assume to get it. Nothing on this page is chosen so that it comes out."
    )
    told = [[escape(one["figures"]), escape(one["says"])] for one in summary["published"]["coherence"]]
    beside = (
        "Only the base placement says of how many layers it is. Where the others are compared with one layer on this "
        "page, that is an assumption."
    )
    return (
        '<div class="words">'
        + table(
            "coherence",
            [("Published", ""), ("Says", "")],
            told,
            note=beside,
            title="The published figures beside each other",
        )
        + table(
            "needed", [("Published", ""), ("Needs", "")], rows, note=note, title="What the published figures would need"
        )
        + "</div>"
    )


def _definitions(summary: Record, config: Record) -> str:
    items = "".join(f"<li><b>{name}</b>: {escape(text)}</li>" for name, text in _DEFINITIONS)
    return (
        f'<h2>Definitions</h2><section class="card"><ul class="plain">{items}'
        f"<li><b>What the operator holds</b>: {escape(summary['counted']['operator'])} The same operator is counted "
        "for every policy.</li>"
        f"<li><b>Kept rows alone</b>: {escape(summary['counted']['kept'])} The published token buffers fit this way of "
        "counting; no operator whose forward computes every row holds this little.</li>"
        f"<li><b>Least kept share</b>: LRMoE leaves out no more than {percent(1 - config['min_keep'], 0)} of any "
        "expert’s rows here; what a drop does to the loss depends on selector, rate and regime.</li>"
        "</ul></section>"
    )
