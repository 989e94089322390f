"""What the parts of a report share: the run with how it is shown, and the HTML of a card, a legend and a swatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lrmoe.report.comparison import Row
from lrmoe.report.frame import chart
from lrmoe.report.palette import paint
from lrmoe.report.run_folder import Run
from lrmoe.report.text import escape
from lrmoe.report.variants import Look


@dataclass(kw_only=True, slots=True)
class Page:
    """What is being written: the run, how its variants look, and what the script of the page gets."""

    run: Run
    baseline: str | None
    looks: dict[str, Look]
    rows: list[Row]
    figures: dict[str, Any] = field(default_factory=dict)
    loads: list[dict[str, Any]] = field(default_factory=list)

    @property
    def many(self) -> bool:
        """Whether there are variants to tell apart."""
        return len(self.run.variants) > 1

    @property
    def seeds(self) -> int:
        return len({training.seed for training in self.run.trainings})

    @property
    def base(self) -> Row | None:
        """The baseline's row."""
        return next((row for row in self.rows if row.variant == self.baseline), None)

    @property
    def settings(self) -> dict[str, Any]:
        """What all trainings share: the values of ``config.json`` in one level, its text's description among them."""
        config = self.run.config
        train = config.get("train")
        train = train if isinstance(train, dict) else config
        parts = (train.get("recalibration"), config.get("corpus"), train, config)
        return {
            key: value for part in parts if isinstance(part, dict) for key, value in part.items() if value is not None
        }

    def whole(self, key: str) -> int | None:
        """An integer of the settings, or None."""
        value = self.settings.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def memorizes(self) -> bool:
        """Whether validation is on the training text, by intent."""
        return self.settings.get("validation_is_training") is True


def swatch(look: Look) -> str:
    """A short sample of a variant's line. Colours and dashes are ours, nothing of the user's is in here."""
    pattern = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4"}[look.dash]
    return (
        '<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><line x1="1" y1="5" x2="25" y2="5" '
        f'stroke-width="3" stroke="{paint(look.colour)}" stroke-dasharray="{pattern}"/>'
        "</svg>"
    )


def legend(page: Page) -> str:
    """Buttons that show and hide a variant in every chart."""
    if not page.many:
        return ""
    buttons = "".join(
        f'<button type="button" data-variant="{position}" aria-pressed="true" title="{escape(variant)}">'
        f"{swatch(page.looks[variant])}<b>{escape(variant)}</b></button>"
        for position, variant in enumerate(page.run.variants)
    )
    return f'<nav class="legend" aria-label="Variants shown in the charts"><span>Show</span>{buttons}</nav>'


def card(
    page: Page,
    name: str,
    title: str,
    reading: str,
    figure: object,
    empty: str,
    *,
    colours: Sequence[tuple[str, str]] = (),
    wide: bool = False,
) -> str:
    """:func:`lrmoe.report.frame.chart`, its figure put into the page."""
    choices = figure if isinstance(figure, list) else [figure]
    if any(one is not None for one in choices):
        page.figures[name] = figure
    return chart(name, title, reading, figure=figure, empty=empty, colours=colours, wide=wide)
