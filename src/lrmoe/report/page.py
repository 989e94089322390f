"""One self-contained HTML file of a run folder: styles, figures and plotly inside, nothing fetched when opened."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path

from lrmoe.report import overview, sections
from lrmoe.report.charts import axis, layout
from lrmoe.report.comparison import rows_of
from lrmoe.report.run_folder import Run, read_object, read_run
from lrmoe.report.series import first_not_finite
from lrmoe.report.table import table
from lrmoe.report.text import escape
from lrmoe.report.variants import find_baseline, looks
from lrmoe.report.view import Page, legend
from lrmoe.training.files import write_text


def write_report(run_dir: Path) -> Path:
    """Writes ``report.html`` into a folder of ``lrmoe train`` or ``lrmoe compare``, of ``lrmoe balance`` with a trace
    or a workload, or of ``lrmoe plan`` or ``lrmoe pressure``, replacing an old one.

    The page opens offline in any current browser; it is about 5 MB, nearly all of it plotly. It is replaced in one
    move: whoever has it open never sees half of it, and a failure leaves the old page.

    Args:
        run_dir: the folder, with ``config.json`` and ``metrics.jsonl``; ``summary.json`` is absent while the run is
            unfinished.

    Returns:
        The path of the page.

    Raises:
        ValueError: if a file is missing or malformed; names the file and the line.
        ModuleNotFoundError: if plotly is not installed (the ``train`` extra has it).
    """
    run_dir = Path(run_dir)
    command = read_object(run_dir / "config.json").get("command") if run_dir.is_dir() else None
    if command == "balance":
        from lrmoe.report.replay import write_replay_page

        return write_replay_page(run_dir)
    if command == "plan":
        from lrmoe.report.plan import write_plan_page

        return write_plan_page(run_dir)
    if command == "pressure":
        from lrmoe.report.pressure import write_pressure_page

        return write_pressure_page(run_dir)
    # Names that the system does not decode come as lone surrogates, which no UTF-8 file can hold.
    page = render(read_run(run_dir)).encode("utf-8", "backslashreplace").decode("utf-8")
    path = run_dir / "report.html"
    write_text(path, page)
    return path


def render(run: Run) -> str:
    """The page of a run, as HTML."""
    from plotly.offline import get_plotlyjs

    baseline = find_baseline(run)
    page = Page(run=run, baseline=baseline, looks=looks(run, baseline), rows=rows_of(run, baseline))
    title = escape(overview.title(page))
    kind = "Comparison" if run.is_comparison else "Training run"
    parts = [section(page) for section in sections.SECTIONS]
    frame = layout("", "", hovermode="closest", margin={"l": 8, "r": 12, "t": 50, "b": 52})
    frame |= {
        "xaxis": axis("", showgrid=False, zeroline=False),
        "yaxis": axis("", showgrid=False, zeroline=False),
    }
    data = {"figures": page.figures, "loads": page.loads, "loadLayout": frame}
    settings = escape(json.dumps(run.config, indent=2, ensure_ascii=False))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} – LRMoE {kind.lower()}</title>
<link rel="icon" href="data:,">
<style>{asset("report.css")}</style>
</head>
<body>
<header>
<p class="eyebrow">LRMoE · {kind}</p>
<h1>{title}</h1>
<p class="lead">{overview.lead(page)}</p>
{overview.facts(page)}
{_notices(page)}
{overview.tiles(page)}
</header>
<main>
<noscript><p class="notice">The charts are drawn by a script inside this file; allow scripts to see them.</p></noscript>
{table(page)}
{legend(page)}
{"".join(parts)}
<h2>Settings</h2>
<section class="card"><details><summary>config.json</summary>
<pre tabindex="0">{settings}</pre></details></section>
</main>
<footer>Written by LRMoE from {escape(run.path.resolve().name)}/. A pair is a token and one of the experts chosen
for it; the importance R of a pair is the squared norm of its contribution to the gradient of the expert's down
projection.</footer>
<script>{get_plotlyjs()}</script>
<script type="application/json" id="report-data">{inline_json(data)}</script>
<script>{asset("report.js")}</script>
</body>
</html>
"""


def asset(name: str) -> str:
    """A file of ``assets/``."""
    return (resources.files("lrmoe.report") / "assets" / name).read_text(encoding="utf-8")


def inline_json(value: object) -> str:
    """JSON that cannot end the script element it stands in, without NaN, which browsers do not read."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _notices(page: Page) -> str:
    """What a reader must know before the numbers, as HTML."""
    run = page.run
    notices = []
    if run.summary is None:
        notices.append(
            "The run is unfinished: summary.json is not there yet. The page shows what has been logged so far."
        )
    if not run.trainings:
        notices.append("metrics.jsonl has no line yet.")
    for training in run.trainings:
        who = f"{training.variant}, seed {training.seed}: the" if run.is_comparison else "The"
        for column, words in (("loss", "training loss"), ("eval_loss", "validation loss")):
            steps, values = training.series(column)
            step = first_not_finite(steps, values)
            if step is not None:
                count = sum(not math.isfinite(value) for value in values)
                times = "once" if count == 1 else f"{count:,} times"
                notices.append(f"{who} {words} is not a finite number ({times}, first at step {step:,}).")
    if not notices:
        return ""
    items = "".join(f"<li>{escape(notice)}</li>" for notice in notices)
    return f'<div class="notice" role="note"><b>Please note</b><ul>{items}</ul></div>'
