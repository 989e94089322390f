"""What one MoE layer needs to know of the run around it: configuration, position in training, where to report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.experts.meter import Meter
from lrmoe.recalibration.schedule import drop_at


class Clock:
    """Where training stands; shared by all layers of a model.

    The position lives in small CPU tensors that are changed in place, so that a compiled forward sees a new step
    as new data and not as a reason to recompile.

    Attributes:
        position_3: int64, (seed, step, microbatch); keys the draws.
        drop: fp64 scalar, the drop scheduled for this step.
        drop_L: fp64, the drop in force in each of the L layers: the scheduled one, or 0.
    """

    def __init__(self, config: LRMoEConfig, *, layers: int = 1, step: int = 0, microbatch: int = 0) -> None:
        self.config = config
        self.position_3 = torch.tensor([config.seed, step, microbatch], dtype=torch.int64, device="cpu")
        self.drop = torch.tensor(drop_at(config, step), dtype=torch.float64, device="cpu")
        self.drop_L = self.drop.repeat(layers)
        self._exact_L = torch.zeros(layers, dtype=torch.bool, device="cpu")

    @property
    def step(self) -> int:
        return int(self.position_3[1])

    @property
    def microbatch(self) -> int:
        return int(self.position_3[2])

    def move_to(self, *, step: int, microbatch: int = 0) -> None:
        """Sets the optimizer step, and the microbatch in it, that the next forward belongs to."""
        self.position_3.copy_(torch.tensor([self.config.seed, step, microbatch], dtype=torch.int64, device="cpu"))
        self.drop.fill_(drop_at(self.config, step))
        self._put_in_force()

    def set_exact(self, exact: Sequence[bool]) -> None:
        """Says which layers drop nothing from now on, whatever is scheduled; one flag for each layer."""
        self._exact_L.copy_(torch.tensor(exact, dtype=torch.bool, device="cpu"))
        self._put_in_force()

    def _put_in_force(self) -> None:
        self.drop_L.copy_(torch.where(self._exact_L, 0.0, self.drop))

    def __getstate__(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "step": self.step,
            "microbatch": self.microbatch,
            "exact": self._exact_L.tolist(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        exact = state["exact"]
        self.__init__(  # type: ignore[misc]
            state["config"], layers=len(exact), step=state["step"], microbatch=state["microbatch"]
        )
        self.set_exact(exact)


class LayerControl:
    """Handed to a layer's forward; moved on, through its clock, by the :class:`~lrmoe.control.Recalibrator`.

    Attributes:
        clock: the position in training, shared with the model's other layers.
        meter: where the layer's backward passes report.
        identity_2: int64 CPU, (layer index, meter handle).
        drop: fp64 CPU scalar, the drop in force; a part of the clock's ``drop_L``.
        token_mask_T: bool, which tokens of the running forward are real, or None for all.
    """

    def __init__(self, clock: Clock, *, layer: int = 0, name: str = "", watched: bool = False) -> None:
        self.clock = clock
        self.layer = layer
        self.name = name
        self.meter = Meter(watched=watched)
        self.drop = clock.drop_L[layer]
        self.identity_2 = torch.tensor([layer, self.meter.handle], dtype=torch.int64, device="cpu")
        self.token_mask_T: Tensor | None = None

    @property
    def config(self) -> LRMoEConfig:
        return self.clock.config

    def mask_for(self, tokens_TD: Tensor) -> Tensor | None:
        """The model's padding mask where it is about these tokens: not where they are a part of the model's."""
        mask_T = self.token_mask_T
        if mask_T is None or mask_T.shape[0] != tokens_TD.shape[0]:
            return None
        return mask_T.to(tokens_TD.device)

    def __getstate__(self) -> dict[str, Any]:
        return {"clock": self.clock, "layer": self.layer, "name": self.name, "watched": self.meter.watched}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied or unpickled layer reports to a meter of its own.
        self.__init__(**state)  # type: ignore[misc]


def exact_control(name: str) -> LayerControl:
    """The control of a layer that nobody moves: exact backward, reporting to no meter."""
    control = LayerControl(Clock(LRMoEConfig(drop=0.0)), name=name)
    # Layers of any number of experts share it, whose loads do not add up.
    control.identity_2[1] = 0
    return control
