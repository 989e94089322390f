"""The index of a folder of runs: a row a run, charts of those that can be compared, and what to do next."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote

from lrmoe.report.frame import Frame, advice, chart, notices, table, tiles, write_page
from lrmoe.report.index_charts import Group, against_kept, against_time, group, key
from lrmoe.report.index_entries import DEPTH, read_entries
from lrmoe.report.index_entry import Entry
from lrmoe.report.index_records import Fill
from lrmoe.report.text import DASH, counted, duration, escape, fixed, percent, whole
from lrmoe.training.files import check_file

MARK = "<!-- lrmoe: index of runs -->"
"""By which a page of an index is known as one."""
MAX_GROUPS = 6


def write_index_page(folder: Path, fills: Mapping[str, Fill], write_run: Callable[[Path], Path]) -> Path:
    """Writes ``report.html`` into a folder of runs, and the runs' own pages where they are missing or older than
    their records.

    Args:
        folder: holds run folders, at most :data:`DEPTH` levels down; is none itself.
        fills: for each command that writes run folders, what reads its records.
        write_run: writes the page of one run folder.

    Raises:
        ValueError: if there is no run folder in it, or it has a ``report.html`` that is no index or no file.
    """
    path = folder / "report.html"
    check_file(path)
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{path} is not an index that lrmoe wrote; move it away, so that it is not overwritten")
    entries, deeper = read_entries(folder, fills)
    if not entries:
        raise ValueError(
            f"{folder} is neither a run folder nor has one within {DEPTH} levels; give a folder that lrmoe train, "
            "compare, study, balance or plan wrote with --out, or a folder of such folders"
        )
    for entry in entries:
        _write_missing(entry, write_run)
    return write_page(path, _frame(folder, entries, deeper))


def _write_missing(entry: Entry, write_run: Callable[[Path], Path]) -> None:
    if entry.problem is not None:
        return
    page = entry.path / "report.html"
    try:
        check_file(page)
        if page.exists() and page.stat().st_mtime >= entry.changed:
            return
        if entry.state == "unfinished" and not (entry.path / "metrics.jsonl").exists():
            return  # Nothing has been recorded to show.
        write_run(entry.path)
    except ValueError as error:
        entry.page_problem = str(error).replace(f"{entry.path}{os.sep}", "")
    except OSError as error:
        # A page is written under another name first.
        read = Path(str(error.filename)).name if error.filename else ""
        what = f"{read} cannot be read" if (entry.path / read).is_file() else "report.html cannot be written"
        entry.page_problem = f"{what}: {error.strerror}"


def _frame(folder: Path, entries: list[Entry], deeper: bool) -> Frame:
    groups = group(entries)
    charts, figures = _charts(groups)
    sound = [entry for entry in entries if entry.problem is None]
    broken = [entry for entry in entries if entry.problem is not None or entry.page_problem is not None]
    lines = []
    if deeper:
        lines.append(
            f"Folders more than {DEPTH} levels down were not looked into. Run lrmoe report on one of them to list it."
        )
    name = printable(folder.resolve().name) or str(folder)
    return Frame(
        kind="Index of runs",
        title=f"{name}: {counted(len(sound), 'run')}",
        lead=_lead(entries, groups),
        head=MARK + _tiles(entries) + notices(lines) + advice(_advice(entries, groups), basis=_BASIS),
        body=_trainings(sound) + charts + _papers(sound) + _problems(broken),
        footer=f"Written by LRMoE from the records below {escape(name)}/. Times are those of each run’s machine.",
        figures=figures,
        scripts=("index.js",),
        styles=("index.css",),
    )


_BASIS = (
    "It follows from the records of the runs below, each read from its summary.json, or from its last logged step "
    "while it is unfinished."
)


def _lead(entries: Sequence[Entry], groups: Sequence[Group]) -> str:
    trained = [entry for entry in entries if entry.is_training and entry.problem is None]
    others = [entry for entry in entries if not entry.is_training and entry.problem is None]
    parts = []
    if trained:
        parts.append(counted(len(trained), "training folder"))
    if others:
        parts.append(counted(len(others), "study or plan") if len(others) == 1 else f"{len(others)} studies and plans")
    said = [f"{' and '.join(parts) or 'No readable run'} in this folder."]
    several = [one for one in groups if len(one.settings) > 1]
    if several:
        said.append(
            f"{counted(len(several), 'set')} of runs trained the same model on the same text for the same steps with "
            "different drops, so their losses can be held against each other."
        )
    elif trained:
        said.append(
            "No two runs with different drops trained the same model on the same text for the same steps with the same "
            "batch and learning rate, so no losses are compared with each other."
        )
    return escape(" ".join(said))


def _tiles(entries: Sequence[Entry]) -> str:
    states = [entry.state for entry in entries if entry.problem is None]
    items = [
        ("Finished", whole(states.count("finished")), "with a summary"),
        ("Unfinished", whole(states.count("unfinished")), "still going on, or stopped"),
        ("Diverged", whole(states.count("diverged")), "a loss was not finite"),
        ("With a problem", whole(len(entries) - len(states)), "cannot be read"),
    ]
    return tiles(items)


def _advice(entries: Sequence[Entry], groups: Sequence[Group]) -> list[str]:
    said = []
    for one in groups:
        if sentences := one.advice():
            said.append(f"{one.kind}: {' '.join(sentences)}")
    unfinished = [entry for entry in entries if entry.state == "unfinished" and entry.problem is None]
    resumable = [entry for entry in unfinished if entry.is_training]
    if resumable:
        verbs = {entry.command for entry in resumable}
        command = f"lrmoe {verbs.pop() if len(verbs) == 1 else 'train or compare'} --resume"
        said.append(f"Let {_names(resumable)} finish, or continue what was stopped with {command}.")
    studies = [entry for entry in unfinished if entry.command == "study"]
    if studies:
        said.append(f"Let {_names(studies)} finish, or give the same command again: it goes on where it stopped.")
    diverged = [entry for entry in entries if entry.state == "diverged"]
    if diverged:
        said.append(f"Do not read losses off {_names(diverged)}: training diverged. Run it again with a lower --lr.")
    guarded = [entry for entry in entries if entry.guarded]
    if guarded:
        said.append(
            f"Look at the guarded layers of {_names(guarded)}: there the guard stopped dropping, so less was left out "
            "than was asked for. A lower drop there would do the same."
        )
    broken = [entry for entry in entries if entry.problem is not None]
    if broken:
        said.append(f"Mend or remove {_names(broken)}: what is wrong with each is listed below.")
    pageless = [entry for entry in entries if entry.page_problem is not None]
    if pageless:
        said.append(
            f"Mend what keeps the page of {_names(pageless)} from being written, as it is listed below, and run lrmoe "
            "report again."
        )
    if not said:
        alone = [entry for entry in entries if entry.results]
        if alone:
            said.append(
                "Run a setting with a drop beside one without, on the same model, text and steps, or let lrmoe compare "
                "do both with several seeds: alone, no run here says what dropping costs."
            )
        else:
            said.append("Open the pages of the runs: nothing here needs attention.")
    return said


def _names(entries: Sequence[Entry]) -> str:
    shown = [printable(entry.name) for entry in entries[:3]]
    more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
    return ", ".join(shown) + more


def _trainings(entries: Sequence[Entry]) -> str:
    rows = [_training_row(entry) for entry in _newest_first(entries) if entry.is_training]
    if not rows:
        return ""
    headings = [
        ("Run", ""),
        ("Verb", "state"),
        ("Steps", "of planned"),
        (_left("Model"), ""),
        (_left("Setting"), ""),
        ("Validation loss", "nats per token"),
        ("Training loss", "last 50 steps, or all"),
        ("Kept pairs", "kept ΣR"),
        ("V*/ΣR", ""),
        ("Guarded layers", ""),
        ("MoE time", "a step"),
        ("Written", "UTC"),
    ]
    note = (
        "Press a heading to sort. A comparison’s losses and time are those of its variant without drop, and below them "
        "the range of the other variants’ differences. Of an unfinished run, what was logged last. MoE time: forward "
        "and backward of all MoE layers in one optimizer step, on the machine of the run."
    )
    return _sortable(table("trainings", headings, rows, title="Training runs", note=note))


def _training_row(entry: Entry) -> list[str]:
    compared = entry.command == "compare" and entry.outcome
    difference = f"<small>{escape(entry.outcome.replace('-', '−'))}</small>" if compared else ""
    done = DASH if entry.done is None else whole(entry.done)
    steps = f"{done}<small>of {whole(entry.planned)}</small>" if entry.planned is not None else done
    importance = entry.kept_importance_share
    held = "" if importance is None else f"<small>{percent(importance, 2)}</small>"
    return [
        _link(entry),
        _state(entry),
        _cell(steps, entry.done),
        _cell(f'<span class="text">{escape(printable(entry.model))}</span>', entry.model),
        _cell(f'<span class="text">{escape(printable(entry.setting))}</span>', entry.setting),
        _cell(fixed(entry.eval_loss, 4) + difference, entry.eval_loss),
        _cell(fixed(entry.train_loss, 4), entry.train_loss),
        _cell(percent(entry.kept_share) + held, entry.kept_share),
        _cell(fixed(entry.variance_share, 4), entry.variance_share),
        _cell(DASH if entry.guarded is None else whole(entry.guarded), entry.guarded),
        _cell(duration(entry.moe_seconds), entry.moe_seconds),
        _when(entry),
    ]


def _papers(entries: Sequence[Entry]) -> str:
    rows = []
    for entry in _newest_first(entries):
        if entry.is_training:
            continue
        rows.append(
            [
                _link(entry),
                _state(entry),
                _cell(f'<span class="text">{escape(printable(entry.model))}</span>', entry.model),
                _cell(f'<span class="text">{escape(printable(entry.setting))}</span>', entry.setting),
                _when(entry),
                f'<span class="text wide">{escape(printable(entry.outcome)) or DASH}</span>',
            ]
        )
    if not rows:
        return ""
    headings = [
        ("Folder", ""),
        ("Verb", "state"),
        (_left("Of"), "model, loads or question"),
        (_left("Policies"), "or study"),
        ("Written", "UTC"),
        (_left("What came of it"), ""),
    ]
    note = "Press a heading to sort. What came of it is told in full on each page."
    return _sortable(table("papers", headings, rows, title="Studies, plans and loads", note=note))


def _problems(entries: Sequence[Entry]) -> str:
    if not entries:
        return ""
    rows = [
        [
            escape(printable(entry.name)),
            f'<span class="text wide">{escape(printable(entry.problem or entry.page_problem or ""))}</span>',
        ]
        for entry in entries
    ]
    note = "They are listed so that nothing is passed over. Everything else on this page is without them."
    return table(
        "problems", [("Folder", ""), (_left("What is wrong"), "")], rows, title="Folders with a problem", note=note
    )


def _charts(groups: Sequence[Group]) -> tuple[str, dict[str, object]]:
    several = [one for one in groups if len(one.settings) > 1]
    figures: dict[str, object] = {}
    parts = []
    for number, one in enumerate(several[:MAX_GROUPS]):
        settings = list(one.settings)
        colours = [(colour, f"{sign} {printable(words)}") for colour, sign, words in key(settings)]
        cards = ""
        left = len(one.entries) - len(one.timed)
        untimed = (
            f" {counted(left, 'folder')} ran with other threads, ranks or versions and has no point here."
            if left == 1
            else f" {left} folders ran with other threads, ranks or versions and have no points here."
            if left
            else ""
        )
        for name, title, reading, figure, empty in (
            (
                f"kept-{number}",
                "Validation loss against kept pairs",
                "A point is one seed of one setting. Hold a step down or up against how far the points of one setting "
                "lie apart: that is the spread of the seeds.",
                against_kept(one),
                "The kept share is not known, or the same in all runs.",
            ),
            (
                f"time-{number}",
                "Validation loss against MoE time",
                "Further left is faster, further down is better; time is the mean of a variant’s seeds where a "
                f"comparison gave it. Times compare only if the runs shared a machine, which no record says.{untimed}",
                against_time(one),
                "The time of the MoE layers was not measured, or is known of one place only.",
            ),
        ):
            if figure is not None:
                figures[name] = figure
            cards += chart(name, title, reading, figure=figure, empty=empty, colours=colours if figure else ())
        parts.append(f'<h3 class="group">{escape(printable(one.kind))}</h3><div class="grid">{cards}</div>')
    if not parts:
        return "", figures
    more = len(several) - MAX_GROUPS
    rest = f" {counted(more, 'smaller set')} of comparable runs not drawn." if more > 0 else ""
    intro = (
        "Losses are drawn together only where model, text, steps, tokens a step, learning rate and everything else but "
        f"the recalibration and the seed are the same.{rest}"
    )
    return f'<h2>Runs that can be compared</h2><p class="intro">{intro}</p>{"".join(parts)}', figures


def link_to(name: str) -> str:
    """A relative address of the page in a folder, percent-encoded: names may hold anything but a slash and zero."""
    return "/".join(quote(os.fsencode(part), safe="") for part in (*name.split("/"), "report.html"))


def printable(text: str) -> str:
    """Control characters, line ends among them, as backslash escapes, so that a name is seen as what it is."""
    return "".join(
        char if char.isprintable() or char == " " else char.encode("unicode_escape").decode("ascii") for char in text
    )


def _link(entry: Entry) -> str:
    shown = escape(printable(entry.name))
    if not (entry.path / "report.html").is_file():
        return shown
    return f'<a href="{escape(link_to(entry.name))}">{shown}</a>'


def _cell(shown: str, value: object) -> str:
    """A cell with what a sort goes by; unknown values go last."""
    told = "" if value is None else repr(value) if isinstance(value, float) else str(value)
    return f'<data value="{escape(told)}">{shown}</data>'


def _state(entry: Entry) -> str:
    mark = {"finished": "yes", "diverged": "no", "unfinished": ""}[entry.state]
    return (
        f'<data value="{entry.command} {entry.state}">{entry.command}<small class="{mark}">{entry.state}</small></data>'
    )


def _left(heading: str) -> str:
    """The heading of a column of words, which stands over their left end."""
    return f'<span class="words">{heading}</span>'


def _when(entry: Entry) -> str:
    moment = datetime.fromtimestamp(entry.changed, tz=timezone.utc)
    return _cell(
        f'<time datetime="{moment:%Y-%m-%dT%H:%M:%SZ}">{moment:%Y-%m-%d}<small>{moment:%H:%M}</small></time>',
        entry.changed,
    )


def _newest_first(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (-entry.changed, entry.name))


def _sortable(text: str) -> str:
    return f'<div class="sortable">{text}</div>'
