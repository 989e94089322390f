"""The tables, figures and conclusions of the study of time to loss."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from lrmoe.studies.results import Column, Figure, Series, StudyResult, Table, Value
from paper.time_to_loss.config import TimeToLossConfig
from paper.time_to_loss.curves import (
    MEDIAN_STEPS,
    Cell,
    Row,
    Setting,
    seconds_of,
    target_rows,
    until,
    verdict,
)

_STEADY = f"the ratio if each step's time is the median of the {MEDIAN_STEPS} around it"

QUESTION = (
    "In how much MoE-layer time does training reach the losses of plain training, on one device and over ranks, "
    "against fixed ownership, SYMI and UltraEP?"
)


def step_rows(setting: Setting, cells: Sequence[Cell]) -> list[Row]:
    """One row a contender: what a step costs and where the run ends, means over seeds."""
    rows = []
    for place, contender in enumerate(setting.contenders):
        mine = [cell["contenders"][place] for cell in cells]
        base = [cell["contenders"][0] for cell in cells]
        half = [one["compute_s"][len(one["compute_s"]) // 2 :] for one in mine]
        level = [one["balanced_s"][len(one["balanced_s"]) // 2 :] for one in mine]
        sent = [one["transfer_s"][len(one["transfer_s"]) // 2 :] for one in mine]
        pairs = list(zip(mine, base, strict=True))
        rows.append(
            {
                "setting": setting.title,
                "variant": contender.name,
                "compute_ms": 1e3 * statistics.fmean(statistics.median(times) for times in half),
                "level_ms": 1e3 * statistics.fmean(statistics.median(times) for times in level),
                "transfer_ms": 1e3 * statistics.fmean(statistics.median(times) for times in sent),
                "load_max_over_mean": _mean([one["load_max_over_mean"] for one in mine]),
                "rows_max_over_mean": _mean([one["rows_max_over_mean"] for one in mine]),
                "kept_max_over_mean": _mean([one["kept_max_over_mean"] for one in mine]),
                "replicas": _mean([one["replicas"] for one in mine]),
                "kept_share": _mean([one["kept_share"] for one in mine]),
                "validation_loss": statistics.fmean(one["validation"][-1][1] for one in mine),
                "validation_difference": statistics.fmean(
                    one["validation"][-1][1] - other["validation"][-1][1] for one, other in pairs
                ),
            }
        )
    return rows


def sentence(row: Row) -> str:
    """A verdict in words."""
    target = f"the loss of plain training after {row['share']:.0%} of its steps ({row['loss']:.3f})"
    if row["ratio"] is None:
        text = f"{row['setting']}: {row['recipe']} does not reach {target} with every seed."
    else:
        time = f"{row['ratio']:.2f} of the MoE time of the fastest baseline, {row['fastest']}"
        who = "every baseline" if row["baselines"] > 1 else "the baseline"
        text = f"{row['setting']}: {row['recipe']} reaches {target} in {time}"
        if row["wins"]:
            text += f": less than {who}, with {row['seeds']} of {row['of_seeds']} seeds less than all of them."
        else:
            text += f": not less than {who} (it is faster than {row['beaten']} of {row['baselines']})."
    if row["quickest"] not in (None, row["recipe"]):
        text += f" The fastest of its drops is {row['quickest']}, {row['quickest_ratio']:.2f} of {row['fastest']}."
    return text


def make_result(config: TimeToLossConfig, records: Mapping[str, Sequence[Cell]], *, command: str) -> StudyResult:
    """The study from the cells of each setting, by its name."""
    tables: list[Table] = []
    figures: list[Figure] = []
    found: list[Row] = []
    conclusions: list[str] = []
    costs: list[Row] = []
    last: dict[str, tuple[Setting, list[Row]]] = {}
    for setting in config.settings():
        cells = records[setting.name]
        rows: list[Row] = []
        of_target: list[Row] = []
        for share in config.targets:
            of_target = target_rows(setting, cells, share=share)
            rows += of_target
            found.append(verdict(setting, of_target))
            conclusions.append(sentence(found[-1]))
        costs += step_rows(setting, cells)
        tables.append(_target_table(config, setting, rows))
        figures.append(_curves(setting, cells))
        last[setting.name] = (setting, of_target)
    tables += [_verdict_table(found), _cost_table(costs)]
    figures.insert(0, _ratios(config, last))
    cells = [cell for of_setting in records.values() for cell in of_setting]
    return StudyResult(
        study="time_to_loss",
        title="Time to loss",
        question=QUESTION,
        tables=tables,
        figures=figures,
        conclusions=conclusions,
        advice=advise(found),
        provenance={
            "command": command,
            "versions": dict(cells[0]["versions"]),
            "cells": len(cells),
            "run_seconds": sum(cell["seconds"] for cell in cells),
            "config": config.to_dict(),
        },
    )


def advise(found: Sequence[Row]) -> list[str]:
    """What follows from the verdicts for a user."""
    last = {row["setting"]: row for row in found}
    winning = [title for title, row in last.items() if row["wins"] and row["apart"] < 0]
    losing = [title for title, row in last.items() if row["apart"] > 0]
    unknown = [title for title in last if title not in (*winning, *losing)]
    advice = []
    recipe = found[0]["recipe"].split()[-1]
    if winning:
        advice.append(
            f"Drop {recipe} after a warm-up where your setting is like: {'; '.join(winning)}. There it reached the "
            "last target in less MoE time than every baseline."
        )
    if losing:
        advice.append(
            f"Do not expect {recipe} to save MoE time in: {'; '.join(losing)}. Stay with the fastest baseline."
        )
    if unknown:
        advice.append(
            f"Choose neither {recipe} nor a baseline for its MoE time in: {'; '.join(unknown)}. Over these seeds it is "
            "not told from every baseline; run more."
        )
    advice.append(
        "Time your own model once before a long run: small experts gain less than these ratios, since choosing pairs "
        "costs the same."
    )
    return advice


def _target_table(config: TimeToLossConfig, setting: Setting, rows: list[Row]) -> Table:
    first = setting.contenders[0].name
    against = [name for name in ("SYMI", "UltraEP") if any(one.name == name for one in setting.contenders)]
    columns = [
        Column(key="share", label="target", form="percent", meaning=f"the loss that {first} has after so many steps"),
        Column(key="loss", label="loss, nats a token", form="3", meaning="of the target, mean over seeds"),
        Column(key="variant", label="variant", form="text"),
        Column(key="steps", label="steps", form="integer", meaning="until the target, mean over seeds"),
        Column(key="minutes", label="MoE time, min", form="3", meaning="until the target, mean over seeds"),
        Column(key=f"over {first}", label=f"time over {first}", form="ratio", meaning="mean of the paired seeds"),
        Column(key="range", label="each seed", form="text", meaning="lowest and highest of the paired ratios"),
        Column(key="steady", label="without spikes", form="ratio", meaning=_STEADY),
        *(Column(key=f"over {name}", label=f"time over {name}", form="ratio") for name in against),
        Column(key="reached", label="reached", form="text"),
    ]
    widths = f"D {config.dim}, F {config.expert_dim}, E {config.num_experts}, K {config.top_k}"
    sizes = f"a dense block, then {config.layers} with MoE, {widths}"
    settings: dict[str, Value] = {
        "model": sizes,
        "tokens a step": config.batch * config.seq,
        "steps": config.steps,
        "warm-up steps": round(config.warmup * config.steps),
        "seeds": len(setting.seeds),
        "ranks": setting.ranks,
        "balancing loss": setting.balance_loss_weight,
        "text": config.text or "the Python standard library's source",
    }
    how = (
        "Time is the CPU time of one thread in the routed experts' forward and backward."
        if setting.ranks == 1
        else "Time is modelled by the straggler clock: thread CPU seconds on the critical path over ranks (planning, "
        f"dispatch, experts, combine), and transfers at {config.bandwidth / 1e9:g} GB/s, none of them overlapped. A "
        f"rank has room for {config.slots} expert(s) of others. SYMI's weights and optimizer are spread as its authors "
        "describe them."
    )
    return Table(
        name=setting.name,
        title=f"Time to loss: {_inside(setting.title)}",
        settings=settings,
        columns=columns,
        rows=rows,
        note=f"{how} The loss is that of the same {config.eval_sequences} validation sequences every "
        f"{config.eval_every} steps, interpolated between; a target is what {first} has, with the same seed, after the "
        "share of its steps that is named. All variants of a seed train in turns, step by step, from the same weights "
        "on the same data. The guard is off, so that a rate is what its name says.",
    )


def _verdict_table(rows: list[Row]) -> Table:
    shown = [{**row, "answer": "yes" if row["wins"] else "no", "count": _count(row)} for row in rows]
    return Table(
        name="verdicts",
        title="The recommended recipe against every baseline",
        settings={},
        columns=[
            Column(key="setting", label="setting", form="text"),
            Column(key="share", label="target", form="percent", meaning="loss of plain training after so many steps"),
            Column(key="recipe", label="recipe", form="text"),
            Column(key="fastest", label="fastest baseline", form="text"),
            Column(key="ratio", label="time over it", form="ratio", meaning="mean of the paired seeds"),
            Column(key="steady", label="without spikes", form="ratio", meaning=_STEADY),
            Column(key="quickest", label="fastest LRMoE", form="text", meaning="of all drops"),
            Column(key="quickest_ratio", label="its time over it", form="ratio"),
            Column(key="count", label="faster in", form="text", meaning="seeds in which it beats every baseline"),
            Column(key="answer", label="less time than every baseline", form="text"),
        ],
        rows=shown,
        note="A ratio below 1 means less MoE-layer time. Nothing is said of the rest of a step.",
    )


def _count(row: Row) -> str:
    return f"{row['seeds']} of {row['of_seeds']} seeds"


def _cost_table(rows: list[Row]) -> Table:
    return Table(
        name="steps",
        title="What a step of the MoE layers costs, and where the runs end",
        settings={},
        columns=[
            Column(key="setting", label="setting", form="text"),
            Column(key="variant", label="variant", form="text"),
            Column(key="compute_ms", label="computation, ms", form="2", meaning="a step, median of the second half"),
            Column(key="level_ms", label="were it level, ms", form="2", meaning="mean of the ranks, not the slowest"),
            Column(key="transfer_ms", label="transfers, ms", form="2", meaning="at the stated bandwidth"),
            Column(key="load_max_over_mean", label="home load max/mean", form="2", meaning="of ranks, nothing moved"),
            Column(key="rows_max_over_mean", label="rows max/mean", form="2", meaning="of ranks, forward"),
            Column(key="kept_max_over_mean", label="kept rows max/mean", form="2", meaning="of ranks, backward"),
            Column(key="replicas", label="replicas", form="2", meaning="a layer and step, all ranks"),
            Column(key="kept_share", label="kept pairs", form="percent", meaning="of the whole run, warm-up included"),
            Column(key="validation_loss", label="validation loss", form="4", meaning="nats a token, at the end"),
            Column(
                key="validation_difference", label="minus the first's", form="+4", meaning="mean of the paired seeds"
            ),
        ],
        rows=rows,
        note="Without a drop all balancers compute the same gradients, up to the order of sums: their losses differ by "
        "rounding alone.",
    )


def _curves(setting: Setting, cells: Sequence[Cell]) -> Figure:
    """Loss over cumulative MoE time, of the first seed."""
    series = []
    for contender in cells[0]["contenders"]:
        seconds, curve = seconds_of(contender), contender["validation"]
        minutes = [round(until(seconds, steps) / 60, 5) for steps, _ in curve]
        series.append(Series(name=contender["name"], x=minutes, y=[loss for _, loss in curve]))
    return Figure(
        name=f"curves-{setting.name}",
        title=f"Loss over MoE time: {_inside(setting.title)}",
        reading=f"Validation loss with seed {setting.seeds[0]} against the MoE-layer time spent so far. Of two curves "
        "the one further left reaches a loss sooner.",
        x_label="cumulative MoE-layer time, min",
        y_label="validation loss, nats a token",
        series=series,
    )


def _ratios(config: TimeToLossConfig, last: Mapping[str, tuple[Setting, list[Row]]]) -> Figure:
    """Every variant's time to the last target over that of the first."""
    series = []
    for setting, rows in last.values():
        each = [row[f"each over {setting.contenders[0].name}"] for row in rows]
        series.append(
            Series(
                name=setting.title,
                x=[row["variant"] for row in rows],
                y=[row[f"over {setting.contenders[0].name}"] for row in rows],
                low=[min(column) if column else None for column in each],
                high=[max(column) if column else None for column in each],
                kind="points",
            )
        )
    return Figure(
        name="ratios",
        title=f"MoE time to the loss of plain training after {config.targets[-1]:.0%} of its steps",
        reading="Time over that of plain training (no drop, fixed ownership), mean of the paired seeds with the lowest "
        "and the highest; below 1 is faster. A variant without a point does not reach the loss.",
        x_label="variant",
        y_label="time over plain training",
        series=series,
    )


def _inside(title: str) -> str:
    """A title in the middle of another."""
    return title[0].lower() + title[1:]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
