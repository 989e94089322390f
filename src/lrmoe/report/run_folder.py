"""Reading a run folder of ``lrmoe train`` or ``lrmoe compare``: strict about what is there, tolerant of what is not.

A run folder holds

- ``config.json``: one object, the settings of the run;
- ``metrics.jsonl``: one object a line, one line a logged step. ``step`` is required; ``loss``, ``eval_loss``, ``drop``,
  ``kept_share``, ``kept_importance_share``, ``variance_share``, ``load_max_over_mean``, ``forward_seconds``,
  ``backward_seconds``, ``sequence_kept_share_min``, ``_median`` and ``_max``, ``seconds``, ``guarded_layers``,
  ``nonfinite_backwards``, ``guard_events``, ``saved_bytes``, ``parallel`` and ``layers`` may be absent or null; a
  comparison adds ``variant`` and ``seed`` to every line. A number that is not finite is the string "NaN", "Infinity" or
  "-Infinity"; it may also stand there bare;
- ``summary.json``: one object, the result; absent while a run is unfinished.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lrmoe import strict_json
from lrmoe.experts.meter import BY_SEQUENCE, NONFINITE, SECONDS, SHARES
from lrmoe.training.files import check_file

NUMBERS = (
    "loss",
    "eval_loss",
    "drop",
    *SHARES,
    *BY_SEQUENCE,
    *SECONDS,
    "seconds",
    "guarded_layers",
    NONFINITE,
)
_LAYER_NUMBERS = (*SHARES, *BY_SEQUENCE, "drop")
# Of ``parallel``, what lrmoe.parallel.ExpertParallel.metrics gives: means over a line's plans.
BALANCE = (
    "home_max_over_mean",
    "forward_max_over_mean",
    "home_kept_max_over_mean",
    "backward_max_over_mean",
    "replicas",
    "moved_rows",
    "rows",
    "kept_rows",
    "extra_dropped",
)


@dataclass(kw_only=True, slots=True)
class LayerPoint:
    """One MoE layer between two logs. ``load``: routed pairs per expert, summed; None where not logged. ``guarded``:
    whether the guard had stopped the layer's dropping."""

    values: dict[str, float] = field(default_factory=dict)
    load: array[int] | None = None
    guarded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardEvent:
    """The guard stopped a layer's dropping, or let it drop again: ``kind`` says which. ``value`` is what was measured
    and ``limit`` what it was held against, of V*/sum R or of the dropped share of sum R."""

    step: int
    layer: str
    kind: str
    value: float | None
    limit: float | None


@dataclass(kw_only=True, slots=True)
class Point:
    """One logged optimizer step. ``values`` holds the columns that are there; NaN and infinities are kept as such."""

    step: int
    values: dict[str, float] = field(default_factory=dict)
    layers: dict[str, LayerPoint] = field(default_factory=dict)
    events: list[GuardEvent] = field(default_factory=list)
    parallel: dict[str, float] = field(default_factory=dict)
    sent_bytes: dict[str, float] = field(default_factory=dict)
    saved_bytes: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Training:
    """One trained model: the points of one variant and one seed, in the order of steps."""

    variant: str
    seed: int
    points: list[Point]

    def series(self, column: str) -> tuple[list[int], list[float]]:
        """Steps and values of one column, where it was logged."""
        found = [(point.step, point.values[column]) for point in self.points if column in point.values]
        return [step for step, _ in found], [value for _, value in found]

    def layer_series(self, layer: str, column: str) -> tuple[list[int], list[float]]:
        """Steps and values of one column of one layer, where it was logged."""
        found = [
            (point.step, point.layers[layer].values[column])
            for point in self.points
            if layer in point.layers and column in point.layers[layer].values
        ]
        return [step for step, _ in found], [value for _, value in found]

    @property
    def layer_names(self) -> list[str]:
        """Every layer that was logged, in the order of the first line that has it."""
        return list(dict.fromkeys(name for point in self.points for name in point.layers))


@dataclass(kw_only=True, slots=True)
class Run:
    """A run folder. ``summary`` is None while a run is unfinished; ``trainings`` has one entry per variant and seed."""

    path: Path
    is_comparison: bool
    config: dict[str, Any]
    summary: dict[str, Any] | None
    trainings: list[Training]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(training.variant for training in self.trainings))

    def of(self, variant: str) -> list[Training]:
        return [training for training in self.trainings if training.variant == variant]

    @property
    def last_step(self) -> int:
        return max((point.step for training in self.trainings for point in training.points), default=0)


def read_run(run_dir: Path) -> Run:
    """Reads a run folder.

    Raises:
        ValueError: if the folder, ``config.json`` or ``metrics.jsonl`` is missing, or a file is malformed; names the
            file and, in ``metrics.jsonl``, the line.
    """
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a folder; give the folder that lrmoe train or lrmoe compare wrote")
    config = read_object(run_dir / "config.json")
    summary_path = run_dir / "summary.json"
    summary = read_object(summary_path) if summary_path.exists() else None
    trainings: dict[tuple[str, int], dict[int, Point]] = {}
    kinds: dict[bool, int] = {}
    metrics_path = run_dir / "metrics.jsonl"
    for line, row in read_lines(metrics_path):
        where = f"{metrics_path}, line {line}"
        compared = "variant" in row
        kinds.setdefault(compared, line)
        if len(kinds) == 2:
            raise ValueError(f"{where}: lines with and without variant are mixed (compare line {kinds[not compared]})")
        variant = _text(row.get("variant", "run"), "variant", where)
        seed = _count(row.get("seed", 0), "seed", where)
        point = _point(row, where)
        steps = trainings.setdefault((variant, seed), {})
        # The loss and the validation loss of one step may come on two lines, and a resumed run logs some steps again:
        # what was written later holds.
        _merge(steps.setdefault(point.step, Point(step=point.step)), point)
    return Run(
        path=run_dir,
        is_comparison=True in kinds,
        config=config,
        summary=summary,
        trainings=[
            Training(variant=variant, seed=seed, points=[steps[step] for step in sorted(steps)])
            for (variant, seed), steps in trainings.items()
        ],
    )


def _merge(into: Point, later: Point) -> None:
    into.values.update(later.values)
    into.layers.update(later.layers)
    into.events = later.events or into.events
    into.parallel.update(later.parallel)
    into.sent_bytes.update(later.sent_bytes)
    into.saved_bytes.update(later.saved_bytes)


def _read_text(path: Path) -> str:
    check_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _missing(path) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None


def _missing(path: Path) -> ValueError:
    return ValueError(f"{path} is missing; give the folder that lrmoe train or lrmoe compare wrote with --out")


def read_object(path: Path) -> dict[str, Any]:
    """One JSON object; ValueError naming the file otherwise."""
    text = _read_text(path)
    try:
        value = strict_json.loads(text)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise ValueError(f"{path}, line {line}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected one JSON object, found {_kind(value)}")
    return value


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file with the numbers of their lines; ValueError naming file and line otherwise."""
    check_file(path)
    if not path.exists():
        raise _missing(path)
    with open(path, "rb") as file:
        before = 0
        # A line at a time: the lines of a long run do not fit into memory together. Not str.splitlines, which also
        # breaks at characters that JSON strings may contain.
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 text (byte {before + error.start})") from None
            before += len(line)
            if text.strip():
                yield number, _parsed(text, path, number)


def _parsed(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        value = strict_json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}, line {number}: not valid JSON: {error}. If the run was killed while it wrote, "
            "delete this line and write the report again"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}, line {number}: expected a JSON object, found {_kind(value)}")
    return value


def _point(row: dict[str, Any], where: str) -> Point:
    if "step" not in row:
        raise ValueError(f"{where}: step is missing")
    point = Point(step=_count(row["step"], "step", where), values=_numbers(row, NUMBERS, where))
    for position, (name, layer) in enumerate(_named_layers(row.get("layers"), where)):
        here = f"{where}, layers[{position}]"
        if name in point.layers:
            raise ValueError(f"{here}: name={name!r} is there twice")
        load, kept = (None if layer.get(key) is None else _counts(layer[key], key, here) for key in ("load", "kept"))
        if load is not None and kept is not None and len(load) != len(kept):
            raise ValueError(f"{here}: load has {len(load)} experts, kept has {len(kept)}")
        guarded = layer.get("guarded") or False
        if not isinstance(guarded, bool):
            raise ValueError(f"{here}: guarded={guarded!r} must be true or false")
        point.layers[name] = LayerPoint(values=_numbers(layer, _LAYER_NUMBERS, here), load=load, guarded=guarded)
    point.events = [
        _event(event, f"{where}, guard_events[{i}]") for i, event in enumerate(_list(row, "guard_events", where))
    ]
    parallel = _object(row, "parallel", where)
    point.parallel = _numbers(parallel, BALANCE, f"{where}, parallel")
    sent = _object(parallel, "sent_bytes", f"{where}, parallel")
    point.sent_bytes = _numbers(sent, tuple(sent), f"{where}, parallel.sent_bytes")
    saved = _object(row, "saved_bytes", where)
    point.saved_bytes = _numbers(saved, ("moe", "model"), f"{where}, saved_bytes")
    return point


def _event(event: object, where: str) -> GuardEvent:
    if not isinstance(event, dict):
        raise ValueError(f"{where}: expected an object, found {_kind(event)}")
    numbers = _numbers(event, ("value", "limit"), where)
    return GuardEvent(
        step=_count(event.get("step"), "step", where),
        layer=_text(event.get("layer"), "layer", where),
        kind=_text(event.get("kind"), "kind", where),
        value=numbers.get("value"),
        limit=numbers.get("limit"),
    )


def _list(row: dict[str, Any], key: str, where: str) -> list[Any]:
    value = row.get(key)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{where}: {key} must be a list, found {_kind(value)}")
    return value or []


def _object(row: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = row.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{where}: {key} must be an object, found {_kind(value)}")
    return value or {}


def _named_layers(layers: object, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Layers as a list of objects with a name, or as an object from name to the rest."""
    if layers is None:
        return []
    if isinstance(layers, dict):
        layers = [{"name": name, **layer} if isinstance(layer, dict) else layer for name, layer in layers.items()]
    if not isinstance(layers, list):
        raise ValueError(f"{where}: layers must be a list, found {_kind(layers)}")
    named = []
    for position, layer in enumerate(layers):
        if not isinstance(layer, dict):
            raise ValueError(f"{where}, layers[{position}]: expected an object, found {_kind(layer)}")
        named.append((_text(layer.get("name"), "name", f"{where}, layers[{position}]"), layer))
    return named


def _numbers(row: dict[str, Any], columns: tuple[str, ...], where: str) -> dict[str, float]:
    values = {}
    for column in columns:
        value = row.get(column)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{where}: {column}={value!r} must be a number")
        try:
            values[column] = float(value)
        except OverflowError:
            raise ValueError(f"{where}: {column} is an integer too large for a float") from None
    return values


def _counts(values: object, name: str, where: str) -> array[int]:
    if not isinstance(values, list):
        raise ValueError(f"{where}: {name} must be a list of pairs per expert, found {_kind(values)}")
    # A long run has millions of them: looked at one by one only to name the one that is wrong.
    if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) >= 2**63):
        for expert, value in enumerate(values):
            if _count(value, f"{name}[{expert}]", where) >= 2**63:
                raise ValueError(f"{where}: {name}[{expert}]={value} is too large for a number of pairs")
    return array("q", values)


def _count(value: object, name: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{where}: {name}={value!r} must be an integer >= 0")
    return value


def _text(value: object, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name}={value!r} must be a string")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
