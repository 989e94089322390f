"""The one frame of every page: head, header, tiles, notices, cards with a chart and how to read it, advice, settings.

A page is one self-contained HTML file. A builder fills a :class:`Frame` with HTML made by the functions here and with
figures as plotly reads them, and :func:`document` puts styles, plotly and the script that draws them around it.
Strings that came from a user are plain text in every argument that does not say HTML, and are escaped here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from lrmoe import strict_json
from lrmoe.report import palette
from lrmoe.report.palette import paint
from lrmoe.report.text import escape
from lrmoe.training.files import write_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What goes into a page.

    Args:
        kind: what sort of page, as its eyebrow; plain text.
        title: plain text.
        lead: the result in a few sentences, HTML.
        head: facts, notices and tiles, HTML.
        body: HTML.
        footer: HTML.
        settings: of the run, shown at the end of the page as JSON; None for none.
        figures: by the names that the cards have; a list where a control chooses one of several (None: has none).
        data: what else the page's scripts read; JSON-able, no NaN inside. Its names must not be ``figures`` or
            ``night``.
        scripts, styles: files of ``assets/`` beside the frame's own, in order.
    """

    kind: str
    title: str
    lead: str
    head: str = ""
    body: str
    footer: str = ""
    settings: object | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    scripts: Sequence[str] = ()
    styles: Sequence[str] = ()


def document(frame: Frame) -> str:
    """The page, as HTML. Needs plotly, which is left out where there are no figures and no scripts."""
    if frame.figures or frame.scripts:
        from plotly.offline import get_plotlyjs

        plotly = f"<script>{get_plotlyjs()}</script>\n"
    else:
        plotly = ""
    data = {"figures": frame.figures, "night": palette.NIGHT, **frame.data}
    styles = "".join(map(asset, ("report.css", *frame.styles)))
    scripts = f"<script>{''.join(map(asset, ('frame.js', *frame.scripts)))}</script>\n" if plotly else ""
    blind = '<noscript><p class="notice">The charts are drawn by a script inside this file; allow scripts to see them.'
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(frame.title)} – LRMoE {escape(frame.kind.lower())}</title>
<link rel="icon" href="data:,">
<style>{palette.variables()}{styles}</style>
</head>
<body>
<header>
<p class="eyebrow">LRMoE · {escape(frame.kind)}</p>
<h1>{escape(frame.title)}</h1>
<p class="lead">{frame.lead}</p>
{frame.head}
</header>
<main>
{f"{blind}</p></noscript>" if plotly else ""}
{frame.body}
{settings(frame.settings)}
</main>
<footer>{frame.footer}</footer>
{plotly}<script type="application/json" id="page-data">{inline_json(data)}</script>
{scripts}</body>
</html>
"""


def write_page(path: Path, frame: Frame) -> Path:
    """Writes :func:`document` in one move: whoever has the page open never sees half of it, and a failure leaves the
    old one."""
    write_text(path, document(frame))
    return path


def asset(name: str) -> str:
    """A file of ``assets/``."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def inline_json(value: object) -> str:
    """JSON that cannot end the script element it stands in, without NaN, which browsers do not read: a number that is
    not finite is null there, a gap in a figure."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        with_gaps = json.loads(json.dumps(value), parse_constant=lambda _: None)
        text = json.dumps(with_gaps, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def facts(items: Sequence[tuple[str, str]]) -> str:
    """A list of terms and values; plain text."""
    terms = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(value)}</dd></div>" for term, value in items)
    return f'<dl class="facts">{terms}</dl>' if terms else ""


def tiles(items: Sequence[tuple[str, str, str]]) -> str:
    """A few large numbers: label, value and what it is, in plain text."""
    cards = "".join(
        f'<div class="card"><p class="label">{escape(label)}</p><p class="value">{escape(value)}</p>'
        f'<p class="detail">{escape(detail)}</p></div>'
        for label, value, detail in items
    )
    return f'<div class="tiles">{cards}</div>' if cards else ""


def notices(items: Sequence[str]) -> str:
    """What a reader must know before the numbers; plain text. Nothing where there is nothing to say."""
    entries = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<div class="notice" role="note"><b>Please note</b><ul>{entries}</ul></div>' if entries else ""


def advice(items: Sequence[str], *, title: str = "What you should do", basis: str = "") -> str:
    """The box of sentences that follow from the numbers; plain text.

    Args:
        basis: a sentence on what the advice rests on.
    """
    entries = "".join(f"<li>{escape(item)}</li>" for item in items)
    small = f'<p class="note">{escape(basis)}</p>' if basis else ""
    return f'<section class="advice"><h2 id="advice">{escape(title)}</h2><ul>{entries}</ul>{small}</section>'


def key(entries: Sequence[tuple[str, str]]) -> str:
    """What the colours of a chart say, (colour, plain text) each: a legend of plotly's own would take the chart's room
    on a narrow screen."""
    shown = "".join(
        f'<span><i style="background:{paint(colour)}"></i>{escape(name)}</span>' for colour, name in entries
    )
    return f'<p class="key">{shown}</p>' if shown else ""


def bars(items: Sequence[tuple[str, str, float]], colour: str) -> str:
    """Horizontal bars with their words above them, which long words do not squeeze on a phone.

    Args:
        items: name, what is written of it, and its length, >= 0; plain text.
        colour: of the palette.
    """
    longest = max((length for *_, length in items), default=0.0) or 1.0
    rows = "".join(
        f"<li><span>{escape(name)}</span><b>{escape(word)}</b>"
        f'<i style="width:{100 * length / longest:.2f}%;background:{paint(colour)}"></i></li>'
        for name, word, length in items
    )
    return f'<ul class="bars">{rows}</ul>'


def chart(
    name: str,
    title: str,
    reading: str,
    *,
    figure: object,
    empty: str = "Nothing was logged for this chart.",
    colours: Sequence[tuple[str, str]] = (),
    wide: bool = False,
) -> str:
    """A card with a chart, and under it the sentence that says how to read it.

    Args:
        name: of the figure in :attr:`Frame.figures`; letters, digits, dashes and underscores.
        title, reading, empty: plain text.
        figure: what will be drawn, or a list of choices; where it is None (or all choices are), ``empty`` stands there.
        colours: of a :func:`key` above the chart.
        wide: over both columns of a grid.
    """
    choices = figure if isinstance(figure, list) else [figure]
    drawn = any(one is not None for one in choices)
    # Where only some choices have a figure the script shows one or the other.
    hidden = " hidden" if choices and choices[0] is not None else ""
    missing = "" if drawn and len(choices) == 1 else f'<p class="empty"{hidden}>{escape(empty)}</p>'
    plot = ""
    if drawn:
        label = escape(f"{title}. {reading}")
        plot = f'{key(colours)}<div class="plot" data-figure="{name}" role="img" aria-label="{label}"></div>'
    return (
        f'<section class="card{" wide" if wide else ""}"><h3>{escape(title)}</h3>{plot}{missing}'
        f'<p class="reading">{escape(reading)}</p></section>'
    )


def table(
    identity: str,
    headings: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    *,
    title: str,
    note: str = "",
    level: str = "h2",
    marked: Sequence[int] = (),
) -> str:
    """A card with a table that scrolls sideways where it must; the first cell of a row heads it.

    Args:
        headings: and the unit below each; HTML.
        rows: cells, HTML.
        title: plain text; ``note``: HTML, above the table.
        marked: rows that stand out.
    """
    head = "".join(
        f'<th scope="col">{name}{f"<span class=unit>{unit}</span>" if unit else ""}</th>' for name, unit in headings
    )
    body = ""
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{cell}</td>" for cell in row[1:])
        mark = ' class="marked"' if number in marked else ""
        body += f'<tr{mark}><th scope="row"><span>{row[0]}</span></th>{cells}</tr>'
    return (
        f'<{level} id="{identity}">{escape(title)}</{level}><section class="card">'
        f"{f'<p class=note>{note}</p>' if note else ''}"
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{identity}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def settings(value: object | None) -> str:
    """A folded ``config.json``."""
    if value is None:
        return ""
    text = escape(strict_json.dumps(value, indent=2, ensure_ascii=False))
    return (
        '<h2>Settings</h2><section class="card"><details><summary>config.json</summary>'
        f'<pre tabindex="0">{text}</pre></details></section>'
    )
