"""The page of ``lrmoe balance`` with given loads: how even each policy makes the ranks, and whether replicas pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lrmoe.report import palette
from lrmoe.report.charts import Figure, layout
from lrmoe.report.frame import Frame, advice, chart, facts, notices, table
from lrmoe.report.paper_page import Study, write_paper_page
from lrmoe.report.text import DASH, counted, escape, fixed, percent, size, whole
from lrmoe.studies.paper_config import FASTER

Record = dict[str, Any]
_HOME, _FORWARD, _KEPT = "#d3d9e2", "#2f7fc1", "#0b3c66"
_LINES = ((palette.ORANGE, "solid"), (palette.ORANGE, "dash"), (palette.BLUE, "solid"), (palette.BLUE, "dash"))
_BASIS = (
    "It follows from the plans’ rows, which are counted, and from a layer’s time, which is arithmetic, the same that "
    "lrmoe plan does. Nothing ran but the planners."
)


def write_balance_page(folder: Path) -> Path:
    """Writes ``report.html`` into a folder of ``lrmoe balance`` with ``--loads``, ``--skew`` or ``--shape``.

    Raises:
        ValueError: if a file is missing or damaged; names it.
    """
    return write_paper_page(folder, _page)


def _page(study: Study) -> Frame:
    summary = study.summary
    matrices, ranks, experts = summary["shape"]
    figures = {"even": _even(summary["policies"]), "pays": _pays(summary["break_even"])}
    unfit = [f"{one['policy']} does not fit: {one['reason']}" for one in summary["policies"] if not one["fits"]]
    return Frame(
        kind="Balancing of given loads",
        title=f"{summary['source'][:1].upper()}{summary['source'][1:]}: {experts} experts on {counted(ranks, 'rank')}",
        lead=escape(_lead(summary)),
        head=facts(
            [
                ("Load matrices", whole(matrices)),
                ("Pairs", whole(round(_pairs(summary)))),
                ("Tokens a rank", whole(summary["tokens"])),
                ("Experts of", study.config["model"]),
                ("Hardware", study.config["hardware"]),
                ("Slots beyond home", whole(study.config["slots"])),
                ("Drop", percent(study.config["drop"], 0)),
                (
                    "Capacity, kept rows",
                    "none" if study.config["capacity"] is None else f"{study.config['capacity']:g}",
                ),
            ]
        )
        + advice(_advice(study), basis=f"{_BASIS} Times are of {summary['assumed']}.")
        + notices(unfit),
        body=_charts(figures) + _table(summary["policies"]) + _sizes(summary["break_even"]),
        footer=study.footer,
        settings=study.config,
        figures={name: one for name, one in figures.items() if one is not None},
    )


def _pairs(summary: Record) -> float:
    """Of all matrices: what fixed ownership keeps without a drop."""
    fixed_ = next(one for one in summary["policies"] if one["policy"] == "fixed")
    return float(fixed_["kept_rows"] or 0)


def _lead(summary: Record) -> str:
    home = next(one for one in summary["policies"] if one["policy"] == "fixed")
    if home["forward_home"] is None:
        return "There is no load: no pair goes to any expert, so nothing is even or uneven."
    if summary["shape"][1] == 1:
        return "One rank computes every expert: there is nothing to balance."
    said = f"With every expert at home the busiest rank has {fixed(home['forward_home'], 2)} times the mean rows."
    moved = [one for one in summary["policies"] if one["fits"] and one["slots"]]
    if not moved:
        return f"{said} No policy with replicas fits."
    best = min(moved, key=lambda one: one["forward"])
    return (
        f"{said} The most even plan is that of {best['policy']}, {fixed(best['forward'], 2)} times, with "
        f"{counted(best['replicas'], 'replica')}."
    )


def _advice(study: Study) -> list[str]:
    summary, said = study.summary, []
    tokens, (matrices, ranks, _) = summary["tokens"], summary["shape"]
    fits = {one["policy"] for one in summary["policies"] if one["fits"]}
    breaks = [one for one in summary["break_even"] if one["policy"] in fits]
    paying = [one for one in breaks if one["here"] is not None and one["here"]["pays"]]
    if not summary["loaded"]:
        said.append("Give loads that have pairs: nothing follows from none.")
    elif ranks == 1:
        said.append(
            "Give loads of several ranks, or say over how many to spread them (--ranks): one needs no balancing."
        )
    elif paying:
        best = min(paying, key=lambda one: one["here"]["planned"])
        ratio = fixed(best["here"]["planned"] / best["here"]["home"], 2)
        said.append(
            f"Use replicas at {whole(tokens)} tokens a rank: they pay under {_quoted(paying)}; under "
            f"“{best['policy']}” a layer takes {ratio} of its time with every expert at home."
        )
    elif breaks:
        later = min(
            (one["tokens"] for one in breaks if one["tokens"] is not None and one["tokens"] > tokens), default=None
        )
        from_ = "at no size that was looked at" if later is None else f"from about {whole(round(later))} on"
        said.append(
            f"Leave replicas off (slots=0) at {whole(tokens)} tokens a rank: they pay {from_}. They count as paying "
            f"where a layer takes at most {percent(FASTER, 0)} of its time without."
        )
    if 0 < summary["loaded"] < matrices:
        said.append(
            f"Look at the loads: {matrices - summary['loaded']} of {matrices} matrices hold no pair, and are in no "
            "ratio or time here."
        )
    for one in summary["policies"]:
        if one["fits"] and one["extra_dropped"]:
            said.append(
                f"Raise the capacity or the slots if {one['policy']} is to drop no more than asked: it leaves out "
                f"{whole(one['extra_dropped'])} rows beyond the drop to fit."
            )
    if not fits:
        said.append("Raise the capacity: no policy fits it.")
    elif any(not one["fits"] for one in summary["policies"]):
        names = _quoted([one for one in summary["policies"] if one["fits"]])
        said.append(f"Choose among what fits the capacity: {names}.")
    if study.config["loads"] is None:
        said.append("Give loads of your own model (--loads, or a run of lrmoe train --trace): these are synthetic.")
    return said


def _quoted(records: list[Record]) -> str:
    """Policies by name; a name may have a comma."""
    return ", ".join(f"“{one['policy']}”" for one in records)


def _charts(figures: dict[str, Figure | None]) -> str:
    even = chart(
        "even",
        "Rows of the busiest rank",
        "A bar that ends at the dotted line is an even load; what is beyond it, all other ranks wait for. The backward "
        "computes the kept rows alone.",
        figure=figures["even"],
        empty="No policy fits, or there is no load.",
        colours=[(_HOME, "forward, at home"), (_FORWARD, "forward, as planned"), (_KEPT, "backward, as planned")],
    )
    pays = chart(
        "pays",
        "Does a replica pay?",
        "Time of one layer with replicas over its time with every expert at home, their weights and gradients on the "
        f"wire included: at or below the dotted line, at {FASTER:g}, they pay. No point where no replica is planned. "
        "The tokens are on a logarithmic axis.",
        figure=figures["pays"],
        empty="No policy plans a replica for these loads at any size.",
        colours=[
            (trace["line"]["color"], trace["meta"]["label"]) for trace in (figures["pays"] or {"data": []})["data"]
        ],
    )
    return f'<h2>Even, and worth it</h2><div class="grid">{even}{pays}</div>'


def _even(records: list[Record]) -> Figure | None:
    fit = [one for one in records if one["fits"] and one["forward"] is not None]
    if not fit:
        return None
    names = [escape(one["policy"]).replace(", ", ",<br>", 1) for one in fit]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": [round(one[column], 4) for one in fit],
            "name": title,
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}<br>{title}: %{{x:.3f}} × the mean<extra></extra>",
        }
        for column, title, colour in (
            ("forward_home", "forward, at home", _HOME),
            ("forward", "forward, as planned", _FORWARD),
            ("backward", "backward, as planned", _KEPT),
        )
    ]
    frame = layout("busiest rank over the mean (×)", "", hovermode="closest", barmode="group", bargap=0.3)
    frame["height"] = 90 + 56 * len(fit)
    frame["xaxis"] |= {"tickformat": ",~r"}
    frame["yaxis"] |= {"autorange": "reversed", "type": "category", "ticksuffix": " "}
    frame["shapes"] = [_mark("x")]
    return {"data": data, "layout": frame}


def _pays(records: list[Record]) -> Figure | None:
    data = []
    for (colour, dash), one in zip(_LINES * len(records), records, strict=False):
        known = [(each["tokens"], each["planned"] / each["home"]) for each in one["sizes"] if each["replicas"]]
        if not known:
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [tokens for tokens, _ in known],
                "y": [round(ratio, 5) for _, ratio in known],
                "name": escape(one["policy"]),
                "line": {"color": colour, "width": 2, "dash": dash},
                "marker": {"size": 5},
                "meta": {"label": one["policy"] + (" (dashed)" if dash == "dash" else "")},
                "hovertemplate": f"{escape(one['policy'])}, %{{x:,}} tokens: %{{y:,.2f}} ×<extra></extra>",
            }
        )
    if not data:
        return None
    frame = layout("tokens a rank", "layer’s time over that at home (×)", hovermode="closest", height=90 + 56 * 5)
    frame["xaxis"] |= {"type": "log", "dtick": 1, "tickformat": ",d", "rangemode": "normal"}
    frame["yaxis"] |= {"tickformat": ",~g", "rangemode": "tozero"}
    frame["shapes"] = [_mark("y", FASTER)]
    return {"data": data, "layout": frame}


def _mark(axis: str, at: float = 1) -> Figure:
    """A dotted line."""
    other = "y" if axis == "x" else "x"
    return {
        "type": "line",
        f"{other}ref": "paper",
        f"{other}0": 0,
        f"{other}1": 1,
        f"{axis}0": at,
        f"{axis}1": at,
        "line": {"color": palette.INK, "width": 1.5, "dash": "dot"},
    }


def _table(records: list[Record]) -> str:
    headings = [
        ("Policy", ""),
        ("Forward, home", "busiest / mean"),
        ("Forward", "busiest / mean"),
        ("Backward, home", "busiest / mean"),
        ("Backward", "busiest / mean"),
        ("Replicas", ""),
        ("Moved rows", "of the forward"),
        ("More dropped", "rows"),
        ("On the wire", "of replicas"),
        ("Fits", ""),
    ]
    rows = []
    for one in records:
        counts = [
            DASH if one[name] is None else whole(one[name]) for name in ("replicas", "moved_rows", "extra_dropped")
        ]
        rows.append(
            [
                escape(one["policy"]),
                *(fixed(one[name], 3) for name in ("forward_home", "forward", "backward_home", "backward")),
                *counts,
                size(one["replica_bytes"]),
                '<span class="yes">yes</span>' if one["fits"] else '<span class="no">no</span>',
            ]
        )
    note = (
        "Rows of the busiest rank over the mean of the ranks, at home and with replicas; of the backward, the rows it "
        "keeps over the mean of the kept rows. Replicas, rows and bytes are sums over the load matrices."
    )
    return table("results", headings, rows, title="Results", note=note)


def _sizes(records: list[Record]) -> str:
    if not records:
        return ""
    headings = [("Tokens a rank", ""), *((escape(one["policy"]), "ms / at home") for one in records)]
    rows = [
        [
            whole(sizes[0]["tokens"]),
            *(
                f"{fixed(each['planned'], 3)} / {fixed(each['home'], 3)}" if each["replicas"] else DASH
                for each in sizes
            ),
        ]
        for sizes in zip(*(one["sizes"] for one in records), strict=True)
    ]
    note = (
        "Modelled time of a layer, forward and backward, with replicas and with every expert at home. A dash where no "
    )
    note += "replica is planned."
    return table("sizes", headings, rows, title="From how many tokens on", note=note)
