"""The recalibrator in Transformers' Trainer: steps, logs, checkpoints and resumes with it."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch import nn
from transformers.trainer_callback import (
    CallbackHandler,
    ExportableState,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.training_args import TrainingArguments

from lrmoe.control import Recalibrator
from lrmoe.experts.meter import BY_SEQUENCE, NONFINITE, SECONDS, SHARES
from lrmoe.hosts.expert_modules import EXPERT_PARALLEL
from lrmoe.hosts.restored_weights import check_best_can_be_loaded, check_resumed, report_best, sample_weights

# The scalars of Recalibrator.metrics() that go into the Trainer's logs, as "lrmoe/<name>".
LOGGED = ("drop", "guarded_layers", NONFINITE, *SHARES, *BY_SEQUENCE)


class RecalibrationCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Moves a recalibrator along with a Trainer, logs what its backward passes did, and resumes it.

    ``Trainer(..., callbacks=[RecalibrationCallback(recal)])`` or ``trainer.add_callback(RecalibrationCallback(recal))``
    puts the metrics into the Trainer's history, its console output and its reporters (TensorBoard, W&B, ...): before
    the first log the callback moves ahead of them. The metrics are those of this process, or, where the experts are
    spread over ranks by ``ep_implementation="lrmoe"``, of all ranks together; the policy that balances the ranks is
    then moved along and resumed too.

    The recalibrator's state is kept in the checkpoint's ``trainer_state.json``, so
    ``trainer.train(resume_from_checkpoint=...)`` continues with the draws the interrupted run would have made. An
    attached model takes its experts from the checkpoint when the Trainer loads it, which other models do not; the
    callback compares, refuses to go on with other experts, and logs what it goes on from. Where
    ``load_best_model_at_end`` could not restore the experts it refuses before training.

    Args:
        recal: what :func:`lrmoe.attach` returned; default: the one attached to the model that is trained, found anew
            whenever a training begins. One that is given must be of that model.

    Attributes:
        recal: the recalibrator of the training that runs or ran last.
        metrics: what :meth:`Recalibrator.metrics` gave at the last training log; None before. Where ranks share the
            experts, ``parallel`` in it is what :meth:`lrmoe.parallel.ExpertParallel.metrics` gave.
    """

    def __init__(self, recal: Recalibrator | None = None) -> None:
        self._given = recal
        self.recal = recal
        self.metrics: dict[str, Any] | None = None

    def add_to(self, trainer: Any) -> RecalibrationCallback:
        """Adds the callback ahead of the Trainer's others, where it would move itself when training begins.

        Raises:
            ValueError: if the Trainer already has one.
        """
        callbacks = trainer.callback_handler.callbacks
        if any(isinstance(callback, RecalibrationCallback) for callback in callbacks):
            raise ValueError("this Trainer already has a RecalibrationCallback; pass it once")
        callbacks.insert(0, self)
        return self

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"the Trainer would split batches over {args.n_gpu} GPUs in one process (DataParallel), where the "
                "layers of several replicas cannot keep one position in training; start one process per GPU (torchrun)"
            )
        self.recal = _attached_to(model) if self._given is None else _require_of_model(self._given, model)
        self.metrics = None
        _follow(self.recal, kwargs.get("optimizer"))
        check_best_can_be_loaded(args, self.recal, model)
        self.recal.set_total_steps(state.max_steps)
        saved = self._saved_in(state)
        if state.global_step == 0:
            self.recal.set_step(0)
        elif saved is None:
            warnings.warn(
                f"the checkpoint at step {state.global_step} has no recalibrator state: it was saved without a "
                "RecalibrationCallback. Recalibration starts here, at the schedule's position for this step",
                UserWarning,
                stacklevel=2,
            )
            self.recal.set_step(state.global_step)
        else:
            self.recal.load_state_dict(saved["recalibrator"])
            self._resume_policy(saved.get("balancer"))
            if state.is_world_process_zero:
                check_resumed(saved["weights"], self.recal, args, state)
        # The Trainer fails to save where a resumed state does not know a callback.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.recal is None:
            return
        if not self.recal.steps_with_optimizer:
            self.recal.step()
        if (engine := engine_of(self.recal)) is not None:
            engine.step()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The first event after all callbacks have been given to the Trainer and before the first log.
        _move_ahead(self)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Evaluation and the summary at the end are logged too; they come from no backward.
        if self.recal is None or logs is None or "loss" not in logs:
            return
        self.metrics = _metrics(self.recal)
        scalars = {f"lrmoe/{name}": value for name, value in _scalars(self.metrics).items()}
        logs.update(scalars)
        # The Trainer has filed this log already; `logs` is what goes to the callbacks that follow.
        state.log_history[-1].update(scalars)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.recal is not None and state.is_world_process_zero:
            report_best(args, state, self.recal)

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into its checkpoints for this callback."""
        recal = self.recal
        if recal is None:
            return {"args": {}, "attributes": {"saved": None}}
        engine = engine_of(recal)
        saved = {
            "recalibrator": recal.state_dict(),
            "weights": sample_weights(recal),
            "balancer": None if engine is None else engine.state_dict(),
        }
        return {"args": {}, "attributes": {"saved": saved}}

    def _resume_policy(self, saved: dict[str, Any] | None) -> None:
        engine = None if self.recal is None else engine_of(self.recal)
        # Another policy may take over, or the same with other ranks or slots: it then begins without a history.
        if engine is None or saved is None or saved["policy"] != engine.policy.name:
            return
        try:
            engine.load_state_dict(saved)
        except ValueError as error:
            if engine.rank == 0:
                warnings.warn(f"the balancing policy begins anew: {error}", UserWarning, stacklevel=3)

    def _saved_in(self, state: TrainerState) -> dict[str, Any] | None:
        entry = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(entry, list):
            raise ValueError(f"the checkpoint was saved with {len(entry)} RecalibrationCallbacks; one is supported")
        return None if entry is None else entry["attributes"]["saved"]


def _move_ahead(callback: RecalibrationCallback) -> None:
    """Puts the callback before the Trainer's others, so that its printer and its reporters, which come before whatever
    a user adds, see the metrics of a log and not only its history."""
    # Callbacks are told everything but who calls them.
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    if frame is None:
        return
    callbacks = frame.f_locals["self"].callbacks
    if callback in callbacks and callbacks[0] is not callback:
        # In place, and those that follow stay where they are: the handler is going through the list.
        callbacks.remove(callback)
        callbacks.insert(0, callback)


def engine_of(recal: Recalibrator) -> Any:
    """What spreads the experts over ranks, one object for all layers; None where nothing does."""
    for module in recal.modules().values():
        if (layer := vars(module).get(EXPERT_PARALLEL)) is not None:
            return layer.engine
    return None


def _metrics(recal: Recalibrator) -> dict[str, Any]:
    engine = engine_of(recal)
    if engine is None:
        return recal.metrics()
    from lrmoe.parallel import global_metrics

    return {**global_metrics(recal, timeout_s=engine.timeout_s), "parallel": engine.metrics()}


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    # A share that no backward of the interval could tell is left out: reporters take numbers.
    scalars = {name: float(value) for name in LOGGED if (value := metrics.get(name)) is not None}
    # Layers measure their time on a CPU only.
    return scalars | {name: float(metrics[name]) for name in SECONDS if metrics.get(name)}


def _require_of_model(recal: Recalibrator, model: nn.Module | None) -> Recalibrator:
    """``recal``, if its layers are among those that are trained."""
    trained = set() if model is None else set(model.modules())
    foreign = [name for name, module in recal.modules().items() if module not in trained]
    if foreign:
        raise ValueError(
            f"the recalibrator given to RecalibrationCallback is of another model: its layer {foreign[0]} "
            f"({len(foreign)} of {len(recal.modules())}) is not in the {type(model).__name__} that the Trainer trains. "
            "Attach to the model that is trained; with model_init, attach there and give the callback no recalibrator: "
            "it finds the one of each model"
        )
    return recal


def _follow(recal: Recalibrator, optimizer: Any) -> None:
    """Leaves the steps to the optimizer that :func:`lrmoe.attach` was given only if it is the one that trains."""
    if recal.steps_with_optimizer and not recal.is_following(optimizer):
        warnings.warn(
            f"attach() was given another optimizer than the {type(optimizer).__name__} that the Trainer trains with; "
            "the RecalibrationCallback moves the recalibrator on instead",
            UserWarning,
            stacklevel=3,
        )
        recal.follow(None)


def _attached_to(model: nn.Module | None) -> Recalibrator:
    for module in [] if model is None else model.modules():
        recal = vars(module).get("_lrmoe_recalibrator")
        if isinstance(recal, Recalibrator):
            return recal
    raise ValueError("no recalibrator is attached to the Trainer's model: call lrmoe.attach(model, config) first")
