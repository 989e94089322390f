"""``lrmoe train --trace``: tells a :class:`lrmoe.training.trace.TraceWriter` of every forward that is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from lrmoe.control import Recalibrator
from lrmoe.experts.layer_control import LayerControl
from lrmoe.training.trace import TraceWriter


class TraceRecorder(TrainerCallback):  # type: ignore[misc]
    """Writes a part whenever the run logs or saves, so that a checkpoint never is ahead of the trace.

    Args:
        recal: of the model.
        writer: of the rank that writes.
        engine: the :class:`lrmoe.parallel.ExpertParallel` that spreads the experts, whose loads are of all ranks; None
            in a run of one process, where each layer's backward tells of its loads, one row.
    """

    def __init__(self, recal: Recalibrator, writer: TraceWriter, engine: Any = None) -> None:
        self._writer = writer
        if engine is not None:
            engine.trace = writer.add
            return
        for control in recal.layers.values():
            control.meter.watch = _watch(control, writer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_log or control.should_save or state.global_step >= state.max_steps:
            self._writer.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._writer.flush()


def _watch(control: LayerControl, writer: TraceWriter) -> Callable[[Tensor], None]:
    def told(load_E: Tensor) -> None:
        clock = control.clock
        writer.add(control.layer, clock.step, max(clock.microbatch, 0), load_E.unsqueeze(0))

    return told
