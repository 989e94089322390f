"""An optimizer in a checkpoint: tensors go with the parameters' names, everything else into the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lrmoe.parallel.checkpoint.state import Item, Range, Saved, state_items


def describe(optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What is no tensor: the options of each group, and of each parameter the keys of its state, in order."""
    groups, states = [], {}
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        options = {key: _plain(value) for key, value in group.items() if key != "params"}
        groups.append({"params": list(of_group), "options": options})
        for name, parameter in zip(of_group, group["params"], strict=True):
            if parameter in optimizer.state:
                states[name] = [
                    {"key": key, "tensor": True} if isinstance(value, Tensor) else {"key": key, "value": value}
                    for key, value in optimizer.state[parameter].items()
                ]
    return {"groups": groups, "states": states}


def items_of(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], ranges: Mapping[str, Range]
) -> list[Item]:
    """The tensors of the optimizer's state.

    Raises:
        ValueError: for one that cannot be told apart by expert.
    """
    found: list[Item] = []
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        for name, parameter in zip(of_group, group["params"], strict=True):
            found += state_items(name, optimizer.state.get(parameter, {}), ranges.get(name))
    return found


class Restored:
    """An optimizer's state, made as a checkpoint has it, to be read into and then adopted.

    Args:
        optimizer: of this run, new or used; untouched until :meth:`adopt`.
        names: of its parameters, by group.
        ranges: which of them are experts.
        described: what :func:`describe` returned in the run that saved.
        saved: the tensors of the checkpoint.

    Attributes:
        items: the tensors to read into.
        differences: why the optimizer cannot take the state, one line each.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Sequence[Sequence[str]],
        ranges: Mapping[str, Range],
        described: Mapping[str, Any] | None,
        saved: Mapping[str, Saved],
    ) -> None:
        self.items: list[Item] = []
        self.differences: list[str] = []
        self._optimizer = optimizer
        self._options: list[Mapping[str, Any]] = []
        self._states: dict[Tensor, dict[str, Any]] = {}
        if described is None:
            self.differences.append("the checkpoint has no optimizer; load it without optimizer=")
            return
        for group, of_group in zip(optimizer.param_groups, names, strict=True):
            same = [known for known in described["groups"] if set(known["params"]) == set(of_group)]
            if not same:
                self.differences.append(
                    f"no group of the saved optimizer has the parameters of this one's group [{_some(of_group)}]"
                )
                continue
            self._options.append(same[0]["options"])
            for name, parameter in zip(of_group, group["params"], strict=True):
                entries = described["states"].get(name)
                if entries is not None:
                    self._states[parameter] = {
                        entry["key"]: self._tensor(name, entry["key"], parameter, group, ranges.get(name), saved)
                        if entry.get("tensor")
                        else entry["value"]
                        for entry in entries
                    }

    def _tensor(
        self,
        name: str,
        key: str,
        parameter: Tensor,
        group: Mapping[str, Any],
        experts: Range | None,
        saved: Mapping[str, Saved],
    ) -> Tensor | None:
        found = saved.get(f"optimizer.{name}.{key}")
        if found is None:
            self.differences.append(f"optimizer.{name}.{key} is not in the checkpoint, though its manifest lists it")
            return None
        shape = found.shape
        experts = experts if shape else None
        if experts is not None:
            shape = (experts.count, *shape[1:])
        if getattr(parameter, "placements", None) is not None and shape:
            if shape != tuple(parameter.shape):
                self.differences.append(
                    f"optimizer.{name}.{key} is {shape} and its parameter, a DTensor, {tuple(parameter.shape)}: how to "
                    "shard it is not known"
                )
                return None
            tensor = torch.zeros_like(parameter.detach(), dtype=found.dtype)
        else:
            # As torch does: step counts stay on the CPU unless the kernel needs them where the parameter is.
            near = key != "step" or group.get("capturable") or group.get("fused")
            tensor = torch.zeros(shape, dtype=found.dtype, device=parameter.device if near else "cpu")
        self.items.append(Item(f"optimizer.{name}.{key}", tensor, experts))
        return tensor

    def adopt(self) -> None:
        """Gives the optimizer the state and the options of its groups."""
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            for parameter in group["params"]:
                self._optimizer.state.pop(parameter, None)
                if parameter in self._states:
                    self._optimizer.state[parameter] = self._states[parameter]
            for key, value in options.items():
                current = group.get(key)
                if isinstance(current, Tensor):
                    current.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(current, tuple) else value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
