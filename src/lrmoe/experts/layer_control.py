"""What one MoE layer needs to know of the run around it: configuration, position in training, where to report.

Each forward owns its position and its mask. A position is a tensor that nobody changes: moving on makes another one.
What a layer runs with is settled when its forward runs, by :meth:`LayerControl.moment`, and a recompute of that
forward, whenever it comes, is handed the same.

T rows of a layer, L layers of a model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.experts.meter import Meter
from lrmoe.experts.recompute import in_backward, region
from lrmoe.experts.tokens import Tokens
from lrmoe.recalibration.schedule import drop_at


class Moment(NamedTuple):
    """What one forward of one layer runs with.

    ``position_3``: int64 CPU, (seed, step, microbatch); ``drop_L``: fp64 CPU, the drop in force in each layer;
    ``token_mask_T``: bool on the rows' device, which of them are real, or None for all;
    ``sequence_T``: int64 there, the number in [0, T) of the sequence that each row belongs to, None where unknown.
    """

    position_3: Tensor
    drop_L: Tensor
    token_mask_T: Tensor | None
    sequence_T: Tensor | None = None


def moment_of(config: LRMoEConfig, *, step: int, microbatch: int) -> Moment:
    """That of a call which brings its position itself, and its mask as an argument: of the bare operators."""
    return Moment(
        torch.tensor([config.seed, step, microbatch], dtype=torch.int64, device="cpu"),
        torch.tensor([drop_at(config, step)], dtype=torch.float64, device="cpu"),
        None,
    )


class Call:
    """A running call of a module that contains layers.

    Attributes:
        module: the module.
        tokens: what it was called with; None if that is unknown.
        counts: whether it is a microbatch of its own, the outermost call of a forward trained on.
    """

    __slots__ = ("counts", "module", "tokens")

    def __init__(self, module: object, tokens: Tokens | None, *, counts: bool) -> None:
        self.module = module
        self.tokens = tokens
        self.counts = counts


class At(NamedTuple):
    """Where training stood when a forward ran, and with which tokens."""

    position_3: Tensor
    drop_L: Tensor
    tokens: Tokens | None


# Forwards that reentrant checkpoints may still repeat. More than a step has are forwards that nobody trains on.
_AWAITED = 64


class Clock:
    """Where training stands; shared by all layers of a model.

    The position lives in small CPU tensors, so that a compiled forward sees a new step as new data and not as a reason
    to recompile. None of them is ever changed in place: a recompute may still hold the old one.

    Attributes:
        position_3: int64, (seed, step, microbatch); keys the draws.
        drop: fp64 scalar, the drop scheduled for this step.
        drop_L: fp64, the drop in force in each of the L layers: the scheduled one, or 0.
        calls: the running calls of the model and of parts of it, outermost first; see :mod:`lrmoe.calls`.
        followed: somebody has put this clock back to the forward that a running recompute repeats.
        outside: called with a layer's name where it trains outside of any call; None where nobody counts calls.
        unclear: called with a layer's name and the reason where a mask cannot be laid over its rows.
    """

    def __init__(self, config: LRMoEConfig, *, layers: int = 1, step: int = 0, microbatch: int = 0) -> None:
        self.config = config
        self._exact_L = torch.zeros(layers, dtype=torch.bool, device="cpu")
        self._next_3 = torch.tensor([0, 0, 1], dtype=torch.int64, device="cpu")
        self.calls: list[Call] = []
        self.followed = False
        self.outside: Callable[[str], None] | None = None
        self.unclear: Callable[[str, str], None] | None = None
        self._last: At | None = None
        self._regions: weakref.WeakKeyDictionary[Any, dict[int, At]] = weakref.WeakKeyDictionary()
        self._awaited: dict[int, list[At]] = {}
        self.move_to(step=step, microbatch=microbatch)

    @property
    def step(self) -> int:
        return int(self.position_3[1])

    @property
    def microbatch(self) -> int:
        return int(self.position_3[2])

    @property
    def now(self) -> At:
        """Where training stands, and with which tokens."""
        return At(self.position_3, self.drop_L, self.calls[-1].tokens if self.calls else None)

    def move_to(self, *, step: int, microbatch: int = 0) -> None:
        """Sets the optimizer step, and the microbatch in it, that the next forward belongs to."""
        self.position_3 = torch.tensor([self.config.seed, step, microbatch], dtype=torch.int64, device="cpu")
        self.drop = torch.tensor(drop_at(self.config, step), dtype=torch.float64, device="cpu")
        self._awaited.clear()
        self._put_in_force()

    def next_microbatch(self) -> None:
        """The next forward is one microbatch further."""
        self.position_3 = self.position_3 + self._next_3

    def set_exact(self, exact: Sequence[bool]) -> None:
        """Says which layers drop nothing from now on, whatever is scheduled; one flag for each layer."""
        self._exact_L = torch.tensor(exact, dtype=torch.bool, device="cpu")
        self._put_in_force()

    def _put_in_force(self) -> None:
        self.drop_L = torch.where(self._exact_L, 0.0, self.drop)

    def at_forward_of(self, layer: int, name: str) -> At:
        """Where the forward of this layer that runs now stands; of a recompute, where the forward it repeats stood."""
        now = self.now
        # A compiled region recomputes from values it has saved itself.
        if torch.compiler.is_compiling() or self.followed:
            return now
        counted = bool(self.calls) and self.calls[0].counts
        if in_backward() and not counted:
            return self._at_repeated(layer)
        self._last = now
        if torch.is_grad_enabled():
            if not self.calls and self.outside is not None:
                self.outside(name)
            if (here := region()) is not None:
                self._regions.setdefault(here, {})[layer] = now
        elif counted:
            # The first pass of a reentrant checkpoint, or a part that nobody trains.
            awaited = self._awaited.setdefault(layer, [])
            awaited.append(now)
            del awaited[:-_AWAITED]
        return now

    @contextmanager
    def back_at(self, then: At) -> Iterator[None]:
        """A block in which forwards are where they were ``then``, for somebody who knows what a recompute repeats."""
        before = self.position_3, self.drop_L, self.calls, self.followed
        self.position_3, self.drop_L, self.followed = then.position_3, then.drop_L, True
        self.calls = [Call(None, then.tokens, counts=False)]
        try:
            yield
        finally:
            self.position_3, self.drop_L, self.calls, self.followed = before

    @property
    def awaits_recompute(self) -> bool:
        """Whether reentrant checkpoints may still repeat forwards of counted calls."""
        return any(self._awaited.values())

    def _at_repeated(self, layer: int) -> At:
        here = region()
        found = None if here is None else self._regions.get(here, {}).get(layer)
        if found is None and here is None and (awaited := self._awaited.get(layer)):
            # Autograd goes back through what was computed last.
            found = awaited.pop()
        if found is None:
            found = self._last or self.now
        # A module that brings its own tokens does so in the recompute as well; one that works on those of the call
        # around it has no such call now.
        own = self.calls[-1].tokens if self.calls else None
        return found if own is None else found._replace(tokens=own)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "step": self.step,
            "microbatch": self.microbatch,
            "exact": self._exact_L.tolist(),
            "outside": self.outside,
            "unclear": self.unclear,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        exact = state["exact"]
        self.__init__(  # type: ignore[misc]
            state["config"], layers=len(exact), step=state["step"], microbatch=state["microbatch"]
        )
        self.outside, self.unclear = state["outside"], state["unclear"]
        self.set_exact(exact)


class LayerControl:
    """Handed to a layer's forward; moved on, through its clock, by the :class:`~lrmoe.control.Recalibrator`.

    Attributes:
        clock: the position in training, shared with the model's other layers.
        layer: the layer's number in the model.
        name: the layer's name in the model.
        meter: where the layer's backward passes report.
        identity_3: int64 CPU, (layer index, meter handle, place in the clock's ``drop_L``).
    """

    def __init__(self, clock: Clock, *, layer: int = 0, name: str = "", watched: bool = False) -> None:
        self.clock = clock
        self.layer = layer
        self.name = name
        self.meter = Meter(watched=watched)
        self.identity_3 = torch.tensor([layer, self.meter.handle, layer], dtype=torch.int64, device="cpu")

    @property
    def config(self) -> LRMoEConfig:
        return self.clock.config

    @property
    def drop(self) -> Tensor:
        """The drop in force in this layer, an fp64 CPU scalar."""
        return self.clock.drop_L[self.layer]

    def moment(self, x: Tensor, *, batch_major: bool = False) -> Moment:
        """What a forward of this layer on these rows runs with. Call it once a forward.

        Args:
            x: the layer's input, (..., D).
            batch_major: rows that come flattened, (T, D), run through one sequence after the other.
        """
        at = self.clock.at_forward_of(self.layer, self.name)
        mask_T, doubt, sequence_T = None, None, None
        if at.tokens is not None:
            mask_T, doubt = at.tokens.real_rows(x.shape[:-1], batch_major=batch_major)
            sequence_T = at.tokens.row_sequences(x.shape[:-1], batch_major=batch_major)
        if doubt is not None and self.clock.unclear is not None and not torch.compiler.is_compiling():
            self.clock.unclear(self.name, doubt)
        on_device = (None if rows_T is None else rows_T.to(x.device) for rows_T in (mask_T, sequence_T))
        return Moment(at.position_3, at.drop_L, *on_device)

    def __getstate__(self) -> dict[str, Any]:
        return {"clock": self.clock, "layer": self.layer, "name": self.name, "watched": self.meter.watched}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied or unpickled layer reports to a meter of its own.
        self.__init__(**state)  # type: ignore[misc]


def exact_control(name: str) -> LayerControl:
    """The control of a layer that nobody moves: exact backward, reporting to no meter."""
    control = LayerControl(Clock(LRMoEConfig(drop=0.0)), name=name)
    # Layers of any number of experts share it, whose loads do not add up.
    control.identity_3[1] = 0
    return control
