"""Which parameters are experts: each rank holds other ones, so they are neither compared nor averaged like the rest."""

from __future__ import annotations

from torch import Tensor

_MARK = "lrmoe_expert"


def mark_experts(*parameters: Tensor) -> None:
    """Marks parameters of shape (local experts, ...), the first dimension of which is this rank's range of experts.

    The mark is on the object: ``copy.deepcopy`` and ``fully_shard`` make new ones, which have to be marked again.
    """
    for parameter in parameters:
        setattr(parameter, _MARK, True)


def is_expert(parameter: Tensor) -> bool:
    """Whether :func:`mark_experts` marked it."""
    return bool(getattr(parameter, _MARK, False))
