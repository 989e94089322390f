"""The balancing page: ranks' loads before and after under each policy with a slider over steps, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lrmoe.report.balance_page import write_balance_page
from lrmoe.report.frame import Frame, advice, chart, facts, key, notices, write_page
from lrmoe.report.replay_charts import PARTS, evenness, evenness_key, panel_frame, time_bars
from lrmoe.report.replay_data import Played, frames, read_played
from lrmoe.report.replay_table import replay_table
from lrmoe.report.run_folder import read_object
from lrmoe.report.text import counted, escape, fixed, percent, short_layer_names, whole
from lrmoe.studies.paper_config import FASTER

# The colours are those of the script.
_BARS = [("#d3d9e2", "every expert at home"), ("#2f7fc1", "forward as planned"), ("#0b3c66", "kept by the backward")]


def write_replay_page(folder: Path) -> Path:
    """Writes ``report.html`` into a folder of ``lrmoe balance --trace`` or ``--workload``, or of given loads.

    Raises:
        ValueError: if a file is missing or malformed; names it.
    """
    config = read_object(folder / "config.json")
    if not (config.get("trace") or config.get("workload")):
        return write_balance_page(folder)
    played = read_played(folder)
    try:
        frame = render_replay(played)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        name = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder / 'summary.json'} is damaged or of another version of lrmoe ({name})") from error
    return write_page(folder / "report.html", frame)


def render_replay(played: Played) -> Frame:
    """The page."""
    data = frames(played)
    data["layers"] = short_layer_names(data["layers"])
    figures = {"evenness-0": evenness(played, 0.0), "time": time_bars(played)}
    return Frame(
        kind="Balancing",
        title=_title(played),
        lead=_lead(played),
        head=_facts(played) + advice(_advice(played), basis=_BASIS) + notices(_notices(played)),
        body=_bars(played, data) + _charts(played, figures) + replay_table(played.records) + _method(played),
        footer=f"Written by LRMoE from {escape(played.path.resolve().name)}/. A record is one layer’s forward in one "
        "microbatch; a row is a token and one of the experts chosen for it.",
        settings=played.config,
        figures={name: one for name, one in figures.items() if one is not None},
        data={"bars": data, "panel": panel_frame()},
        scripts=("replay.js",),
        styles=("replay.css",),
    )


def _title(played: Played) -> str:
    shape = played.summary["shape"]
    what = played.config.get("workload")
    kind = f"Synthetic loads “{what}”" if played.summary["synthetic"] else "Recorded loads"
    return f"{kind}: {shape['experts']} experts on {counted(shape['ranks'], 'rank')}"


def _lead(played: Played) -> str:
    produced = played.summary["produced"]
    if produced["skew_mean"] is None:
        return "There is no load: no pair of any record goes to any expert, so nothing is even or uneven."
    if played.summary["shape"]["ranks"] == 1:
        return "One rank computes every expert: there is nothing to balance."
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
        ("Rates reached", f"{expert['flops'] / 1e12:,.3g} Tflop/s, {expert['bandwidth'] / 1e9:,.3g} GB/s"),
    ]
    return facts(items)


_BASIS = (
    "It follows from the table’s modelled times at the stated rates. Nothing ran but the planners; a drop’s effect on "
    "the loss is not in it."
)


def _advice(played: Played) -> list[str]:
    """What to do at each drop: the fastest policy, or leaving it off."""
    if played.summary["produced"]["skew_mean"] is None:
        return ["Give loads that have pairs: nothing follows from none."]
    if played.summary["shape"]["ranks"] == 1:
        return ["Deal these loads out over the ranks that you have (--ranks): one rank needs no balancing."]
    said = []
    for drop in played.drops:
        ran = [r for r in played.records if r["drop"] == drop and r["against_fixed"] is not None]
        others = [r for r in ran if r["system"] != "fixed"]
        if not others:
            continue
        best = min(others, key=lambda r: r["time_ms"]["total"])
        where = f"With {percent(drop, 0)} of the backward dropped" if drop else "Without a drop"
        if best["against_fixed"] > FASTER:
            said.append(
                f"{where}, leave balancing off (--policy fixed): the best of the others, {best['policy']}, takes "
                f"{_times(best)} of its time, and less than three per cent is not worth its moving parts."
            )
            continue
        mine = next((r for r in others if r["policy"] == "lrmoe"), None)
        beside = "" if mine is None or mine is best else f" (lrmoe: {_times(mine)})"
        said.append(
            f"{where}, use {best['policy']}: {_times(best)} of fixed ownership’s modelled time{beside}, with "
            f"{fixed(best['replicas'], 1)} replicas a record."
        )
    dropped = [r for r in played.records if r["drop"] and r["system"] == "lrmoe" and r["against_fixed"] is not None]
    if dropped:
        said.append("Before you drop for time, measure what it does to the loss with lrmoe compare.")
    if played.summary["synthetic"]:
        said.append("Play a run of your own as well: record it with lrmoe train --trace and give it with --trace.")
    return said or ["Give policies that can run here: none of these but fixed ownership could."]


def _notices(played: Played) -> list[str]:
    """Where the loads are from, and which policies cannot run; what is worse is in the lead and the table."""
    said = [f"Loads: {played.summary['source']}."]
    if played.summary["synthetic"]:
        said[0] = (
            f"These loads are {played.summary['source']}. No router made them; every source rank has draws of its own."
        )
    reasons = dict.fromkeys((record["policy"], record["reason"]) for record in played.records if record["reason"])
    for label, reason in reasons:
        drops = [r["drop"] for r in played.records if (r["policy"], r["reason"]) == (label, reason)]
        under = "" if len(drops) == len(played.drops) else f", {percent(drops[0], 0)} dropped,"
        said.append(f"{label}{under} cannot run: {reason}")
    return said


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
    last, start = max(len(data["frames"]) - 1, 0), data["start"]
    controls += (
        '<label class="slider" for="bars-step"><span>Optimizer step <output id="bars-step-value" for="bars-step">'
        f'</output></span><input type="range" id="bars-step" min="0" max="{last}" value="{start}" step="1" '
        'autocomplete="off"></label>'
    )
    panels = "".join(
        f'<section class="card panel" data-policy="{i}"><h3>{escape(policy["label"])} '
        '<output class="ratio"></output></h3>'
        f'<div class="plot" role="img" aria-label="Rows of each rank under {escape(policy["label"])}"></div>'
        '<p class="empty" hidden></p></section>'
        for i, policy in enumerate(data["policies"])
    )
    note = (
        "Rows of each rank (vertical) over the ranks (horizontal), in one layer of one microbatch. The dotted line is "
        "the mean: bars that end at it are an even load. It opens at the step whose busiest rank is busiest."
    )
    if len(data["frames"]) < data["all"]:
        note += f" The slider stops at {len(data['frames'])} of {whole(data['all'])} microbatches."
    return (
        # The controls stay in sight for as long as there are panels, and no longer.
        f'<section><h2>Load of the ranks, before and after</h2><p class="intro">{note}</p>'
        f'<div class="bars-head"><div class="controls">{controls}</div>{key(_BARS)}</div>'
        f'<div class="panels">{panels}</div></section>'
    )


def _charts(played: Played, figures: dict[str, Any]) -> str:
    even = chart(
        "evenness-0",
        "How even, step by step",
        "Rows of the busiest rank over the mean of all, averaged over the records of a step, with nothing dropped: 1 "
        "is even. The bold lines are fixed ownership, lrmoe and the policy that is most even; a policy that plans from "
        "earlier steps is late where the loads move.",
        figure=figures["evenness-0"],
        empty="No policy could run.",
        colours=evenness_key(played, 0.0),
    )
    times = chart(
        "time",
        "Where the modelled time goes",
        "All MoE layers in a step; the shorter the bar the better. Nothing is taken to be hidden behind the computing, "
        "and planning is not in here.",
        figure=figures["time"],
        empty="No policy could run.",
        colours=[(colour, title) for _, title, colour in PARTS],
    )
    return f'<h2>Over time, and in time</h2><div class="stack">{even}{times}</div>'


def _method(played: Played) -> str:
    used = dict.fromkeys(record["system"] for record in played.records)
    items = "".join(f"<li><b>{escape(name)}</b>: {escape(played.summary['traffic'][name])}.</li>" for name in used)
    return (
        '<h2>What is counted, and how</h2><section class="card">'
        "<p>Rows, replicas and bytes are counted from the plans; planning is CPU time of this machine; all other times "
        "are arithmetic. A layer’s computing and its rows’ travel are priced as <code>lrmoe plan</code> prices them, "
        f"for {escape(played.summary['assumed'])}; a transfer of copies takes the latency of a collective and as long "
        "as its busiest rank needs at the stated rate each way. W, Gr and O are an expert’s weights (2 bytes each), "
        "gradients (4) and optimizer state (12). Policies see the "
        "records in order, as in a training run. Besides rows, each system sends:</p>"
        f'<ul class="plain">{items}</ul></section>'
    )
