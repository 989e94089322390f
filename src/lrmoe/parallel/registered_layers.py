"""Which parameters are those of a layer, so that its experts can move with all that optimizers keep for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class RegisteredLayers:
    """Parameters by the number of their layer, each (rows, ...): a row an expert or slot of this rank."""

    def __init__(self) -> None:
        self._layers: dict[int, list[Tensor]] = {}
        self._numbers: dict[int, int] = {}

    def add(self, layer: int, owned: Sequence[Tensor]) -> None:
        """Says what a layer's are, in place of what was said before."""
        self._layers[layer] = list(owned)
        # By identity: the parameters are held above, so none of these is ever another's.
        self._numbers = {id(weight): number for number, weights in self._layers.items() for weight in weights}

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._layers))

    @property
    def device(self) -> torch.device:
        """Of the parameters; the CPU as long as there are none."""
        return next((weight.device for weights in self._layers.values() for weight in weights), torch.device("cpu"))

    def next_number(self) -> int:
        """One more than the largest number so far."""
        return max(self._layers, default=-1) + 1

    def number_of(self, weight: Tensor) -> int | None:
        """The layer of a parameter; None if it is not registered."""
        return self._numbers.get(id(weight))

    def weights(self, layer: int) -> list[Tensor]:
        """The parameters of a registered layer."""
        return self._layers[layer]

    def movable(self, layer: int, optimizers: Sequence[torch.optim.Optimizer], policy: str) -> list[Tensor]:
        """All tensors whose rows go with the experts of a layer: its parameters, and what the optimizers keep for each
        row of them, be it moments, factors of these or master copies.

        Args:
            policy: the name of the one that moves experts, for messages.

        Raises:
            ValueError: if the layer is not registered, no optimizer has a parameter of it that is trained, or one keeps
                what is not by row.
        """
        if layer not in self._layers:
            raise ValueError(
                f"policy {policy!r} moves experts of layer {layer}, whose parameters are not known: call "
                "ExpertParallel.register(layer, ...) for each layer, or lrmoe.parallel.parallelize"
            )
        owned = self._layers[layer]
        known = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        for weight in owned:
            if weight.requires_grad and id(weight) not in known:
                raise ValueError(
                    f"policy {policy!r} moves experts, and their optimizer state has to go with them, but a parameter "
                    f"of layer {layer}, shape {tuple(weight.shape)}, is in no optimizer given to ExpertParallel.step: "
                    "make the optimizer after parallelize, and call step(optimizer), with all of them if there are more"
                )
        return [*owned, *(value for weight in owned for value in _kept_for(weight, optimizers))]


def _kept_for(weight: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        state = optimizer.state.get(weight, {})
        for key in sorted(state, key=str):
            value = state[key]
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue  # Counts and the like, the same for all experts.
            if value.shape[0] != weight.shape[0]:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(weight.shape)}; that is not by expert and cannot move with one: take another optimizer, "
                    'or ExpertParallel(..., storage="home")'
                )
            yield value
