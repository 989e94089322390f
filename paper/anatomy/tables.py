"""The anatomy study's records as tables and figures.

Ratios are of sums: over the layers and weights a row is about, and over the batches of a cell. Rows are means over
seeds; beside every value ``x`` stand ``x_low`` and ``x_high``, the seeds' extremes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lrmoe.studies.regimes import regime
from lrmoe.studies.results import Column, Figure, Series, StudyResult, Table
from lrmoe.studies.study_config import StudyConfig
from paper.anatomy.conclusions import conclude
from paper.anatomy.probe import Record

Row = dict[str, Any]
EXPERTS = ("down", "gate_up")
QUESTION = (
    "What is in the pairs that are left out, how far is the gradient without them from the exact one, and does that "
    "error average out over batches?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A cell: what :func:`~paper.anatomy.probe.probe` gave after ``step`` steps of a run."""

    regime: str
    title: str
    seed: int
    step: int
    record: Record


def values(
    record: Record,
    *,
    variant: str,
    rate: float,
    router_grad: str = "sum_rule",
    layer: int | None = None,
    weights: Sequence[str] = EXPERTS,
) -> dict[str, float | None]:
    """What one cell says of a setting.

    Args:
        layer: of this layer; None: of all together.
        weights: whose errors.

    Returns:
        ``loss``; of the down projection, with each layer dropping alone (missing where it was not measured): ``tail``
        the dropped share of sum R, ``coherence`` ||sum of dropped||^2 / dropped sum R, ``variance`` V*/sum R,
        ``alignment`` sum R / ||S||^2, ``alone`` ||Shat - S||^2 / ||S||^2, ``alone_variance`` ||Shat - S||^2 / sum R;
        of ``weights``, with all layers dropping: ``one`` and ``mean``, the relative squared error of a batch and of the
        batches' mean, ``noise`` what batches differ by, relative to their mean's square, ``systematic`` the share of a
        batch's squared error that all batches have in common (estimated without bias, hence at times below 0), and
        ``crossing``, over how many batches one has to average until the error in common is as large as what is left
        of the noise (None where there is none in common).
    """
    asked = {"variant": variant, "rate": rate, "router_grad": router_grad}
    found: dict[str, float | None] = {"loss": record["loss"]}
    alone = _sums(record["alone"], asked, layer)
    if alone:
        found["tail"] = _ratio(alone["dropped_importance"], alone["importance"])
        found["coherence"] = _ratio(alone["dropped_sum"], alone["dropped_importance"])
        found["variance"] = _ratio(alone["variance"], alone["importance"])
        found["alignment"] = _ratio(alone["importance"], alone["gradient"])
        found["alone"] = _ratio(alone["error"], alone["gradient"])
        found["alone_variance"] = _ratio(alone["error"], alone["importance"])
    exact = [_sums(record["exact"], {"weight": weight}, layer) for weight in weights]
    errors = [_sums(record["errors"], {**asked, "weight": weight}, layer) for weight in weights]
    total = {key: sum(part[key] for part in (*exact, *errors) if key in part) for key in _TERMS}
    batches = record["batches"]
    common = (batches * total["mean"] - total["one"]) / (batches - 1)
    found["one"] = _ratio(total["one"], total["gradient"])
    found["mean"] = _ratio(total["mean"], total["mean_gradient"])
    found["noise"] = _ratio(total["noise"], total["mean_gradient"])
    found["systematic"] = _ratio(common, total["one"])
    found["crossing"] = total["noise"] / common if common > 0 else None
    return found


_TERMS = ("gradient", "mean_gradient", "noise", "one", "mean")


def _sums(records: Iterable[Record], asked: Mapping[str, Any], layer: int | None) -> dict[str, float]:
    """Sums of the numbers of all records that answer to ``asked``."""
    sums: dict[str, float] = {}
    for record in records:
        if all(record[key] == value for key, value in asked.items()) and layer in (None, record["layer"]):
            for key, value in record.items():
                if isinstance(value, float) and key not in asked:
                    sums[key] = sums.get(key, 0.0) + value
    return sums


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def over_seeds(cells: Sequence[Measured], **asked: Any) -> Row:
    """Mean, lowest and highest of :func:`values` over cells that differ in their seed."""
    each = [values(cell.record, **asked) for cell in cells]
    row: Row = {}
    for key in each[0]:
        known = [value for one in each if (value := one.get(key)) is not None]
        row[key] = sum(known) / len(known) if len(known) == len(each) else None
        row[f"{key}_low"], row[f"{key}_high"] = min(known, default=None), max(known, default=None)
    return row


def make_result(
    study: StudyConfig, measured: Sequence[Measured], *, rates: Sequence[float], batches: int, provenance: Row
) -> StudyResult:
    """The study's result from its cells."""
    data = _Data(study, measured, rates, batches)
    tables = [data.pairs(), data.errors(), data.rates_table(), data.layers(), data.router()]
    rows = {table.name: table.rows for table in tables}
    conclusions, advice = conclude(rows, rate=rates[0], batches=batches, seeds=len(study.seeds))
    return StudyResult(
        study="anatomy",
        title="Anatomy of a drop",
        question=QUESTION,
        tables=[table for table in tables if table.rows],
        figures=data.figures(),
        conclusions=conclusions,
        advice=advice,
        provenance=provenance,
    )


class _Data:
    """The cells, asked for tables and figures."""

    def __init__(self, study: StudyConfig, measured: Sequence[Measured], rates: Sequence[float], batches: int) -> None:
        self._study = study
        self._rates = rates
        self._rate = rates[0]
        self._batches = batches
        self._places: dict[tuple[str, str], dict[int, list[Measured]]] = {}
        for cell in measured:
            self._places.setdefault((cell.regime, cell.title), {}).setdefault(cell.step, []).append(cell)
        record = measured[0].record
        self._settings = [
            dict(key) for key in dict.fromkeys(tuple((k, e[k]) for k in _SETTING) for e in record["errors"])
        ]
        self._variants = list(dict.fromkeys(one["variant"] for one in self._settings))
        self._layers = sorted({one["layer"] for one in record["exact"]})

    def _at(self, *, last: bool = False) -> list[tuple[Row, list[Measured]]]:
        """Each regime and step, or each regime's last step, with its cells."""
        return [
            ({"regime": name, "title": title, "step": step}, steps[step])
            for (name, title), steps in self._places.items()
            for step in (sorted(steps)[-1:] if last else sorted(steps))
        ]

    def _known(self, variant: str, rate: float) -> bool:
        return any(one["variant"] == variant and one["rate"] == rate for one in self._settings)

    def _by_variant(self) -> list[Row]:
        """A row for each place and each variant that was measured at the first rate."""
        return [
            {**place, "variant": variant, **over_seeds(cells, variant=variant, rate=self._rate)}
            for place, cells in self._at()
            for variant in self._variants
            if self._known(variant, self._rate)
        ]

    def pairs(self) -> Table:
        return Table(
            name="pairs",
            title=f"What is dropped at {self._rate:.0%}, layer by layer: importance, coherence, variance",
            settings=self._shared(),
            columns=(*_PLACE, _VARIANT, *_PAIRS),
            rows=self._by_variant(),
            note="Down projections, each layer dropping alone, so that the gradient arriving at it is exact; all "
            "layers together, means over batches and seeds. For a variant that keeps pairs with weight 1 the last "
            "column is the product of dropped ΣR, coherence and ΣR/‖S‖². V* depends on the quotas alone, so all "
            "variants have the same. Coherence is 1 where contributions are orthogonal and grows with what they have "
            "in common.",
        )

    def errors(self) -> Table:
        return Table(
            name="errors",
            title=f"Error of the experts' gradients at {self._rate:.0%}: of one batch, and of the mean of "
            f"{self._batches}",
            settings=self._shared(),
            columns=(*_PLACE, _VARIANT, *_error_columns(self._batches)),
            rows=self._by_variant(),
            note="All layers drop at once, as in training; all weights of the experts together. Squared errors, "
            "relative to the squared exact gradient. What differs from batch to batch falls to "
            f"1/{self._batches} in the mean; what is the same in every batch stays, and is told as a share of the "
            "squared error. An estimate of it may come out a little below 0.",
        )

    def rates_table(self) -> Table:
        rows = []
        for place, cells in self._at(last=True):
            for variant in self._variants:
                for rate in self._rates:
                    if self._known(variant, rate):
                        about = {"variant": variant, "rate": rate}
                        rows.append({**place, **about, **over_seeds(cells, **about)})
        return Table(
            name="rates",
            title="By rate, at the end of each regime",
            settings=self._shared(),
            columns=(*_PLACE, _VARIANT, _RATE, *_PAIRS[:3], *_error_columns(self._batches)[:4]),
            rows=rows,
            note="The columns are those of the tables above.",
        )

    def layers(self) -> Table:
        rows = []
        for place, cells in self._at():
            for layer in self._layers:
                for variant in self._variants:
                    if variant in ("topq", "pps") and self._known(variant, self._rate):
                        asked = {"variant": variant, "rate": self._rate, "layer": layer}
                        found = over_seeds(cells, **asked, weights=("down",))
                        # Both with the same denominator.
                        found["amplified"] = _ratio(found["one"], found["alone"]) if found.get("alone") else None
                        rows.append({**place, "layer": layer, "variant": variant, **found})
        return Table(
            name="layers",
            title=f"By layer at {self._rate:.0%}",
            settings=self._shared(),
            columns=(*_PLACE, Column(key="layer", label="MoE layer", form="integer"), _VARIANT, *_PAIRS[:5], *_LAYER),
            rows=rows,
            note="Down projections. A layer's error when all drop also holds what the layers above it add to the "
            "gradient that arrives; the last layer has none above it.",
        )

    def router(self) -> Table:
        rows = []
        for place, cells in self._at():
            for one in self._settings:
                kinds = [s for s in self._settings if (s["variant"], s["rate"]) == (one["variant"], one["rate"])]
                if len(kinds) > 1:
                    rows.append({**place, **one, **over_seeds(cells, **one, weights=("router",))})
        return Table(
            name="router",
            title="Error of the router's gradient, by what dropped pairs are given",
            settings=self._shared(),
            columns=(
                *_PLACE,
                _VARIANT,
                _RATE,
                Column(key="router_grad", label="router_grad", form="text"),
                *_error_columns(self._batches),
            ),
            rows=rows,
            note="All layers drop at once; routers of all layers together. Even with `exact` an error is left in the "
            "layers below the last: the gradient that arrives there has passed through layers that drop. The balancing "
            "loss, which no drop touches, is part of the exact gradient.",
        )

    def figures(self) -> list[Figure]:
        figures = []
        for (name, title), steps in self._places.items():
            order = sorted(steps)

            def line(label: str, key: str, steps: Any = steps, order: Any = order, **asked: Any) -> Series:
                rows = [over_seeds(steps[step], rate=self._rate, **asked) for step in order]
                ends = {end: [row[f"{key}_{end}"] for row in rows] for end in ("low", "high")}
                return Series(name=label, x=order, y=[row[key] for row in rows], low=ends["low"], high=ends["high"])

            variants = [v for v in self._variants if self._known(v, self._rate)]
            plain = [v for v in ("topq", "pps", "random") if v in variants]
            figures.append(
                Figure(
                    name=f"variance-{name}",
                    title=f"{title}: V*/ΣR by layer, {self._rate:.0%} dropped",
                    reading="The least variance that an unbiased choice of the pairs adds to a layer's gradient, in "
                    "units of ΣR. The lower, the less of the gradient hangs on the draw. Bars reach over the seeds.",
                    x_label="optimizer steps",
                    y_label="V*/ΣR",
                    series=[
                        line(f"layer {layer}", "variance", variant=variants[0], layer=layer) for layer in self._layers
                    ],
                )
            )
            coherent = [
                line(f"{variant}, layer {layer}", "coherence", variant=variant, layer=layer)
                for variant in ("topq", "random")
                if variant in variants
                for layer in self._layers
            ]
            if coherent:
                figures.append(
                    Figure(
                        name=f"coherence-{name}",
                        title=f"{title}: coherence of the dropped pairs by layer, {self._rate:.0%} dropped",
                        reading="How much larger the square of the dropped pairs' sum is than if their contributions "
                        "were orthogonal (1). Random pairs show what any pairs have in common.",
                        x_label="optimizer steps",
                        y_label="‖sum of dropped‖² / dropped ΣR",
                        series=coherent,
                    )
                )
            noise = line("noise between batches", "noise", variant=variants[0])
            figures.append(
                Figure(
                    name=f"errors-{name}",
                    title=f"{title}: error of one batch and of the mean of {self._batches}, {self._rate:.0%} dropped",
                    reading=f"An unbiased choice falls to 1/{self._batches} from one batch to the mean; a biased one "
                    "stays. Beside them, what exact batches differ by among themselves. Logarithmic.",
                    x_label="optimizer steps",
                    y_label="squared error of the experts' gradients, relative",
                    series=[
                        *(line(f"{v}, one batch", "one", variant=v) for v in plain),
                        *(line(f"{v}, mean of {self._batches}", "mean", variant=v) for v in plain),
                        noise,
                    ],
                    log_y=True,
                )
            )
        return figures

    def _shared(self) -> Row:
        shared: Row = {"batches a probe": self._batches}
        for name, _ in self._places:
            about = regime(name, self._study)
            shared |= {
                key if key in _COMMON else f"{key}, {about.title.lower()}": v for key, v in about.settings.items()
            }
        return shared


_COMMON = ("model", "sequences a step", "seeds")
_SETTING = ("variant", "rate", "router_grad")
_PLACE = (
    Column(key="title", label="regime", form="text"),
    Column(key="step", label="step", form="integer", meaning="optimizer steps of the regime's own run"),
    Column(
        key="loss", label="loss, nats a token", form="3", meaning="of the probe's batches, which it did not train on"
    ),
)
_VARIANT = Column(key="variant", label="variant", form="text")
_RATE = Column(key="rate", label="dropped pairs", form="percent")
_PAIRS = (
    Column(key="tail", label="dropped ΣR", form="percent", meaning="share of the importance that is dropped"),
    Column(key="coherence", label="coherence", form="2", meaning="‖sum of dropped‖² / dropped ΣR"),
    Column(key="variance", label="V*/ΣR", form="4", meaning="least variance of an unbiased choice, over ΣR"),
    Column(key="alignment", label="ΣR/‖S‖²", form="4", meaning="small where the pairs' contributions point one way"),
    Column(key="alone", label="‖E‖²/‖S‖²", form="4", meaning="squared error of the layer's gradient, relative"),
)
_LAYER = (
    Column(key="one", label="‖E‖²/‖S‖², all layers drop", form="4", meaning="the same with every layer dropping"),
    Column(key="amplified", label="of them to alone", form="ratio", meaning="what the layers above add"),
)


def _error_columns(batches: int) -> tuple[Column, ...]:
    return (
        Column(key="one", label="error, one batch", form="4", meaning="‖Ĝ - G‖² / ‖G‖², mean over batches"),
        Column(key="mean", label=f"error, mean of {batches}", form="4", meaning="the same of the batches' mean"),
        Column(key="noise", label="noise of a batch", form="4", meaning="E‖G - mean G‖² / ‖mean G‖², nothing dropped"),
        Column(key="systematic", label="error in common", form="percent", meaning="share that does not average out"),
        Column(
            key="crossing",
            label="batches until bias = noise",
            form="2",
            meaning="averaged over more batches than this, the error in common exceeds the noise that is left",
        ),
    )
