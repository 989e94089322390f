"""What a run leaves on disk while it trains: one line of ``metrics.jsonl`` a log step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from lrmoe.hosts.transformers import RecalibrationCallback
from lrmoe.training.files import append_record, read_records, write_records
from lrmoe.training.memory import SavedBytes
from lrmoe.training.world import World

# Called after every optimizer step with its number, and once more with the record where one was written.
Progress = Callable[[int, "dict[str, Any] | None"], None]


class LossMeter:
    """The language-model loss between two logs, without the balancing loss that the training loss may contain.

    Sums stay on the device; :meth:`take` synchronises. Over several ranks they are means over the ranks.
    """

    def __init__(self, world: World | None = None) -> None:
        self._world = world or World()
        self._loss: Tensor | None = None
        self._balance: Tensor | None = None
        self._microbatches = 0

    def add(self, loss: Tensor, balance: Tensor | None) -> None:
        """Adds a microbatch's share of its step's mean loss, and its balancing loss before the coefficient."""
        self._microbatches += 1
        self._loss = loss if self._loss is None else self._loss + loss
        if balance is not None:
            self._balance = balance if self._balance is None else self._balance + balance

    def take(self, steps: int) -> dict[str, float]:
        """Means over the ``steps`` since the last call: ``loss`` and, where there is one, ``balance_loss``."""
        means: dict[str, float] = {}
        if self._loss is not None:
            means["loss"] = float(self._loss) / steps
        if self._balance is not None:
            means["balance_loss"] = float(self._balance) / self._microbatches
        self.__init__(self._world)  # type: ignore[misc]
        return dict(zip(means, self._world.mean(list(means.values())), strict=True))


class RunRecorder(TrainerCallback):  # type: ignore[misc]
    """Writes ``metrics.jsonl``, drives the progress display and stops a run whose loss is no number any more. Of
    several ranks the first writes and displays.

    The metrics come from ``recalibration``, which has to be registered ahead of it.

    A line holds ``step``, ``loss`` (nats per token, mean since the line before), ``lr``, ``seconds`` (wall clock since
    the line before, validation included), :meth:`Recalibrator.metrics` with ``layers`` as a list of objects with
    ``name``, ``eval_loss`` where that step was validated and, on the first line, ``saved_bytes``.

    Attributes:
        diverged_at: the first logged step whose loss was not finite, or None.
    """

    def __init__(
        self,
        recalibration: RecalibrationCallback,
        path: Path,
        losses: LossMeter,
        progress: Progress | None,
        world: World | None = None,
    ) -> None:
        self._recalibration = recalibration
        self._path = path
        self._losses = losses
        self._is_main = world is None or world.is_main
        self._progress = progress if self._is_main else None
        self._pending: dict[str, Any] | None = None
        self._last_step = 0
        self._since = time.perf_counter()
        self.saved_bytes: SavedBytes | None = None
        self.diverged_at: int | None = None

    def continue_from(self, step: int) -> None:
        """Drops the lines past ``step``, which are about to be written again."""
        if self._is_main:
            write_records(self._path, [r for r in read_records(self._path) if r["step"] <= step])
        self._last_step = step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True
        if self._progress is not None:
            self._progress(state.global_step, None)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # The Trainer also logs validations and its own totals through here.
        if logs is None or "loss" not in logs or state.global_step == self._last_step:
            return
        step = state.global_step
        means = self._losses.take(step - self._last_step)
        logs["loss"] = means["loss"]
        metrics = dict(self._recalibration.metrics or {})
        layers = metrics.pop("layers")
        record = {
            **metrics,
            "step": step,
            **means,
            "lr": logs["learning_rate"],
            "grad_norm": float(logs["grad_norm"]),
            "layers": [{"name": name, **values} for name, values in layers.items()],
        }
        if self.saved_bytes is not None:
            record["saved_bytes"] = {"moe": self.saved_bytes.moe, "model": self.saved_bytes.model}
            self.saved_bytes = None
        self._last_step = step
        if not math.isfinite(means["loss"]):
            self.diverged_at = step
            control.should_training_stop = True
        self._pending = record
        if not control.should_evaluate:
            self._write()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if metrics is None:
            return
        if self._pending is None:
            self._pending = {"step": state.global_step}
        self._pending["eval_loss"] = metrics["eval_loss"]
        self._write()

    def _write(self) -> None:
        if self._pending is None:
            return
        now = time.perf_counter()
        record, self._pending = {**self._pending, "seconds": now - self._since}, None
        self._since = now
        if self._is_main:
            append_record(self._path, record)
        if self._progress is not None:
            self._progress(record["step"], record)
