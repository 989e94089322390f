"""Moves the recalibrated backward of a model's layers along with training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lrmoe.config import LRMoEConfig, require_count
from lrmoe.control.calls import CallFollower
from lrmoe.control.guard import Guard, as_sums
from lrmoe.control.hosted import HostedLayers
from lrmoe.control.optimizers import hookable, innermost
from lrmoe.evenness import mean_of_known
from lrmoe.experts.layer_control import Clock, LayerControl
from lrmoe.experts.meter import BY_SEQUENCE, NONFINITE, NOTHING, SECONDS, SHARES, shares
from lrmoe.experts.stepping import Stepping
from lrmoe.experts.validation import check_not_transformed
from lrmoe.labels import layer_in_words, layer_label
from lrmoe.layer import MoE
from lrmoe.once import Once
from lrmoe.recalibration.schedule import drop_at

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Recalibrator:
    """Moves all attached layers along with training. Made by :func:`lrmoe.attach`.

    The microbatch within a step is counted by the model's own forward calls (training mode, gradients enabled);
    activation checkpointing does not call the model again, so a recompute draws what its forward drew.

    It guards the layers by ``guard_variance`` and ``guard_tail`` of the config: one in which dropping costs too much,
    over ten optimizer steps, trains with the exact backward for a while, and the logger ``lrmoe`` says so; see
    :mod:`lrmoe.recalibration.guard`.

    A copy of the model (deepcopy, pickle) carries a recalibrator of its own, which no optimizer moves: call its
    :meth:`step`.

    Attributes:
        layers: the control of every attached layer, by module name, in model order.
    """

    def __init__(
        self,
        model: nn.Module,
        hosted: HostedLayers,
        config: LRMoEConfig,
        optimizer: torch.optim.Optimizer | None,
        load_group: ProcessGroup | None = None,
    ) -> None:
        self._hosted = hosted
        names = list(self._hosted.modules)
        self._config = config
        self._load_group = load_group
        # Until the length of the run is known, which training waits for, the schedule cannot place its dense tail.
        known = config if config.total_steps is not None else replace(config, final_dense_steps=0)
        # Tensors made in inference mode could not be moved on outside of it.
        with torch.inference_mode(False):
            self.clock = Clock(known, layers=len(names), microbatch=-1)
            self._guard = Guard(config, names)
            watched = self._guard.limit is not None
            self.layers = {
                name: LayerControl(self.clock, layer=i, name=name, watched=watched) for i, name in enumerate(names)
            }
        # Of the last step: the drop scheduled, and that in force in each layer.
        self._last_drop: tuple[float, list[float]] | None = None
        self._model = model
        self._once = Once()
        # The model is changed from here on, by nothing that can fail half way.
        self._undo = self._hosted.bind(model, self.layers)
        layers = list(self._hosted.modules.values())
        self._calls = CallFollower(model, self.clock, layers, self._before_forward)
        self._stepping = Stepping(model, layers, self.clock, wants_drop=config.drop > 0.0)
        self._optimizer_hook: Any = None
        self.follow(optimizer)
        # Past nn.Module's own bookkeeping: neither a submodule nor part of the state dict.
        object.__setattr__(model, "_lrmoe_recalibrator", self)

    @property
    def config(self) -> LRMoEConfig:
        """The configuration :func:`lrmoe.attach` was given, with the length of the run once that is known."""
        return self._config if self.clock.config.total_steps is None else self.clock.config

    def modules(self) -> dict[str, nn.Module]:
        """The attached modules, by the names of ``layers``."""
        return dict(self._hosted.modules)

    def set_total_steps(self, total_steps: int) -> None:
        """Tells the schedule how long the run is; needed for ``final_dense_steps``. A length that the config gave
        stays."""
        if self._config.total_steps is None:
            self.clock.config = replace(self._config, total_steps=total_steps)
            self.clock.move_to(step=self.clock.step, microbatch=self.clock.microbatch)
        dense = self._config.warmup_steps + self._config.final_dense_steps
        if self._config.drop > 0.0 and dense >= total_steps:
            self._once.warn(
                "never",
                f"nothing will be dropped in a training of {total_steps} steps: "
                f"warmup_steps={self._config.warmup_steps} and final_dense_steps={self._config.final_dense_steps} take "
                "all of them; a warm-up of 15 % of the steps is what was measured",
            )

    @property
    def steps_with_optimizer(self) -> bool:
        """Whether an optimizer's steps move it on, so that nobody else needs to."""
        return self._optimizer_hook is not None

    def is_following(self, optimizer: object) -> bool:
        """Whether it is this optimizer's steps, or those of one that it wraps, that move it on."""
        followed = self._stepping.optimizer
        return followed is not None and innermost(optimizer) is followed

    def follow(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Says which optimizer's steps move it on, instead of the one that :func:`lrmoe.attach` was given; None: you
        call :meth:`step`.

        Raises:
            ValueError: if the optimizer's steps cannot be followed.
        """
        if optimizer is not None:
            optimizer = hookable(optimizer)
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        hook = None if optimizer is None else optimizer.register_step_post_hook(self._after_optimizer_step)
        self._optimizer_hook = hook
        self._stepping.follow(optimizer)

    def set_step(self, step: int) -> None:
        """Says how many optimizer steps lie behind; the next forward is the first microbatch after them, and the guard
        begins anew.

        Raises:
            ValueError: if it is no integer >= 0.
        """
        step = require_count("step", step)
        self._last_drop = None
        self._take_sums()
        self._guard.reset()
        self.clock.set_exact(self._guard.exact)
        self.clock.move_to(step=step, microbatch=-1)

    def step(self) -> None:
        """Call once after each optimizer step, on every rank: moves the schedule and the draws on, lets each
        :class:`lrmoe.MoE` router with a selection bias update it from the loads of the step, and the guard look at it.

        Where ranks share experts, or with a ``load_group``, they add up what the guard looks at: a collective.

        An optimizer given to :func:`lrmoe.attach` does this already; a call besides is told and left out."""
        if not self._undo:
            self._once.warn(
                "detached",
                f"step() was called of a recalibrator that was detached from its {type(self._model).__name__} and "
                "moves nothing any more; remove the call, or call lrmoe.attach again and step what it returns",
            )
            return
        if self._stepping.is_second(counted=self.clock.microbatch >= 0):
            return
        self._step()

    def _step(self) -> None:
        self._stepping.stepped(counted=self.clock.microbatch >= 0)
        for layer in self._hosted.modules.values():
            if isinstance(layer, MoE):
                layer.update_selection_bias(self._load_group)
        scheduled = float(self.clock.drop)
        instead = self._say_instead()
        drops = zip(self.layers, self.clock.drop_L.tolist(), strict=True)
        self._last_drop = scheduled, [0.0 if name in instead else drop for name, drop in drops]
        sums = self._take_sums()
        if self._guard.limit is not None and scheduled > 0.0:
            self._watch(sums)
        self.clock.move_to(step=self.clock.step + 1, microbatch=-1)

    def metrics(self, *, reset: bool = True) -> dict[str, Any]:
        """What the backward passes did since the last call: ``kept_share``, ``kept_importance_share``,
        ``variance_share``, ``load_max_over_mean`` and ``sequence_kept_share_min``, ``_median`` and ``_max`` (means over
        the layers that know them, see :func:`shares`),
        ``nonfinite_backwards``, ``forward_seconds`` and ``backward_seconds`` (sums), and ``layers``: for each name what
        :func:`shares` gives, ``guarded``, whether the guard holds the layer at the exact backward now, and
        ``drop``, what was in force in it in the last step. Also ``step``, the optimizer steps done; ``drop``, the mean
        over layers of what was in force in the last of them, and ``scheduled_drop``, what the schedule had for it;
        ``guarded_layers``, how many are held now, and ``guard_events``, the :attr:`Guard.events` since the last call.
        Where no backward ran (in evaluation mode, say) nothing was dropped: ``drop`` is 0 and ``kept_share`` 1.

        Synchronises with the device once; call it when you log. Layers that ran no backward are left out. Under expert
        parallelism it tells what this rank computed; :func:`lrmoe.parallel.global_metrics` adds the ranks up.
        """
        layers = {name: totals for name, control in self.layers.items() if (totals := control.meter.totals())}
        summary = self.summarize(layers)
        if reset:
            self.reset_metrics()
        return summary

    def summarize(self, totals: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """:meth:`metrics` from the :meth:`Meter.totals` of each layer, say of several ranks together."""
        scheduled, drops = self._last_drop or (float(self.clock.drop), self.clock.drop_L.tolist())
        held = dict(zip(self.layers, self._guard.exact, strict=True))
        in_force = dict(zip(self.layers, drops, strict=True))
        layers = {
            name: {**shares(layer), "guarded": held[name], "drop": in_force[name]} for name, layer in totals.items()
        }
        summary: dict[str, Any] = {"step": self.clock.step, "scheduled_drop": scheduled}
        summary["guarded_layers"] = sum(held.values())
        summary["guard_events"] = [dict(event) for event in self._guard.events]
        # Of no backward at all: nothing was dropped.
        ran = list(layers.values()) or [{**shares(NOTHING), "drop": 0.0}]
        for key in ("drop", *SHARES, *BY_SEQUENCE):
            summary[key] = mean_of_known([layer[key] for layer in ran])
        for key in (NONFINITE, *SECONDS):
            summary[key] = sum(layer[key] for layer in layers.values())
        summary["layers"] = layers
        return summary

    def reset_metrics(self) -> None:
        """Begins a new interval for :meth:`metrics`."""
        for control in self.layers.values():
            control.meter.reset()
        self._guard.events.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON-able values: the position in training, the configuration it belongs to, and the guard's state,
        which is the same on all ranks that decide together."""
        return {
            "step": self.clock.step,
            "config": self.config.to_dict(),
            "layers": _unwrapped(self.layers),
            "guard": self._guard.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`. Call between steps.

        Raises:
            ValueError: if this is no such state, or if it belongs to other layers or to another seed: the draws would
                not continue.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"this is not a recalibrator's state, but {type(state).__name__}")
        missing = {"step", "config", "layers"} - set(state)
        if missing:
            raise ValueError(f"this is not a recalibrator's state: {', '.join(sorted(missing))} missing")
        step = require_count("step", state["step"])
        if not isinstance(state["config"], Mapping) or not isinstance(state["layers"], (list, tuple)):
            raise ValueError("this is not a recalibrator's state: config must be a dictionary and layers a list")
        if list(state["layers"]) != _unwrapped(self.layers):
            raise ValueError(
                f"the state is of layers {state['layers']}, this model has {_unwrapped(self.layers)}; load it into the "
                "model it was saved from"
            )
        if state["config"].get("seed") != self.config.seed:
            raise ValueError(
                f"the state was saved with seed={state['config'].get('seed')}, this recalibrator has "
                f"seed={self.config.seed}; attach with the saved seed to continue its draws"
            )
        guard = Guard(self.config, list(self.layers))
        # States of versions without a guard have none; it then begins here.
        if state.get("guard") is not None:
            guard.load_state_dict(state["guard"])
        self.set_step(step)
        self._guard = guard
        self.clock.set_exact(guard.exact)

    def detach(self) -> None:
        """Gives the model back as it was before :func:`lrmoe.attach`."""
        for handle in self._calls.handles:
            handle.remove()
        self.follow(None)
        self._stepping.close()
        while self._undo:
            self._undo.pop()()
        # Detached before, the model may have another by now.
        if vars(self._model).get("_lrmoe_recalibrator") is self:
            object.__setattr__(self._model, "_lrmoe_recalibrator", None)

    def __getstate__(self) -> dict[str, Any]:
        # A copied model's optimizer is another one, or none yet: somebody has to call the copy's step().
        own = {"_optimizer_hook": None, "_load_group": None}
        return {**vars(self), **own}

    def _take_sums(self) -> dict[int, torch.Tensor]:
        """What the meters have for the guard, by the layer's number; they begin new sums."""
        taken = {control.layer: control.meter.take_sums() for control in self.layers.values()}
        return {layer: sums_3 for layer, sums_3 in taken.items() if sums_3 is not None}

    def _watch(self, sums: dict[int, torch.Tensor]) -> None:
        """Hands the guard the sums of a step."""
        device = next(next(iter(self._hosted.modules.values())).parameters()).device
        sums_L3 = as_sums(sums, len(self.layers), device)
        if self._guard.after_step(sums_L3, self.clock.step + 1, self._hosted.engines(), self._load_group):
            self.clock.set_exact(self._guard.exact)

    def _after_optimizer_step(self, *_: Any) -> None:
        self._step()

    def _before_forward(self, trains: bool) -> None:
        if trains:
            # Before a transform has got hold of the position.
            check_not_transformed(layer_in_words(next(iter(self.layers))))
            if self._config.final_dense_steps and self.clock.config.total_steps is None:
                drop_at(self._config, self.clock.step)  # Raises, saying what is missing.
        if not torch.compiler.is_compiling():
            self._stepping.before_forward(trains)
            if trains:
                self._say_instead()

    def _say_instead(self) -> dict[str, str]:
        """The layers that run something else than LRMoE's experts now; told, once for each thing that they run."""
        instead = self._hosted.run_instead() if self._undo else {}
        for other in dict.fromkeys(instead.values()):
            names = [layer_label(name) for name, runs in instead.items() if runs == other]
            self._once.warn(
                other,
                f"{len(names)} of {len(self.layers)} attached layers ({names[0]}, ...) run "
                f"experts_implementation={other!r}, to which the {type(self._model).__name__} was switched since "
                "attach(): their backward is exact, and nothing is dropped or measured. "
                'set_experts_implementation("lrmoe") takes the recalibration up again; detach() ends it and leaves the '
                "model with what it was switched to",
            )
        return instead


# What wrappers put in front of a module's name; a run may be resumed with or without them.
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def _unwrapped(names: Iterable[str]) -> list[str]:
    return [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names]
