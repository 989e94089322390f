"""The parts of the page of one training run: each a string of HTML, with the figures put into ``page.figures``."""

from __future__ import annotations

import math
from collections.abc import Callable

from lrmoe.report import frame, load_section, run_charts, series
from lrmoe.report.advice import advise
from lrmoe.report.charts import MAX_COLUMNS, colours_of
from lrmoe.report.evidence import Evidence, gather, times
from lrmoe.report.palette import BLUE
from lrmoe.report.run_folder import Point, Training
from lrmoe.report.text import counted, duration, fixed, percent, size, whole
from lrmoe.report.view import Page, card

# Rows of the table of logged steps.
MAX_ROWS = 12
Section = Callable[[Page, Training, Evidence], str]


def body(page: Page) -> str:
    """All parts; nothing where nothing was logged."""
    if not page.run.trainings:
        return ""
    training = page.run.trainings[0]
    evidence = gather(training, page.settings, finished=page.run.summary is not None)
    return "".join(section(page, training, evidence) for section in SECTIONS)


def _advice(page: Page, training: Training, evidence: Evidence) -> str:
    basis = f"From the {counted(len(training.points), 'logged step')} of this run; one run shows no spread over seeds."
    return frame.advice(advise(evidence), basis=basis)


def _loss(page: Page, training: Training, evidence: Evidence) -> str:
    figure = run_charts.loss(training)
    trend = ""
    if len(evidence.eval_loss) > 1:
        (first, begin), (last, end) = evidence.eval_loss[0], evidence.eval_loss[-1]
        trend = (
            f" Validation went from {fixed(begin, 3)} at step {whole(first)} to {fixed(end, 3)} at step {whole(last)}."
        )
    top = run_charts.loss_top(training)
    if top is not None:
        highest = max(value for pairs in (evidence.loss, evidence.eval_loss) for _, value in pairs)
        trend += f" The axis ends at {fixed(top, 2)}, below some values (up to {fixed(highest, 2)}); "
        trend += "a double click shows all."
    if page.memorizes:
        text = " This run memorises: validation is on the text that is trained on."
    else:
        text = " The validation text is never trained on: a gap that opens between the curves is memorising."
    reading = f"Cross-entropy of the next token; lower is better.{text}{trend}{_thinned(training)}"
    empty = "No finite loss was logged."
    one = card(
        page, "loss", "Training and validation loss", reading, figure, empty, colours=colours_of(figure), wide=True
    )
    return f'<h2>Loss</h2><div class="grid">{one}</div>'


def _thinned(training: Training) -> str:
    many = series.thinned_by(len(training.points))
    return f" Curves show the lowest and the highest of every {many} logged steps." if many is not None else ""


def _kept(page: Page, training: Training, evidence: Evidence) -> str:
    limit = evidence.limit
    many = math.ceil(sum(bool(point.layers) for point in training.points) / MAX_COLUMNS)
    columns = f" A column is the mean of up to {many} logged steps." if many > 1 else ""
    dropped = run_charts.dropped(training)
    share = evidence.kept_share
    over = f" Over the run {percent(1 - share)} of the pairs were left out." if share is not None else ""
    held = " Where a layer's guard stops it, less is left out than scheduled." if evidence.events else ""
    apart = ""
    if training.series("sequence_kept_share_min")[0]:
        apart = " The pale lines: of the sequences of a batch the one that lost most and the one that lost least."
    importance = run_charts.kept_importance(training, limit)
    lowest = min(evidence.kept_importance, key=lambda pair: pair[1], default=None)
    least = f" Least here: {percent(lowest[1])} at step {whole(lowest[0])}, mean of layers." if lowest else ""
    variance = run_charts.variance(training, limit)
    spread = "The noise that dropping adds, relative to that of the batch itself; 0 adds none."
    if limit.column == "variance_share":
        held_to = "the guard stops a layer that is above it" if limit.in_force else "no guard was on"
        spread += f" The limit is {limit.value:g}: {held_to}."
    if evidence.worst is not None and limit.column == "variance_share":
        step, layer, value = evidence.worst
        spread += f" The most here is {fixed(value, 3)}, in {layer} at step {whole(step)}."
    variance_map = run_charts.layer_map(training, "variance_share", "V*/ΣR", limit=limit, events=evidence.events)
    importance_map = run_charts.layer_map(
        training, "kept_importance_share", "kept sum of R (%)", events=evidence.events
    )
    above = limit.column == "variance_share"
    scale = "Orange and beyond is above the limit." if above else "The far end of the colours is the most there was."
    marks = (
        " A cross: the guard stopped the layer there, which then adds no noise; a dot: it may drop again."
        if evidence.events
        else ""
    )
    if len([e for e in evidence.events if e.kind == "stopped"]) > run_charts.MAX_MARKS:
        marks += f" Only the first {run_charts.MAX_MARKS} of either are marked."
    parts = [
        card(
            page,
            "dropped",
            "Drop schedule, and what was left out",
            "The share of token-expert pairs whose backward the schedule lets out at the logged step (dashed), and "
            "that was left out since the line before. They part where the drop changes, where quotas are rounded and "
            f"where an error budget holds pairs back.{held}{over}{apart}",
            dropped,
            "No drop was logged.",
            colours=colours_of(dropped),
        ),
        card(
            page,
            "kept_importance",
            "Kept share of the sum of R",
            "How much of the importance R the kept pairs hold: the further above the share of kept pairs, the better "
            f"the choice knew what matters.{least}",
            importance,
            "Not logged.",
            colours=colours_of(importance),
        ),
        card(
            page,
            "variance",
            "Sampling variance V*/ΣR",
            f"{spread} V* is the least variance that any unbiased choice of so many pairs has.",
            variance,
            "Not logged.",
            colours=colours_of(variance),
            wide=True,
        ),
        card(
            page,
            "variance_map",
            "V*/ΣR by layer and step",
            f"A row a layer, a column a logged step. {scale} A row that stays there needs a lower drop than others."
            f"{columns}{marks}",
            variance_map,
            "No layer logged this.",
        ),
        card(
            page,
            "importance_map",
            "Kept sum of R by layer and step",
            "A row a layer, a column a logged step, coloured as the bar above says. A row that stays near the low end "
            f"loses more than the others at the same drop.{columns}{marks}",
            importance_map,
            "No layer logged this.",
        ),
    ]
    intro = (
        '<p class="intro">The forward computes every pair. The backward computes the kept ones and leaves out the '
        "rest. "
        "The importance R of a pair is the squared norm of its contribution to the gradient of the expert's down "
        "projection.</p>"
    )
    return f'<h2>What the backward kept</h2>{intro}<div class="grid">{"".join(parts)}</div>'


def _loads(page: Page, training: Training, evidence: Evidence) -> str:
    spread = run_charts.load_spread(training)
    said = ""
    if len(evidence.load) > 1:
        (first, begin), (last, end) = evidence.load[0], evidence.load[-1]
        said = f" The mean went from {fixed(begin, 2)} at step {whole(first)} to {fixed(end, 2)} at step {whole(last)}."
    chart = card(
        page,
        "load_spread",
        "Load of the busiest expert",
        "Pairs of the most loaded expert over the mean of its layer; 1 is an even load. A value that keeps rising says "
        f"that routing collapses onto few experts.{said}",
        spread,
        "Not logged.",
        colours=colours_of(spread),
        wide=True,
    )
    return load_section.section(page, chart)


def _time(page: Page, training: Training, evidence: Evidence) -> str:
    lines, validated, left_out = times(training)
    bar = run_charts.step_bar(evidence.time) if evidence.time is not None else None
    over = run_charts.step_times(lines)
    note = "Forward and backward of the experts of all MoE layers: CPU time on one thread, wall clock on several, the "
    note += "slowest of several ranks. The rest is attention, router, optimizer and everything else, in wall clock."
    note += " Every logged interval had a validation, whose time is in the rest." if validated else ""
    note += (
        f" {counted(left_out, 'interval')} whose parts were longer than the whole are not shown." if left_out else ""
    )
    said = ""
    if evidence.time is not None:
        said = f" A step took {duration(evidence.time.whole / 1000)}, of which a drop can save a part of the "
        said += f"{duration(evidence.time.backward / 1000)} of the experts' backward."
    empty = "Not measured. The clock runs for layers on a CPU only: a GPU returns before its work is done."
    single = "One logged interval without a validation is needed at two steps or more."
    skipped = "" if validated else " Intervals with a validation are left out."
    parts = [
        card(
            page,
            "time",
            "Where a step's time goes",
            f"{note}{said}",
            bar,
            empty,
            colours=colours_of(bar),
            wide=True,
        ),
        card(
            page,
            "time_over_run",
            "Time of a step over the run",
            f"The parts stacked: the top is the whole step. A bump is mostly other work on the machine.{skipped}",
            over,
            empty if bar is None else single,
            colours=colours_of(over),
            wide=True,
        ),
    ]
    return f'<h2>Time</h2><div class="grid">{"".join(parts)}</div>'


def _memory(page: Page, training: Training, evidence: Evidence) -> str:
    saved = next((point.saved_bytes for point in training.points if point.saved_bytes), {})
    if "moe" not in saved:
        return ""
    bar = run_charts.saved_bar(saved["moe"], saved.get("model"))
    said = ""
    if saved.get("model"):
        said = f" {percent(saved['moe'] / saved['model'], 0)} of {size(saved['model'])} are the MoE layers'."
    reading = (
        "What the forward of one microbatch keeps for its backward, weights not counted. A drop does not change it; "
        f'save="input" does, for the MoE layers.{said}'
    )
    one = card(page, "saved", "Saved for the backward", reading, bar, "Not logged.", colours=colours_of(bar), wide=True)
    return f'<h2>Memory</h2><div class="grid">{one}</div>'


def _ranks(page: Page, training: Training, evidence: Evidence) -> str:
    if not any(point.parallel or point.sent_bytes for point in training.points):
        return ""
    loads, copies = run_charts.rank_loads(training), run_charts.replicas(training)
    sent = run_charts.sent_bytes(training)
    mean = evidence.parallel
    home, planned = mean.get("home_max_over_mean"), mean.get("forward_max_over_mean")
    said = f" Here {fixed(home, 2)} at home became {fixed(planned, 2)} as planned." if home and planned else ""
    moved = ""
    if mean.get("rows"):
        moved = f" They computed {percent(mean.get('moved_rows', 0.0) / mean['rows'])} of all rows."
    extra = mean.get("extra_dropped", 0.0)
    more = f" To fit the capacity {fixed(extra, 1)} pairs a plan were dropped beyond the drop." if extra else ""
    total = sum(value for _, value in sent)
    parts = [
        card(
            page,
            "rank_loads",
            "Load of the busiest rank",
            f"Rows of the busiest rank over the mean of the ranks, mean over layers and microbatches; 1 is even.{said}",
            loads,
            "Not logged.",
            colours=colours_of(loads),
        ),
        card(
            page,
            "replicas",
            "Copies of experts",
            "Instances away from an expert's home in one layer and microbatch: each costs its weights on the "
            f"wire.{moved}{more}",
            copies,
            "Not logged.",
        ),
    ]
    if sent:
        parts.append(
            '<section class="card wide"><h3>Bytes that this rank sent, by purpose</h3>'
            f"{frame.bars([(purpose, size(value), value) for purpose, value in sent], BLUE)}"
            '<p class="reading">Mean of an optimizer step, sent by the rank that wrote the records. Validations are in '
            "it, "
            f"which send tokens and weights but no gradients. In all {size(total)} a step.</p></section>"
        )
    return f'<h2>Ranks</h2><div class="grid">{"".join(parts)}</div>'


def _share(column: str, digits: int) -> Callable[[Point], str]:
    return lambda point: percent(point.values.get(column), digits)


def _number(column: str, digits: int) -> Callable[[Point], str]:
    return lambda point: fixed(point.values.get(column), digits)


def _held(point: Point) -> str:
    value = point.values.get("guarded_layers")
    return fixed(value, 0)


# Heading, unit, the column that some line must have, cell.
_COLUMNS: tuple[tuple[str, str, str, Callable[[Point], str]], ...] = (
    ("Training loss", "nats per token", "loss", _number("loss", 4)),
    ("Validation loss", "nats per token", "eval_loss", _number("eval_loss", 4)),
    ("Drop", "in effect", "drop", _share("drop", 1)),
    ("Kept pairs", "", "kept_share", _share("kept_share", 1)),
    ("Kept ΣR", "", "kept_importance_share", _share("kept_importance_share", 2)),
    ("V*/ΣR", "", "variance_share", _number("variance_share", 4)),
    ("Guarded", "layers", "guarded_layers", _held),
    ("Load max/mean", "experts", "load_max_over_mean", _number("load_max_over_mean", 2)),
)


def _table(page: Page, training: Training, evidence: Evidence) -> str:
    points = training.points
    validated = [point for point in points if "eval_loss" in point.values]
    of = validated if len(points) > MAX_ROWS and len(validated) >= MAX_ROWS else points
    shown = [of[part[-1]] for part in series.parts(len(of), MAX_ROWS)]
    columns = [column for column in _COLUMNS if any(column[2] in point.values for point in points)]
    rows = [[f"{whole(point.step)}", *(cell(point) for *_, cell in columns)] for point in shown]
    headings = [("Step", ""), *((heading, unit) for heading, unit, *_ in columns)]
    note = "As metrics.jsonl has them: losses and shares since the line before."
    if len(shown) < len(points):
        kind = "lines with a validation" if of is validated else "lines"
        note += f" {len(shown)} of {whole(len(of))} {kind}, evenly spread, the last among them."
    return frame.table("steps", headings, rows, title="Logged steps", note=note)


SECTIONS: tuple[Section, ...] = (_advice, _loss, _kept, _loads, _time, _memory, _ranks, _table)
