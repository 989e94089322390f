"""Draws the overview picture of the README from results of ``lrmoe compare``.

It plots the numbers of the files it is given and nothing else: it trains nothing, fills in nothing, picks nothing.
Each file is a ``summary.json`` of ``lrmoe compare``. Its variants must be named as the defaults are, ``C`` and the drop
in percent and then what to call it (``C0``, ``C20 pps``, ``C30 topq``): a summary holds names and results only.

    python docs/make_figure.py docs/results/scratch.json --label "From scratch" --out docs/images/overview.svg

Left: loss minus that of no drop, one dot a seed and a line at their mean; the band is the spread of no drop, highest
minus lowest seed, to both sides of zero. Right: time of the experts' backward over that of no drop.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from lrmoe import strict_json

WIDTH, MARGIN, ROW, HEAD = 960, 28, 34, 36
LOSS, TIME = (172, 640), (668, 920)  # left and right edge of the two plots; the names stand left of them
INK, MUTED, GRID, BAND, LINE = "#1c2430", "#525c6b", "#e4e8ee", "#eceff4", "#d5dae2"
COLOURS = {"pps": "#0067b1", "topq": "#c8500a", "random": "#00805f", "auto": "#a23b84", "grad_norm": "#8a6d00"}
COLOURS |= {"abs_grad": "#7a2230", "alpha_grad": "#5b4bb7", "forward": "#4f772d"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant: differences to no drop seed by seed (None: not a finite loss), and the ratio of backward times."""

    drop: int
    label: str
    differences: list[float | None]
    ratio: float | None

    @property
    def mean(self) -> float | None:
        known = [value for value in self.differences if value is not None]
        return math.fsum(known) / len(known) if known and len(known) == len(self.differences) else None

    @property
    def colour(self) -> str:
        return next((colour for word, colour in COLOURS.items() if word in re.findall(r"\w+", self.label)), INK)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The variants of one file; ``spread`` is that of its variant without drop, None with one seed."""

    label: str
    spread: float | None
    seeds: int
    variants: list[Variant]


def read_group(path: Path, label: str, loss: str) -> Group:
    """Reads one summary.

    Raises:
        ValueError: if the file is missing, malformed, or has a variant whose name does not tell its drop.
    """
    try:
        summary = strict_json.loads(path.read_text(encoding="utf-8"))
        rows = {row["variant"]: row for row in summary["rows"]}
        base = rows.pop(summary["baseline"])
        spread = base[f"{loss}_spread"]
        spread = spread if spread is not None and math.isfinite(spread) else None
        variants = []
        for name, row in rows.items():
            match = re.fullmatch(r"C(\d+)\s+(.+)", name)
            if match is None:
                raise ValueError(f"{path}: variant {name!r} must be named like 'C20 pps'")
            differences = [v if v is not None and math.isfinite(v) else None for v in row[f"{loss}_differences"]]
            variant = Variant(drop=int(match[1]), label=match[2], differences=differences, ratio=row["backward_ratio"])
            variants.append(variant)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give a summary.json of lrmoe compare") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a summary.json of lrmoe compare ({error} missing)") from None
    if not variants:
        raise ValueError(f"{path} has no variant beside {summary['baseline']!r}; there is nothing to draw")
    variants.sort(key=lambda variant: variant.drop)
    return Group(label=label, spread=spread, seeds=base["seeds"], variants=variants)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values from at most ``low`` to at least ``high``."""
    raw = (high - low) / count
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def signed(value: float, digits: int) -> str:
    text = f"{abs(value):.{digits}f}"
    if float(text) == 0:
        return text
    return f"{'+' if value > 0 else '−'}{text}"


class Canvas:
    """Collects SVG elements."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 14,
        fill: str = INK,
        anchor: str = "start",
        weight: int = 400,
    ) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: str, width: float = 1) -> None:
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width}"/>'
        )

    def rect(self, x: float, y: float, width: float, height: float, *, fill: str, more: str = "") -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{more}/>'
        )

    def dot(self, x: float, y: float, *, fill: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" fill-opacity="0.55"/>')


def draw(groups: list[Group], *, title: str, loss: str) -> str:
    """The picture as SVG, on a white card of its own, so that it reads on a light and on a dark page."""
    tops, y = [], 118
    for group in groups:
        tops.append(y)
        y += HEAD * (len(groups) > 1) + ROW * len(group.variants) + 22
    bottom, height = y - 14, y + 62
    # Wider where a name is long; a letter of this size takes at most about 8 units.
    left = max(LOSS[0], MARGIN + 60 + 8 * max(len(variant.label) for group in groups for variant in group.variants))
    canvas = Canvas()
    canvas.rect(0.5, 0.5, WIDTH - 1, height - 1, fill="#ffffff", more=f' rx="12" stroke="{LINE}"')
    canvas.text(MARGIN, 42, title, size=19, weight=650)
    word = {"eval_loss": "Validation loss", "train_loss": "Training loss"}[loss]
    canvas.text(left, 78, f"{word} minus no drop", weight=600)
    canvas.text(left, 97, "nats per token; lower is better", size=12, fill=MUTED)
    canvas.text(TIME[0], 78, "Expert backward", weight=600)
    canvas.text(TIME[0], 97, "time over no drop; lower is better", size=12, fill=MUTED)

    shown = [v for g in groups for variant in g.variants for v in variant.differences if v is not None]
    shown += [s * g.spread for g in groups if g.spread is not None for s in (-1, 1)]
    # Room to the right for the number beside the highest row.
    low, high = min([0.0, *shown]), max([0.0, *shown])
    scale = ticks(low, high if high > low else low + 0.01)

    def loss_x(value: float) -> float:
        return left + (value - scale[0]) / (scale[-1] - scale[0]) * (LOSS[1] - 52 - left)

    slowest = max([1.0, *(v.ratio for g in groups for v in g.variants if v.ratio is not None)])

    def time_x(value: float) -> float:
        return TIME[0] + value / slowest * (TIME[1] - TIME[0])

    digits = max(2, -math.floor(math.log10(scale[1] - scale[0]) + 1e-9))
    for tick in scale:
        canvas.text(loss_x(tick), bottom + 18, signed(tick, digits), size=12, fill=MUTED, anchor="middle")
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        canvas.text(time_x(tick), bottom + 18, f"{tick:g}", size=12, fill=MUTED, anchor="middle")
    for group, top in zip(groups, tops, strict=True):
        if len(groups) > 1:
            canvas.text(MARGIN, top + 16, group.label, weight=600)
            top += HEAD
        end = top + ROW * len(group.variants)
        if group.spread is not None:
            width = loss_x(group.spread) - loss_x(-group.spread)
            canvas.rect(loss_x(-group.spread), top - 6, width, end - top + 12, fill=BAND)
        for x, is_reference in [(loss_x(t), t == 0) for t in scale] + [(time_x(t / 4), t == 4) for t in range(5)]:
            canvas.line(x, top - 6, x, end + 6, stroke="#8791a1" if is_reference else GRID)
        _draw_rows(canvas, group, top, loss_x, time_x)

    banded = any(group.spread is not None for group in groups)
    if banded:
        canvas.rect(MARGIN, height - 35, 22, 12, fill=BAND, more=f' stroke="{LINE}"')
    canvas.text(MARGIN + 30 * banded, height - 25, _legend(groups), size=12, fill=MUTED)
    body = "\n".join(canvas.parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-labelledby="title desc" font-family="{FONT}">\n<title id="title">{escape(title)}</title>\n'
        f'<desc id="desc">{escape(_description(groups, word))}</desc>\n{body}\n</svg>\n'
    )


Position = Callable[[float], float]


def _draw_rows(canvas: Canvas, group: Group, top: float, loss_x: Position, time_x: Position) -> None:
    for i, variant in enumerate(group.variants):
        middle = top + ROW * i + ROW / 2
        canvas.text(MARGIN, middle + 5, f"{variant.label} {variant.drop} %")
        known = [value for value in variant.differences if value is not None]
        for value in known:
            canvas.dot(loss_x(value), middle, fill=variant.colour)
        if variant.mean is None:
            after = loss_x(max(known, default=0.0)) + 12
            canvas.text(after, middle + 5, "not finite for some seed", size=13, fill=variant.colour, weight=600)
        else:
            x = loss_x(variant.mean)
            canvas.line(x, middle - 10, x, middle + 10, stroke=variant.colour, width=2.5)
            after = loss_x(max(known)) + 12
            canvas.text(after, middle + 5, signed(variant.mean, 3), size=13, fill=variant.colour, weight=600)
        if variant.ratio is None:
            canvas.text(TIME[0] + 6, middle + 5, "not measured", size=13, fill=MUTED)
        else:
            end = time_x(variant.ratio)
            canvas.rect(TIME[0], middle - 10, end - TIME[0], 20, fill=variant.colour, more=' rx="2"')
            canvas.text(
                end - 8, middle + 5, f"{variant.ratio:.2f} ×", size=13, fill="#ffffff", anchor="end", weight=600
            )


def _legend(groups: list[Group]) -> str:
    seeds = " and ".join(dict.fromkeys(f"{group.seeds} seed{'s' * (group.seeds != 1)}" for group in groups))
    spreads = [f"{group.spread:.3f}" for group in groups if group.spread is not None]
    band = f"band: seed spread of no drop (± {', ± '.join(spreads)})" if spreads else "no spread of no drop is known"
    return f"Dot: a seed ({seeds}), same start and same data as no drop; line: their mean; {band}"


def _description(groups: list[Group], word: str) -> str:
    lines = []
    for group in groups:
        for variant in group.variants:
            mean = "not finite" if variant.mean is None else f"{signed(variant.mean, 3)} nats"
            ratio = "not measured" if variant.ratio is None else f"{variant.ratio:.2f} times"
            lines.append(f"{group.label}, {variant.label} {variant.drop} %: {word.lower()} {mean}, backward {ratio}.")
    return " ".join(lines)


def write(path: Path, text: str) -> None:
    """Replaces the file in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the overview picture from results of lrmoe compare.")
    parser.add_argument("results", type=Path, nargs="+", help="summary.json files of lrmoe compare")
    parser.add_argument("--label", action="append", help="heading of a file, once for each file; default: its name")
    parser.add_argument("--title", default="What dropping backward pairs costs and saves")
    parser.add_argument("--loss", choices=("eval_loss", "train_loss"), default="eval_loss")
    parser.add_argument("--out", type=Path, default=Path("docs/images/overview.svg"))
    given = parser.parse_args(arguments)
    labels = given.label or [path.stem for path in given.results]
    try:
        if len(labels) != len(given.results):
            raise ValueError(f"{len(labels)} labels for {len(given.results)} files; give --label once for each file")
        groups = [read_group(path, label, given.loss) for path, label in zip(given.results, labels, strict=True)]
        write(given.out, draw(groups, title=given.title, loss=given.loss))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(given.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
