"""What only a comparison's page has: what to do, what dropping cost seed by seed, and what each variant kept."""

from __future__ import annotations

import math

from lrmoe.report import palette, variant_charts
from lrmoe.report.charts import Figure, layout
from lrmoe.report.comparison import Row, seconds_a_step
from lrmoe.report.frame import advice
from lrmoe.report.run_folder import Training
from lrmoe.report.text import counted, duration, escape, fixed
from lrmoe.report.variants import settings_of
from lrmoe.report.verdicts import Verdict, recommended
from lrmoe.report.verdicts import advice as advised
from lrmoe.report.view import Page, card


def verdicts(page: Page) -> list[Verdict]:
    """Every other variant beside the one without drop."""
    base = page.base
    if base is None:
        return []
    spread = base.get("eval_loss_spread")
    return [
        Verdict(
            name=row.variant,
            differences=tuple(row.differences) if all(map(math.isfinite, row.differences)) else (),
            spread=spread if len(row.differences) > 1 else None,
            seconds=_moe_seconds(row),
        )
        for row in page.rows
        if row is not base
    ]


def advice_box(page: Page) -> str:
    """What the comparison says to do, with what it rests on."""
    base = page.base
    if not page.run.is_comparison:
        return ""
    if base is None:
        said = ['Add a variant without drop (--variant "C0: drop=0"): nothing here says what dropping costs.']
        return advice(said)
    loss, spread = base.get("eval_loss"), base.get("eval_loss_spread")
    if loss is None or not math.isfinite(loss):
        said = [
            f"Get “{base.variant}” to train first: it has no finite validation loss to hold anything against. A lower "
            "--lr is the first thing to try."
        ]
        return advice(said)
    found = verdicts(page)
    said = advised(found, base.variant, _moe_seconds(base)) + _of_a_step(page, recommended(found))
    if page.run.summary is None:
        said.insert(0, "Wait for the comparison to finish before choosing: what follows is the state so far.")
    if page.memorizes:
        said.append(
            "Do not carry this over to other texts: these runs learn their own training text by heart, which shows a "
            "bias of the backward early and says nothing of how a model generalises."
        )
    apart = "" if spread is None else f", whose seeds lie {fixed(spread, 4)} nats apart"
    basis = (
        f"It rests on the last validation of {counted(page.seeds, 'seed')}, each paired with “{base.variant}” of the "
        f"same seed{apart}, and on the times of this machine. It holds for this model, text and number of steps."
    )
    return advice(said, basis=basis)


def cost(page: Page) -> str:
    """Validation loss minus that of no drop: seed by seed at the end, and over the steps."""
    base = page.base
    if base is None or not page.many:
        return ""
    spread = base.get("eval_loss_spread")
    dots = difference_dots(page)
    reading = (
        f"Small circles are single seeds, diamonds their means; right of zero is worse than “{base.variant}”. "
        + (
            f"The first row shows the seeds of “{base.variant}” around their own mean, and the shaded range reaches as "
            "far to either side as these lie apart: a diamond inside it cannot be told from chance."
            if spread is not None
            else "One seed each: nothing here says how much of a difference is chance."
        )
    )
    curves = variant_charts.loss_difference(page.run, page.looks, base.variant)
    if curves is not None and spread is not None and math.isfinite(spread):
        curves["layout"]["shapes"] = [_shade(spread, "y")]
    shaded = [(palette.PALE, f"seed spread of {base.variant}")] if spread is not None else []
    band = " Lines are means over seeds, bands reach from the lowest to the highest seed." if page.seeds > 1 else ""
    shade = " The shaded range is the seed spread at the last step." if shaded else ""
    parts = [
        card(
            page, "cost", "At the last validation", reading, dots, "No variant has a loss to compare.", colours=shaded
        ),
        card(
            page,
            "difference",
            "Over the steps",
            f"Each variant minus “{base.variant}” of the same seed, same start and same data; above zero is worse."
            f"{band}{shade}",
            curves,
            "No step has a validation loss of both.",
            colours=shaded,
        ),
    ]
    return f'<h2>What dropping cost</h2><div class="grid">{"".join(parts)}</div>'


def difference_dots(page: Page) -> Figure | None:
    """A row a variant: every seed's difference and their mean."""
    base = page.base
    if base is None:
        return None
    data: list[Figure] = []
    names: list[str] = []
    for row in page.rows:
        values = _around_mean(page.run.of(row.variant)) if row is base else row.differences
        known = [value for value in values if math.isfinite(value)]
        if not known and row is not base:
            continue
        place = len(names)
        names.append(row.variant)
        if not known:
            continue
        look, meta = page.looks[row.variant], {"variant": page.run.variants.index(row.variant)}
        common = {"type": "scatter", "mode": "markers", "name": escape(row.variant), "meta": meta}
        hover = "%{x:+.4f} nats<extra></extra>"
        data.append(
            common
            | {
                "x": known,
                "y": [place] * len(known),
                "marker": {"color": look.colour, "size": 8, "symbol": "circle-open", "line": {"width": 2}},
                "hovertemplate": f"{escape(row.variant)}, one seed<br>{hover}",
            }
        )
        if row is not base and len(known) == len(values):
            data.append(
                common
                | {
                    "x": [math.fsum(known) / len(known)],
                    "y": [place],
                    "marker": {"color": look.colour, "size": 13, "symbol": "diamond"},
                    "hovertemplate": f"{escape(row.variant)}, mean<br>{hover}",
                }
            )
    if len(names) < 2 or not data:
        return None
    frame = _rows_layout(f"minus {base.variant} (nats per token)", names)
    frame["xaxis"] |= {"tickformat": "+.3~f", "zeroline": True, "zerolinecolor": palette.ZERO, "rangemode": "normal"}
    spread = base.get("eval_loss_spread")
    if spread is not None and math.isfinite(spread):
        frame["shapes"] = [_shade(spread, "x")]
        # A shape does not widen an axis of its own accord.
        shown = [value for trace in data for value in trace["x"]] + [-spread, spread]
        room = 0.06 * (max(shown) - min(shown)) or 0.001
        frame["xaxis"] |= {"range": [min(shown) - room, max(shown) + room]}
    return {"data": data, "layout": frame}


def kept_by_variant(page: Page) -> str:
    """What each variant's backward kept, over the whole run."""
    if not page.run.is_comparison or not page.many:
        return ""
    limits = {settings.get("guard_variance") for settings in settings_of(page.run).values()} - {None}
    limit = next(iter(limits)) if len(limits) == 1 else None
    limit = float(limit) if isinstance(limit, (int, float)) and not isinstance(limit, bool) else None
    variance = _dots(page, {"variance_share": ("V*/ΣR", palette.BLUE, "circle")}, "V*/ΣR", scale=1.0, digits=4)
    if variance is not None:
        shown = [x for trace in variance["data"] for x in trace["x"]]
        # Room left of zero, so that a marker there does not lie on its variant's name.
        right = max(*shown, 1e-6)
        variance["layout"]["xaxis"] |= {"range": [-0.06 * right, 1.12 * right], "zeroline": True}
        if limit is not None and limit <= 2 * right:
            variance["layout"]["xaxis"] |= {"range": [-0.06 * right, 1.12 * max(right, limit)]}
            variance["layout"]["shapes"] = [
                {
                    "type": "line",
                    "yref": "paper",
                    "y0": 0,
                    "y1": 1,
                    "x0": limit,
                    "x1": limit,
                    "line": {"color": palette.LIMIT, "width": 1.5, "dash": "dot"},
                }
            ]
        else:
            limit = None
    guard = f" The dotted line, at {limit:g}, is the limit at which the guard stops pps." if limit is not None else ""
    kinds = {
        "kept_share": ("pairs", palette.PALE, "circle"),
        "kept_importance_share": ("sum of importance ΣR", palette.BLUE, "diamond"),
    }
    kept = _dots(page, kinds, "kept (%)", scale=100.0, digits=2)
    parts = [
        card(
            page,
            "kept_by_variant",
            "Kept pairs, and the importance they hold",
            "The further the diamond lies right of the circle, the better the choice of pairs: as many kept at random "
            "would hold a share like their number. Means over the run and its seeds.",
            kept,
            "Not logged.",
            colours=[(palette.PALE, "kept pairs"), (palette.BLUE, "kept sum of importance ΣR")],
        ),
        card(
            page,
            "variance_by_variant",
            "Noise that dropping adds, V*/ΣR",
            "The least variance that any unbiased choice of so many pairs has, against the noise of the batch itself; "
            f"further left is better.{guard} Means over the run and its seeds.",
            variance,
            "Not logged.",
        ),
    ]
    return f'<h2>What each variant kept</h2><div class="grid">{"".join(parts)}</div>'


def _dots(
    page: Page, columns: dict[str, tuple[str, str, str]], title: str, *, scale: float, digits: int
) -> Figure | None:
    rows = [row for row in page.rows if all(row.get(column) is not None for column in columns)]
    if not rows:
        return None
    data = []
    for column, (words, colour, symbol) in columns.items():
        values = [scale * (row.get(column) or 0.0) for row in rows]
        if not all(map(math.isfinite, values)):
            return None
        unit = " %" if scale == 100 else ""
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": values,
                "y": list(range(len(rows))),
                "name": words,
                "cliponaxis": False,
                "marker": {"color": colour, "size": 12, "symbol": symbol},
                "hovertemplate": f"%{{x:.{digits}f}}{unit} {words}<extra></extra>",
            }
        )
    frame = _rows_layout(title, [row.variant for row in rows])
    frame["xaxis"] |= {"rangemode": "normal", "tickformat": ",~g"}
    return {"data": data, "layout": frame}


def _rows_layout(title: str, names: list[str]) -> Figure:
    """A horizontal axis with a row a name, the first on top."""
    frame = layout(escape(title), "", hovermode="closest", height=110 + 36 * len(names))
    frame["yaxis"] |= {
        "tickvals": list(range(len(names))),
        "ticktext": [escape(name if len(name) <= 22 else f"{name[:20]}…") for name in names],
        "range": [len(names) - 0.5, -0.5],
        "zeroline": False,
        "ticksuffix": " ",
    }
    return frame


def _shade(spread: float, axis: str) -> Figure:
    """A range of ``spread`` to either side of zero."""
    other = "y" if axis == "x" else "x"
    return {
        "type": "rect",
        f"{other}ref": "paper",
        f"{other}0": 0,
        f"{other}1": 1,
        f"{axis}0": -spread,
        f"{axis}1": spread,
        "layer": "below",
        "line": {"width": 0},
        "fillcolor": palette.translucent(palette.PALE, 0.35),
    }


def _around_mean(trainings: list[Training]) -> list[float]:
    """Each seed's last validation loss minus their mean."""
    last = [values[-1] for training in trainings if (values := training.series("eval_loss")[1])]
    mean = math.fsum(last) / len(last) if last else 0.0
    return [value - mean for value in last] if len(last) > 1 else []


def _moe_seconds(row: Row) -> float | None:
    forward, backward = row.get("forward_seconds"), row.get("backward_seconds")
    return None if forward is None or backward is None else forward + backward


def _of_a_step(page: Page, best: Verdict | None) -> list[str]:
    """What the time saved in the MoE layers is of a whole step."""
    base = page.base
    if base is None or best is None or best.seconds is None:
        return []
    before, step = _moe_seconds(base), seconds_a_step(page.run.of(base.variant), "seconds")
    if before is None or step is None or best.seconds >= before:
        return []
    share = 100 * (before - best.seconds) / step
    return [
        f"Expect {fixed(share, 1)} % of a whole step ({duration(step)}) from that, not more: attention, the optimizer "
        "and everything else take as long as before."
    ]
