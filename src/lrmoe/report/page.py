"""The page of a training run or of a comparison."""

from __future__ import annotations

import math
from pathlib import Path

from lrmoe.experts.meter import NONFINITE
from lrmoe.labels import layer_label
from lrmoe.report import comparison_sections, frame, overview, run_sections, sections
from lrmoe.report.comparison import rows_of
from lrmoe.report.frame import Frame, write_page
from lrmoe.report.loads import load_frame
from lrmoe.report.run_folder import Run, Training, read_run
from lrmoe.report.series import first_not_finite
from lrmoe.report.table import table
from lrmoe.report.text import escape, short_layer_names
from lrmoe.report.variants import find_baseline, looks
from lrmoe.report.view import Page, legend

# Layers that a notice names.
MAX_NAMED = 8


def write_run_page(run_dir: Path) -> Path:
    """Writes ``report.html`` into a folder of ``lrmoe train`` or ``lrmoe compare``.

    Raises:
        ValueError: if a file is missing or malformed; names the file and the line.
    """
    return write_page(run_dir / "report.html", render(read_run(run_dir)))


def render(run: Run) -> Frame:
    """The page of a run."""
    baseline = find_baseline(run)
    page = Page(run=run, baseline=baseline, looks=looks(run, baseline), rows=rows_of(run, baseline))
    head = overview.facts(page) + frame.notices(_notices(page)) + overview.tiles(page)
    if run.is_comparison:
        head += comparison_sections.advice_box(page)
        parts = [table(page), legend(page), comparison_sections.cost(page), comparison_sections.kept_by_variant(page)]
        body = "".join(parts) + "".join(section(page) for section in sections.SECTIONS)
    else:
        body = run_sections.body(page) + sections.limits(page)
    return Frame(
        kind="Comparison" if run.is_comparison else "Training run",
        title=overview.title(page),
        lead=overview.lead(page),
        head=head,
        body=body,
        footer=f"Written by LRMoE from {escape(run.path.resolve().name)}/. A pair is a token and one of the experts "
        "chosen for it; the importance R of a pair is the squared norm of its contribution to the gradient of the "
        "expert's down projection.",
        settings=run.config,
        figures=page.figures,
        data={"loads": page.loads, "loadLayout": load_frame()} if page.loads else {},
        scripts=("loads.js",) if page.loads else (),
    )


def _notices(page: Page) -> list[str]:
    """What a reader must know before the numbers."""
    run = page.run
    notices = []
    if run.summary is None:
        notices.append(
            "The run is unfinished: summary.json is not there yet. The page shows what has been logged so far."
        )
    if not run.trainings:
        notices.append("metrics.jsonl has no line yet.")
    for training in run.trainings:
        of = f"{training.variant}, seed {training.seed}: " if run.is_comparison else ""
        who = f"{of}the" if of else "The"
        for column, words in (("loss", "training loss"), ("eval_loss", "validation loss")):
            steps, values = training.series(column)
            step = first_not_finite(steps, values)
            if step is not None:
                count = sum(not math.isfinite(value) for value in values)
                times = "once" if count == 1 else f"{count:,} times"
                notices.append(f"{who} {words} is not a finite number ({times}, first at step {step:,}).")
        _, left_out = training.series(NONFINITE)
        if count := int(sum(value for value in left_out if math.isfinite(value))):
            passes = "backward pass of a layer was" if count == 1 else "backward passes of layers were"
            notices.append(
                f"{of}{count:,} {passes} not finite, as where a loss scaler skips a step; the shares of importance "
                "leave them out."
            )
        notices += _guard_notice(training, of)
    return notices


def _guard_notice(training: Training, who: str) -> list[str]:
    """Which layers the guard stopped from dropping, and when first."""
    first: dict[str, int] = {}
    stopped = [event for point in training.points for event in point.events if event.kind == "stopped"]
    for event in stopped:
        first.setdefault(event.layer, event.step)
    if not first:
        return []
    short = dict(zip(training.layer_names, short_layer_names(training.layer_names), strict=True))
    named = [f"{short.get(layer, layer_label(layer))} (from step {step:,})" for layer, step in first.items()]
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    times = "once" if len(stopped) == 1 else f"{len(stopped):,} times"
    begin = f"{who}the" if who else "The"
    return [f"{begin} guard stopped layers from dropping {times}: {', '.join(named[:MAX_NAMED])}{more}."]
