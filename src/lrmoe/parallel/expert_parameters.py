"""Which parameters are experts: each rank holds other ones, so they are neither compared nor averaged like the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_MARK = "lrmoe_expert"
_COUNTED = "lrmoe_counted_rows"


def mark_experts(*parameters: Tensor, group: dist.ProcessGroup | None = None, by_range: bool = True) -> None:
    """Marks parameters of shape (local experts, ...), the first dimension of which is this rank's range of experts.

    The mark is on the object: ``copy.deepcopy`` and ``fully_shard`` make new ones, which have to be marked again.

    Args:
        parameters: of this rank.
        group: the ranks that hold the experts between them; if given, it is checked wherever the mark is used.
        by_range: False if the ranks hold them in another way, see :mod:`lrmoe.parallel.stores.weight_store`.
    """
    # The ranks and not the group, so that the parameter can still be pickled.
    ranks = None if group is None else tuple(dist.get_process_group_ranks(group))
    for parameter in parameters:
        setattr(parameter, _MARK, (ranks, by_range))


def count_slots(parameter: Tensor, counted: Sequence[bool]) -> None:
    """Says which rows of a marked parameter a norm has to count: of an expert in several slots, one."""
    rows = torch.tensor(counted, dtype=torch.bool, device=parameter.device)
    setattr(parameter, _COUNTED, rows)


def counted_rows(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The rows of ``tensor``, of the parameter's shape, that :func:`count_slots` says; all where it said nothing."""
    rows = getattr(parameter, _COUNTED, None)
    return tensor if rows is None else tensor[rows]


def is_expert(parameter: Tensor) -> bool:
    """Whether :func:`mark_experts` marked it."""
    return hasattr(parameter, _MARK)


def check_group(name: str, parameter: Tensor, group: dist.ProcessGroup | None) -> None:
    """Checks that ``group`` is the one whose ranks hold the experts of a marked parameter.

    Raises:
        ValueError: if it is another.
    """
    ranks, _ = getattr(parameter, _MARK, (None, True))
    found = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
    if ranks is not None and ranks != found:
        raise ValueError(
            f"{name} holds experts of the ranks {list(ranks)}, but group has the ranks {list(found)}; give "
            "the expert-parallel group, ExpertParallel.group"
        )


def check_by_range(name: str, parameter: Tensor) -> None:
    """Checks that the rank holds a contiguous range of experts, which is what checkpoints are made of.

    Raises:
        ValueError: if it holds slots of a policy, or a part of every expert.
    """
    _, by_range = getattr(parameter, _MARK, (None, True))
    if not by_range:
        raise ValueError(
            f"{name} holds its experts as the balancing policy places them, which checkpoints do not know; make the "
            'engine with ExpertParallel(..., storage="home") to train with checkpoints under this policy'
        )


def sharding_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which the parts of a DTensor are spread; none for a tensor that is whole."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return ()
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


def is_spread_over(parameter: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether a tensor is a DTensor whose parts are spread over all ranks of ``group``, of more than one rank."""
    if group is None or group.size() == 1:
        return False
    ranks = set(dist.get_process_group_ranks(group))
    return any(ranks <= set(dist.get_process_group_ranks(shards)) for shards in sharding_groups(parameter))
