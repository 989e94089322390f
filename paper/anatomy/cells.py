"""What the anatomy study keeps between calls: records of probes and weights to probe, read back or refused."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lrmoe.studies.cell_file import COUNT, NUMBER, RECORDS, TEXT, Kind, read_whole, require
from lrmoe.training.files import check_file
from paper.anatomy.probe import WEIGHTS, Record, Setting

# Sums over records are of floats alone.
_FLOAT: Kind = ("a number with a point", lambda value: type(value) is float)
_SETTING = {"variant": TEXT, "rate": NUMBER, "router_grad": TEXT}
# Of each list of a record: what its entries are known by, and the squared norms in them.
_PARTS: dict[str, tuple[dict[str, Kind], tuple[str, ...]]] = {
    "exact": ({"layer": COUNT, "weight": TEXT}, ("gradient", "mean_gradient", "noise")),
    "errors": ({**_SETTING, "layer": COUNT, "weight": TEXT}, ("one", "mean")),
    "alone": (
        {**_SETTING, "layer": COUNT},
        ("importance", "dropped_importance", "variance", "gradient", "error", "dropped_sum"),
    ),
}


def read_record(path: Path, settings: Sequence[Setting], *, batches: int) -> Record:
    """The record of a probe (:func:`~paper.anatomy.probe.probe`), with the ``seconds`` that it took.

    Args:
        path: the cell's file.
        settings: all that it measured.
        batches: on how many it measured them.

    Raises:
        ValueError: if the file is damaged; names it, what is wrong and the mend.
    """
    check = partial(_check, settings=settings, batches=batches)
    return read_whole(path, check, mend="delete it, and the probe is made again")


def _check(record: Record, *, settings: Sequence[Setting], batches: int) -> None:
    require(record, {"loss": NUMBER, "seconds": NUMBER, "batches": COUNT, **dict.fromkeys(_PARTS, RECORDS)})
    if record["batches"] != batches:
        raise ValueError(f"batches={record['batches']} must be {batches}")
    found = {name: _keys(record[name], name) for name in _PARTS}
    layers = range(1 + max((layer for layer, _ in found["exact"]), default=0))
    places = {(layer, weight) for layer in layers for weight in WEIGHTS}
    expected: dict[str, set[tuple[Any, ...]]] = {
        "exact": set(places),
        "errors": {(*setting.about.values(), *place) for setting in settings for place in places},
        "alone": {(*setting.about.values(), layer) for setting in settings if setting.alone for layer in layers},
    }
    for name, keys in expected.items():
        if lacking := keys - found[name]:
            raise ValueError(f"{name} has no entry of {', '.join(map(str, min(lacking, key=str)))}")


def _keys(entries: Sequence[Record], name: str) -> set[tuple[Any, ...]]:
    """What a list has entries of."""
    known_by, terms = _PARTS[name]
    keys = set()
    for number, entry in enumerate(entries):
        where = f"{name}[{number}]."
        require(entry, {**known_by, **dict.fromkeys(terms, _FLOAT)}, where=where)
        key = tuple(entry[part] for part in known_by)
        if key in keys:
            raise ValueError(f"{where[:-1]} is there twice")
        keys.add(key)
    return keys


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a run at a step.

    Raises:
        ValueError: if the file is damaged; names it and the mend.
    """
    check_file(path)
    try:
        found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"{path} cannot be read ({reason}); delete it, and the run is done again") from None
    return found
