"""Whether a recalibrator, or a layer without one, is moved along by what trains it, and a word to the user where it is
not.

A recalibrator that nobody steps never leaves its warm-up, one that is stepped twice leaves it early, and a model in
evaluation mode drops nothing: none of it shows in the loss. Torch tells of every optimizer step in the process; here
it is known whose parameters that step has moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lrmoe.experts.layer_control import Clock
from lrmoe.once import Once

# An optimizer step more than this without a step of the recalibrator, and it is told.
_SPARE = 1
# Forwards trained on without a step, where no optimizer that holds the parameters themselves is seen to step.
_FORWARDS = 1000

# What stands still, and what to do.
_RECALIBRATOR = (
    "its recalibrator",
    "Call recal.step() once after each optimizer step, or give attach() the optimizer that trains the model, or the "
    "Trainer a RecalibrationCallback",
)
_LAYER = (
    "its schedule",
    "Call its step() once after each optimizer step, or lrmoe.attach(model, config, optimizer=optimizer) for all "
    "layers of a model",
)


class Stepping:
    """Watches one recalibrator.

    Args:
        model: the attached model.
        layers: its attached modules.
        clock: of its layers.
        wants_drop: whether its configuration asks for a drop.
        alone: it is one :class:`lrmoe.MoE` with a configuration of its own and no recalibrator.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        clock: Clock,
        *,
        wants_drop: bool,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self._model = model
        self._layers = list(layers)
        self._clock = clock
        self._wants_drop = wants_drop
        self._start()

    def _start(self) -> None:
        self._once = Once()
        self.follow(None)
        # Steps of each optimizer that holds parameters of the model, since the recalibrator's last.
        self._unanswered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._holds: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._seen = False
        self._forwards = 0
        self._exact_forwards = 0
        _watch(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose steps move the recalibrator on."""
        return None if self._optimizer is None else self._optimizer()

    def follow(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Says whose steps move the recalibrator on; None: somebody calls its ``step()``."""
        self._followed = None if optimizer is None else type(optimizer).__name__
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def before_forward(self, trains: bool) -> None:
        """A call of the model begins, with gradients; ``trains``: in training mode."""
        if trains:
            self._forwards += 1
            if self._forwards == _FORWARDS:
                self._say_nobody(f"{_FORWARDS} forwards were trained on")
        else:
            self._exact_forwards += 1

    def is_second(self, counted: bool) -> bool:
        """Whether a call of ``step()`` follows another one without anything trained on in between; told, once.

        Args:
            counted: a forward was trained on since the last step.
        """
        again = not counted and self._seen and self._exact_forwards == 0 and not any(self._unanswered.values())
        if again and self._any_training():
            name = type(self._model).__name__
            if self.optimizer is not None:
                message = (
                    f"step() was called twice for one optimizer step of the {name}: the optimizer given to attach() "
                    "moves the recalibrator on already. This call is left out; remove it"
                )
            else:
                message = (
                    "step() was called twice for one optimizer step: since the last call nothing was trained of the "
                    f"{name}. Remove one of the calls; if it is another model that is trained, attach to that one"
                )
            self._once.warn("twice", message)
        return again and self.optimizer is not None

    def stepped(self, counted: bool) -> None:
        """The recalibrator's step; ``counted``: a forward was trained on since the last one."""
        trained = self._exact_forwards or any(self._unanswered.values())
        if self._wants_drop and not counted and trained and not self._any_training():
            self._say_evaluation()
        self._unanswered.clear()
        self._forwards = self._exact_forwards = 0

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer of this process has made a step."""
        followed = optimizer is self.optimizer
        if not followed and not self._is_of_model(optimizer):
            return
        self._seen = True
        # Before any forward it is somebody who makes the optimizer's state, to load one into it.
        if followed or not (self._forwards or self._exact_forwards or self._clock.microbatch >= 0):
            return
        self._unanswered[optimizer] = self._unanswered.get(optimizer, 0) + 1
        if self._unanswered[optimizer] > _SPARE:
            if self._forwards == 0 and self._exact_forwards and self._wants_drop:
                self._say_evaluation()
            self._say_nobody(f"{type(optimizer).__name__} made {self._unanswered[optimizer]} steps")

    def _is_of_model(self, optimizer: torch.optim.Optimizer) -> bool:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._holds.get(optimizer)
        if known is None or known[0] != count:
            own = {id(parameter) for parameter in self._model.parameters()}
            held = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
            known = self._holds[optimizer] = (count, held)
        return known[1]

    def _any_training(self) -> bool:
        return any(layer.training for layer in self._layers)

    def _say_nobody(self, what: str) -> None:
        other = "" if self._followed is None else f" The {self._followed} that attach() was given has made none."
        still, mend = _LAYER if self._alone else _RECALIBRATOR
        self._once.warn(
            "nobody",
            f"{what} on the {type(self._model).__name__}, and nobody has moved {still} on: a warm-up never ends, every "
            f"step draws alike, and selection biases{'' if self._alone else ' and guard'} stand still.{other} {mend}",
        )

    def _say_evaluation(self) -> None:
        self._once.warn(
            "evaluation",
            f"the {type(self._model).__name__} trains in evaluation mode, in which the backward is exact and nothing "
            "is dropped (from_pretrained returns models in this mode): call model.train(); to train without dropout, "
            "set the dropouts to 0",
        )

    def close(self) -> None:
        """Watches no longer."""
        _watching.discard(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copied model is trained by another optimizer, or by none yet.
        kept = ("_model", "_layers", "_clock", "_wants_drop", "_alone")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()


_watching: weakref.WeakSet[Stepping] = weakref.WeakSet()
_hooked = False


def _watch(stepping: Stepping) -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_post_hook(_after_any_step)
    _watching.add(stepping)


def _after_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # A compiled step is not followed: what it does to Python's objects would become a part of its graph.
    if torch.compiler.is_compiling():
        return
    for stepping in list(_watching):
        stepping.optimizer_stepped(optimizer)
