"""What the ranks of an expert-parallel group tell each other before they save or load: who holds which experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lrmoe.parallel.checkpoint.state import Range
from lrmoe.parallel.expert_parameters import check_by_range, check_group, is_expert, is_spread_over

Row = dict[str, Any]


def row(
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    names: Sequence[Sequence[str]] = (),
    source: Any = None,
    compare: bool = False,
) -> Row:
    """This rank's row of the table, as JSON can hold it.

    Args:
        tensors: parameters and buffers by name.
        group: the expert-parallel group, None for one rank.
        optimizer: whose state of the experts to name.
        names: of its parameters, by group.
        source: what all ranks must agree on.
        compare: whether parameters that are no experts have to be the same on all ranks.

    Raises:
        ValueError: if experts are marked for another group.
    """
    local = {}
    for name, tensor in tensors.items():
        if is_expert(tensor) and not is_spread_over(tensor, group):
            check_group(name, tensor, group)
            check_by_range(name, tensor)
            local[name] = tensor
    shared = {
        name: _fingerprint(tensor)
        for name, tensor in tensors.items()
        if compare and isinstance(tensor, nn.Parameter) and name not in local and not is_spread_over(tensor, group)
    }
    states: dict[str, list[str]] = {name: [] for name in local}
    if optimizer is not None:
        for options, of_group in zip(optimizer.param_groups, names, strict=True):
            for name, parameter in zip(of_group, options["params"], strict=True):
                if name in local:
                    states[name] = sorted(map(str, optimizer.state.get(parameter, {})))
    counts = {name: tensor.shape[0] for name, tensor in local.items()}
    return {"counts": counts, "states": states, "shared": shared, "source": source}


def ranges(table: Sequence[Row], place: int) -> dict[str, Range]:
    """Which experts the rank at ``place`` holds: ranks hold them in ascending order.

    Raises:
        ValueError: if the ranks of the group have different parameters, different state of them, or different sources.
    """
    first = table[0]
    for rank, other in enumerate(table):
        if other["source"] != first["source"]:
            raise ValueError(f"the ranks load different checkpoints: {first['source']} and {other['source']}")
        for name in sorted(first["states"].keys() | other["states"].keys()):
            here, there = other["states"].get(name), first["states"].get(name)
            if here != there:
                raise ValueError(
                    f"the experts {name} have optimizer state {there} on the first rank of their group, but {here} on "
                    f"rank {rank} of it (None: no such experts)"
                )
        for name in sorted(first["shared"].keys() | other["shared"].keys()):
            if other["shared"].get(name) != first["shared"].get(name):
                raise ValueError(
                    f"the parameter {name} is not the same on ranks 0 and {rank} of the group, so it cannot be saved "
                    "once for all: mark it with lrmoe.parallel.mark_experts if it holds experts (fully_shard makes new "
                    "parameters, which have to be marked again), otherwise average its gradient over the ranks"
                )
    found = {}
    for name in first["counts"]:
        counts = [other["counts"][name] for other in table]
        found[name] = Range(sum(counts[:place]), counts[place], sum(counts))
    return found


def _fingerprint(tensor: Tensor) -> list[int]:
    """What tells one rank's tensor from another's: the sum of its bits as integers, the first and the last."""
    if getattr(tensor, "placements", None) is not None:
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return []
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(integers.get(flat.element_size(), torch.int8))
    found: list[int] = torch.stack([bits.sum(dtype=torch.int64), bits[0].long(), bits[-1].long()]).tolist()
    return found
