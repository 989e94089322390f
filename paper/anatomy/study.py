"""Study "anatomy": what the dropped pairs hold, and what becomes of the error over layers, steps and batches.

Exact runs leave their weights at the probe steps; afterwards, on batches that the runs have not trained on, the
gradient that each selector gives at these weights is held against the exact one. Nothing is measured while a run
trains, so probing cannot change it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lrmoe.config import RouterGrad, require_count, require_number
from lrmoe.studies.cells import Cell
from lrmoe.studies.jobs import Progress
from lrmoe.studies.regimes import UNGUARDED, Regime, regime
from lrmoe.studies.results import StudyResult
from lrmoe.studies.study_config import StudyConfig
from lrmoe.studies.variants import Variant
from lrmoe.training.checkpoints import newest_checkpoint
from lrmoe.training.config import TrainConfig
from lrmoe.training.files import locked, write_json
from lrmoe.training.run import load, prepare, train, versions
from lrmoe.training.text import TrainingOrder
from paper.anatomy.cells import read_record, read_weights
from paper.anatomy.probe import Record, Setting, probe
from paper.anatomy.tables import Measured, make_result

VARIANTS = (
    Variant(name="pps", settings={"selector": "pps"}),
    Variant(name="topq", settings={"selector": "topq"}),
    Variant(name="random", settings={"selector": "random"}),
    Variant(name="topq by gradient norm", settings={"selector": "topq", "metric": "grad_norm"}),
)
ROUTER_GRADS: tuple[RouterGrad, ...] = ("sum_rule", "exact", "kept")
# Places of the probes in a run from scratch and in one that goes on from it, as shares of its steps.
_PLACES = {True: (1 / 60, 1 / 6, 1 / 2, 1.0), False: (1 / 30, 1 / 3, 1.0)}


@dataclass(frozen=True, kw_only=True, slots=True)
class AnatomyConfig:
    """What is measured, and on what.

    Args:
        study: model, text, sizes, seeds and regimes; by default from scratch and near zero loss.
        probe_steps: optimizer steps after which a run from scratch is probed; default: a 60th, a sixth, half and all of
            its steps.
        later_probe_steps: the same for the runs that go on from its end; default: a 30th, a third and all.
        batches: fresh batches at each probe, 2 or more.
        rates: shares of the pairs to drop; the first is the one that tables by step and layer are about.
        variants: what selects, as fields of :class:`~lrmoe.LRMoEConfig` other than ``drop`` and ``router_grad``.
        router_rates, router_variants: the rates, and the names of variants, at which every ``router_grad`` is measured;
            elsewhere it is ``sum_rule``.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """

    study: StudyConfig = field(default_factory=StudyConfig)
    probe_steps: tuple[int, ...] = ()
    later_probe_steps: tuple[int, ...] = ()
    batches: int = 16
    rates: tuple[float, ...] = (0.2, 0.3, 0.5)
    variants: tuple[Variant, ...] = VARIANTS
    router_rates: tuple[float, ...] = (0.2, 0.5)
    router_variants: tuple[str, ...] = ("pps", "topq")

    def __post_init__(self) -> None:
        require_count("batches", self.batches, least=2)
        for name in ("rates", "router_rates"):
            values = getattr(self, name)
            for value in values:
                if not 0 < require_number(name, value) < 1:
                    raise ValueError(f"{name}={value!r} must be above 0 and below 1: the share of pairs to drop")
            if len(set(values)) != len(values):
                raise ValueError(f"{name}={list(values)} must be different numbers")
        if not self.rates:
            raise ValueError("rates=[] measures nothing; give one or more shares of pairs to drop, e.g. 0.2")
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"variants={names} must be one or more with different names")
        for variant in self.variants:
            for taken in ("drop", "router_grad", "warmup_steps", "ramp_steps", "final_dense_steps"):
                if taken in variant.settings:
                    raise ValueError(f"variant {variant.name!r}: {taken} cannot be set; rates and probe steps say it")
            variant.config(UNGUARDED)
        for name in self.router_variants:
            if name not in names:
                raise ValueError(f"router_variants={name!r} is none of the variants {', '.join(names)}")
        for regime_name in self.regimes:
            self.steps_of(regime(regime_name, self.study))

    @property
    def regimes(self) -> tuple[str, ...]:
        """Those of ``study``, or from scratch and near zero loss."""
        return self.study.regimes or ("scratch", "near_zero")

    def steps_of(self, place: Regime) -> tuple[int, ...]:
        """The probe steps of a regime, ascending."""
        total, first = place.train.steps, place.pretrain is None
        name = "probe_steps" if first else "later_probe_steps"
        given = getattr(self, name)
        for step in given:
            if require_count(name, step, least=1) > total:
                raise ValueError(f"{name}={step} is past the end of the run ({place.title.lower()}: {total} steps)")
        return tuple(sorted(set(given or (max(1, round(share * total)) for share in _PLACES[first]))))

    def settings(self) -> list[Setting]:
        """All that is measured in a cell."""
        found = []
        for variant in self.variants:
            for rate in dict.fromkeys((*self.rates, *self.router_rates)):
                every = variant.name in self.router_variants and rate in self.router_rates
                for kind in ROUTER_GRADS if every else ROUTER_GRADS[:1]:
                    if rate in self.rates or every:
                        config = variant.config(replace(UNGUARDED, drop=rate, router_grad=kind))
                        alone = kind == ROUTER_GRADS[0]
                        found.append(
                            Setting(variant=variant.name, rate=rate, router_grad=kind, config=config, alone=alone)
                        )
        return found

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("study", "variants")}
        return {
            "study": self.study.to_dict(),
            **{name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()},
            "variants": [variant.to_dict() for variant in self.variants],
        }


def anatomy(config: AnatomyConfig, out: Path, *, progress: Progress = lambda *_: None) -> StudyResult:
    """Trains and measures what ``out`` does not hold yet, on one thread, and makes the study's result.

    ``out/cells`` keeps the runs' folders and a file for each cell (regime, seed, probe step), named by all that defines
    it: what is finished is not done again, and other settings find no cell of these.

    Args:
        progress: told of runs and cells, by name, and how much of each is done, in the units of :func:`work_left`.

    Raises:
        ValueError: if another process is at work there, what is there is damaged, or a run cannot be carried out.
    """
    store = out / "cells"
    store.mkdir(parents=True, exist_ok=True)
    plans = _plans(config, store)
    with locked(store), _one_thread():
        # All that is there is checked before hours go into what is not.
        for plan in plans:
            plan.check()
        for plan in plans:
            plan.carry_out(progress)
    measured = [
        Measured(regime=plan.regime.name, title=plan.regime.title, seed=plan.seed, step=step, record=plan.record(step))
        for plan in plans
        for step in plan.steps
    ]
    provenance = {
        "versions": versions(),
        "threads": 1,
        "probe_seconds": sum(one.record["seconds"] for one in measured),
        **_training_seconds(plans),
        "config": config.to_dict(),
    }
    return make_result(config.study, measured, rates=config.rates, batches=config.batches, provenance=provenance)


def _training_seconds(plans: Iterable[_Plan]) -> dict[str, float]:
    """Of all runs together; not told where the folder of one of them, which its probes do not need, is gone."""
    each = [plan.training_seconds() for plan in plans]
    known = [seconds for seconds in each if seconds is not None]
    return {"training_seconds": sum(known)} if len(known) == len(each) else {}


def check_cells(config: AnatomyConfig, out: Path) -> None:
    """Checks the cells, and the runs, that ``out`` has; writes nothing.

    Raises:
        ValueError: if one is damaged; names the file and the mend.
    """
    for plan in _plans(config, out / "cells"):
        plan.check()


def work_left(config: AnatomyConfig, out: Path) -> int:
    """How much is to do, in forward and backward passes of the model, roughly: a training step is one."""
    return sum(plan.work_left() for plan in _plans(config, out / "cells"))


def runs_of(config: AnatomyConfig) -> list[Cell]:
    """The training runs, of every seed and regime."""
    return [regime(name, config.study).cell(UNGUARDED, seed) for seed in config.study.seeds for name in config.regimes]


def _plans(config: AnatomyConfig, store: Path) -> list[_Plan]:
    """Seed by seed, so that an interrupted study has whole seeds to show; runs that others start from come first."""
    order = sorted((regime(name, config.study) for name in config.regimes), key=lambda one: one.pretrain is not None)
    return [_Plan(config, one, seed, store) for seed in config.study.seeds for one in order]


class _Plan:
    """A training run and its probes."""

    def __init__(self, config: AnatomyConfig, place: Regime, seed: int, store: Path) -> None:
        self.regime = place
        self.seed = seed
        self.cell = place.cell(UNGUARDED, seed)
        self.steps = config.steps_of(place)
        self._config = config
        self._settings = config.settings()
        self._store = store
        self._folder = self.cell.folder(store)
        measured = {
            "batches": config.batches,
            "settings": [[s.about, s.alone, s.config.to_dict()] for s in self._settings],
        }
        self._probed = json.dumps(measured, sort_keys=True)

    def record(self, step: int) -> Record:
        """What a finished cell found."""
        return read_record(self._path(step), self._settings, batches=self._config.batches)

    def training_seconds(self) -> float | None:
        """Of the run itself, as it was measured; None where its folder is gone."""
        return float(self.cell.summary(self._store)["seconds"]) if self.cell.is_finished(self._store) else None

    def check(self) -> None:
        """Checks what there is of the run and its probes.

        Raises:
            ValueError: if something is damaged; names it and the mend.
        """
        todo = self._todo()
        for step in self.steps:
            if step not in todo:
                self.record(step)
            elif self._weights(step).exists():
                read_weights(self._weights(step))
        for cell in (self.cell.start, self.cell) if todo else (self.cell,):
            if cell is not None and (todo or cell.is_finished(self._store)):
                cell.check(self._store)

    def work_left(self) -> int:
        todo = self._todo()
        run = self.cell.config.steps if todo and not self._has_weights(todo) else 0
        start = self.cell.start
        if run and start is not None and newest_checkpoint(start.folder(self._store)) is None:
            # Another plan's run, if that regime is probed too.
            run += 0 if "scratch" in self._config.regimes else start.config.steps
        return run + len(todo) * self._config.batches * self._passes

    def carry_out(self, progress: Progress) -> None:
        todo = self._todo()
        if not todo:
            return
        if not self._has_weights(todo):
            if self.cell.start is not None and newest_checkpoint(self.cell.start.folder(self._store)) is None:
                _train(self.cell.start, self._store, keep={}, progress=progress)
            _train(self.cell, self._store, keep={step: self._weights(step) for step in todo}, progress=progress)
        self._probe(todo, progress)

    @property
    def _passes(self) -> int:
        """Of one batch of a cell; what one layer does alone takes about half a pass."""
        return 1 + len(self._settings) + sum(setting.alone for setting in self._settings) // 2

    def _todo(self) -> list[int]:
        return [step for step in self.steps if not self._path(step).exists()]

    def _has_weights(self, steps: Collection[int]) -> bool:
        return all(self._weights(step).exists() for step in steps)

    def _path(self, step: int) -> Path:
        key = hashlib.sha256(f"{self.cell.key} {step} {self._probed}".encode()).hexdigest()[:16]
        return self._store / f"{self.regime.name}-seed{self.seed}-step{step}-{key}.json"

    def _weights(self, step: int) -> Path:
        return self._folder / f"weights-{step}.pt"

    def _probe(self, todo: list[int], progress: Progress) -> None:
        config = _run_config(self.cell, self._store)
        loaded = load(config)
        batches = _fresh_batches(config, loaded.text.train_N, self._config.batches)
        for step in todo:
            loaded.model.load_state_dict(read_weights(self._weights(step)))
            name = f"probe {self.regime.name} seed {self.seed} step {step}"
            start = time.perf_counter()
            told = partial(_tell, progress, name, self._passes)
            found = probe(loaded.model, loaded.recal, batches, self._settings, step=step, progress=told)
            about = {"regime": self.regime.name, "seed": self.seed, "step": step}
            write_json(self._path(step), {**about, **found, "seconds": time.perf_counter() - start})
            self._weights(step).unlink()


def _tell(progress: Progress, name: str, passes: int, batch: int) -> None:
    progress(name, batch * passes, None)


def _fresh_batches(config: TrainConfig, stream_N: torch.Tensor, count: int) -> list[dict[str, torch.Tensor]]:
    """What the run would train on after its last step."""
    used = config.steps * config.batch * config.grad_accum
    order = TrainingOrder(stream_N, seq=config.seq, length=used + count * config.batch, seed=config.seed)
    items = [order[used + i] for i in range(count * config.batch)]
    return [
        {key: torch.stack([item[key] for item in items[i : i + config.batch]]) for key in items[0]}
        for i in range(0, len(items), config.batch)
    ]


def _run_config(cell: Cell, store: Path) -> TrainConfig:
    config = replace(cell.config, threads=1, keep_checkpoints=1, report_to="none")
    return config if cell.start is None else replace(config, model=str(cell.start.folder(store).resolve()))


def _train(cell: Cell, store: Path, *, keep: dict[int, Path], progress: Progress) -> None:
    """Carries a run out, or on, and keeps its weights after the steps in ``keep``."""
    folder = cell.folder(store)
    missing = [step for step, path in keep.items() if not path.exists()]
    checkpoint = newest_checkpoint(folder)
    reached = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    begun = (folder / "config.json").exists()
    # Weights of steps that lie behind the newest checkpoint come only from the beginning.
    again = begun and (cell.is_finished(store) or any(step <= reached for step in missing))
    prepared = prepare(_run_config(cell, store), folder, resume=begun and not again, overwrite=again)
    model = prepared.loaded.model

    def told(step: int, record: dict[str, Any] | None) -> None:
        # After the optimizer's step, and before the run saves its own checkpoint of it.
        if record is None and step in missing:
            _save(model.state_dict(), keep[step])
        progress(f"train {cell.label} {cell.key[:4]}", step, record)

    summary = train(prepared, progress=told)
    if summary["diverged_at"] is not None:
        raise ValueError(f"the run in {folder} diverged at step {summary['diverged_at']}; lower lr={cell.config.lr}")


def _save(weights: dict[str, Any], path: Path) -> None:
    partial_path = path.with_suffix(".tmp")
    torch.save(weights, partial_path)
    os.replace(partial_path, path)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
