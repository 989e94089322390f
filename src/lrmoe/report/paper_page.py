"""The frame that the pages of ``lrmoe plan`` and ``lrmoe pressure`` share: figures, tables, and what they rest on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrmoe.report.charts import Figure
from lrmoe.report.run_folder import read_object
from lrmoe.report.text import escape
from lrmoe.training.files import write_text


@dataclass(frozen=True, kw_only=True)
class Study:
    """``config.json`` and ``summary.json`` of a folder."""

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What goes into the frame. All strings are HTML, but ``eyebrow``.

    Args:
        figures: by the names that :func:`figure_card` was given.
    """

    eyebrow: str
    title: str
    lead: str
    head: str
    body: str
    figures: dict[str, Figure]


def write_page(folder: Path, render: Callable[[Study], Page]) -> Path:
    """Writes ``report.html``.

    Raises:
        ValueError: if a file is missing or damaged; names it, and leaves an old page alone.
    """
    study = Study(path=folder, config=read_object(folder / "config.json"), summary=read_object(folder / "summary.json"))
    try:
        text = _html(study, render(study))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        name = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder / 'summary.json'} is damaged or of another version of lrmoe ({name})") from error
    path = folder / "report.html"
    # Names that the system does not decode come as lone surrogates, which no UTF-8 file can hold.
    write_text(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))
    return path


def facts(items: Sequence[tuple[str, str]]) -> str:
    """A list of terms and values; values are plain text."""
    terms = "".join(f"<div><dt>{term}</dt><dd>{escape(value)}</dd></div>" for term, value in items)
    return f'<dl class="facts">{terms}</dl>'


def notice(items: Sequence[str]) -> str:
    """What a reader must know before the numbers; plain text."""
    entries = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<div class="notice" role="note"><b>Please note</b><ul>{entries}</ul></div>'


def figure_card(name: str, title: str, note: str, key: Sequence[tuple[str, str]] = ()) -> str:
    """A chart of :attr:`Page.figures`; ``key`` says what its colours are."""
    shown = "".join(f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for colour, text in key)
    return (
        f'<section class="card"><h3>{title}</h3><p class="note">{note}</p>'
        f"{f'<p class=key>{shown}</p>' if key else ''}"
        f'<div class="plot" data-figure="{name}" role="img" aria-label="{escape(title)}"></div></section>'
    )


def table_card(
    identity: str,
    headings: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    note: str,
    *,
    level: str = "h2",
    title: str,
    marked: Sequence[int] = (),
) -> str:
    """A table; cells are HTML, the first of a row heads it.

    Args:
        headings: and the unit below each.
        marked: rows that stand out.
    """
    head = "".join(f'<th scope="col">{name}<span class="unit">{unit}</span></th>' for name, unit in headings)
    body = ""
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{cell}</td>" for cell in row[1:])
        mark = ' class="marked"' if number in marked else ""
        body += f'<tr{mark}><th scope="row"><span>{row[0]}</span></th>{cells}</tr>'
    return (
        f'<{level} id="{identity}">{title}</{level}><section class="card"><p class="note">{note}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{identity}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _html(study: Study, page: Page) -> str:
    from plotly.offline import get_plotlyjs

    from lrmoe.report.page import asset, inline_json

    settings = escape(json.dumps(study.config, indent=2, ensure_ascii=False))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{page.title} – LRMoE</title>
<link rel="icon" href="data:,">
<style>{asset("report.css")}{asset("replay.css")}{asset("figures.css")}</style>
</head>
<body>
<header>
<p class="eyebrow">LRMoE · {escape(page.eyebrow)}</p>
<h1>{page.title}</h1>
<p class="lead">{page.lead}</p>
{page.head}
</header>
<main>
<noscript><p class="notice">The charts are drawn by a script inside this file; allow scripts to see them.</p></noscript>
{page.body}
<h2>Settings</h2>
<section class="card"><details><summary>config.json</summary>
<pre tabindex="0">{settings}</pre></details></section>
</main>
<footer>Written by LRMoE from {escape(study.path.resolve().name)}/. Everything here is arithmetic on paper:
planners ran, nothing else did. A row is a token and one of the experts chosen for it.</footer>
<script>{get_plotlyjs()}</script>
<script type="application/json" id="page-data">{inline_json({"figures": page.figures})}</script>
<script>{asset("figures.js")}</script>
</body>
</html>
"""
