"""What the records of one training run say, as plain numbers: the ground that the advice and the charts stand on."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from lrmoe.config import LRMoEConfig
from lrmoe.report.run_folder import GuardEvent, Training
from lrmoe.report.text import short_layer_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """What dropping may cost a layer: the field of the config that says so, its value, and whether the guard of the run
    held layers to it (else the value is the default's, as a yardstick). ``column`` is what is measured."""

    field: str
    column: str
    value: float
    in_force: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Excess:
    """One layer above the limit: at which of the logged steps at which it dropped, the largest value and its step, and
    the value at the last of them."""

    layer: str
    steps: list[int]
    worst: float
    worst_step: int
    last: float

    @property
    def first_step(self) -> int:
        return self.steps[0]

    @property
    def last_step(self) -> int:
        return self.steps[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Median milliseconds of one optimizer step; ``validated`` if they contain validations, where all lines do."""

    forward: float
    backward: float
    rest: float
    validated: bool

    @property
    def whole(self) -> float:
        return self.forward + self.backward + self.rest


@dataclass(kw_only=True, slots=True)
class Evidence:
    """A training run. Shares are in [0, 1]; series are (step, value) pairs without what is not finite.

    ``worst`` is the largest cost of a layer that dropped: its step, the layer and the value; ``last_cost_step`` the
    last logged step at which some layer dropped and told its cost.
    """

    last_step: int
    finished: bool
    selector: str
    warmup_steps: int
    ranks: int
    policy: str
    limit: Limit
    layers: int
    drop: float
    kept_share: float | None
    kept_importance: list[tuple[int, float]]
    variance: list[tuple[int, float]]
    worst: tuple[int, str, float] | None
    excess: list[Excess]
    last_cost_step: int
    events: list[GuardEvent]
    guarded: list[str]
    load: list[tuple[int, float]]
    busiest: tuple[str, float] | None
    loss: list[tuple[int, float]]
    eval_loss: list[tuple[int, float]]
    not_finite: int | None
    time: StepTime | None
    parallel: dict[str, float] = field(default_factory=dict)


def gather(training: Training, settings: dict[str, Any], *, finished: bool) -> Evidence:
    """The evidence of a training.

    Args:
        settings: of ``config.json`` in one level; what is not there has the library's default.
        finished: whether ``summary.json`` is there.
    """
    names = training.layer_names
    short = dict(zip(names, short_layer_names(names), strict=True))
    limit = limit_of(settings)
    dropped = [point for point in training.points if point.values.get("drop", 0.0) > 0.0]
    excess, worst, last_cost = [], None, 0
    for name in names:
        # A layer that kept every pair, as one that its guard holds does, says nothing of what a drop would cost it.
        some = [p for p in dropped if name in p.layers and p.layers[name].values.get("kept_share", 0.0) < 1.0]
        costs = [(p.step, _cost(p.layers[name].values, limit)) for p in some]
        found = [(step, value) for step, value in costs if value is not None]
        if found:
            last_cost = max(last_cost, found[-1][0])
            step, value = max(found, key=lambda pair: pair[1])
            worst = (step, short[name], value) if worst is None or value > worst[2] else worst
            over = [at for at, cost in found if cost > limit.value]
            if over:
                last = found[-1][1]
                excess.append(Excess(layer=short[name], steps=over, worst=value, worst_step=step, last=last))
    newest = next((p for p in reversed(training.points) if p.layers), None)
    loads = (
        [] if newest is None else [(short[n], v) for n, layer in newest.layers.items() if (v := _load(layer.values))]
    )
    loss = training.series("loss"), training.series("eval_loss")
    bad = [
        step for steps, values in loss for step, value in zip(steps, values, strict=True) if not math.isfinite(value)
    ]
    return Evidence(
        last_step=training.points[-1].step if training.points else 0,
        finished=finished,
        selector=str(settings.get("selector", "pps")),
        warmup_steps=_whole(settings.get("warmup_steps"), 0),
        ranks=_whole(settings.get("ep"), 1),
        policy=str(settings.get("policy", "")),
        limit=limit,
        layers=len(names),
        drop=max((value for value in training.series("drop")[1]), default=0.0),
        kept_share=_mean(training, "kept_share"),
        kept_importance=_finite(training, "kept_importance_share"),
        variance=_finite(training, "variance_share"),
        worst=worst,
        excess=excess,
        last_cost_step=last_cost,
        events=[event for point in training.points for event in point.events],
        guarded=[] if newest is None else [short[name] for name, layer in newest.layers.items() if layer.guarded],
        load=_finite(training, "load_max_over_mean"),
        busiest=max(loads, key=lambda pair: pair[1], default=None),
        loss=_finite(training, "loss"),
        eval_loss=_finite(training, "eval_loss"),
        not_finite=min(bad, default=None),
        time=step_time(training),
        parallel=_parallel(training),
    )


def limit_of(settings: dict[str, Any]) -> Limit:
    """The limit for these settings; the default's where the guard is off or older than they are."""
    default = LRMoEConfig()
    if settings.get("selector") == "topq":
        name, column, value = "guard_tail", "kept_importance_share", default.guard_tail
    else:
        name, column, value = "guard_variance", "variance_share", default.guard_variance
    told = settings.get(name)
    assert value is not None
    if isinstance(told, (int, float)) and not isinstance(told, bool) and told > 0:
        return Limit(field=name, column=column, value=float(told), in_force=True)
    return Limit(field=name, column=column, value=value, in_force=False)


def _cost(values: dict[str, float], limit: Limit) -> float | None:
    value = values.get(limit.column)
    if value is None or not math.isfinite(value):
        return None
    return 1.0 - value if limit.column == "kept_importance_share" else value


def times(training: Training) -> tuple[list[tuple[int, float, float, float]], bool, int]:
    """Milliseconds of one optimizer step at each logged line: step, experts' forward, their backward, the rest.

    Lines with a validation are left out, which their time contains, unless there are no others; the second value says
    whether they are in. The third counts lines whose parts are longer than the whole, which are left out, too.
    """
    lines, before = [], 0
    for point in training.points:
        gap, before = point.step - before, point.step
        told = [point.values.get(key, math.nan) for key in ("forward_seconds", "backward_seconds", "seconds")]
        if gap > 0 and all(map(math.isfinite, told)) and told[0] > 0 and told[1] > 0:
            forward, backward, whole = (1000 * value / gap for value in told)
            lines.append((point.step, forward, backward, whole - forward - backward, "eval_loss" in point.values))
    without = [line for line in lines if not line[4]]
    chosen = without or lines
    sound = [line[:4] for line in chosen if line[3] >= 0]
    return sound, bool(lines) and not without, len(chosen) - len(sound)


def step_time(training: Training) -> StepTime | None:
    """The median of :func:`times`, part by part; None where nothing was measured."""
    lines, validated, _ = times(training)
    if not lines:
        return None
    forward, backward, rest = (statistics.median(line[i] for line in lines) for i in (1, 2, 3))
    return StepTime(forward=forward, backward=backward, rest=rest, validated=validated)


def _finite(training: Training, column: str) -> list[tuple[int, float]]:
    return [pair for pair in zip(*training.series(column), strict=True) if math.isfinite(pair[1])]


def _mean(training: Training, column: str) -> float | None:
    steps, values = training.series(column)
    weights = [step - before for before, step in zip([0, *steps], steps, strict=False)]
    total = sum(weights)
    return sum(w * v for w, v in zip(weights, values, strict=True)) / total if total > 0 else None


def _load(values: dict[str, float]) -> float | None:
    value = values.get("load_max_over_mean")
    return value if value is not None and math.isfinite(value) else None


def _parallel(training: Training) -> dict[str, float]:
    """Means over the lines that have them."""
    found: dict[str, list[float]] = {}
    for point in training.points:
        for key, value in point.parallel.items():
            if math.isfinite(value):
                found.setdefault(key, []).append(value)
    return {key: math.fsum(values) / len(values) for key, values in found.items()}


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
