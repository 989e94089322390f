"""The norm of the whole model's gradient where every rank holds other experts: each expert counted once, the rest once.

A parameter is one of three things. A plain tensor that is the same on all ranks counts once. An expert (see
:func:`~lrmoe.parallel.expert_parameters.mark_experts`) counts on the rank that holds it, and the ranks of the
expert-parallel group add up. A DTensor counts by its own mesh: its shards add up, copies count once; if it is marked as
well, the expert-parallel group adds up what the mesh did not. Replicas of experts are no parameters and have no part in
this.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lrmoe.parallel.expert_parameters import check_group, counted_rows, is_expert, is_spread_over, sharding_groups
from lrmoe.parallel.meeting import meet
from lrmoe.recalibration.norms import norm_of_norms, tensor_norms

_WHAT = "gradient norm"


def total_norm(
    parameters: nn.Module | Iterable[Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    experts: Iterable[Tensor] | None = None,
    error_if_nonfinite: bool = False,
    timeout_s: float | None = None,
) -> Tensor:
    """Euclidean norm of the gradients of all parameters of all ranks, the same on every rank bit for bit.

    Every rank of the group calls this with the same parameters in the same order, after the gradients were averaged. A
    parameter without a gradient counts as zero. Norms are added in fp64, in the order of the parameters and then of the
    ranks, and no square leaves its range, however large or small finite gradients are.

    Args:
        parameters: a module, or parameters.
        group: the expert-parallel group; the default group if None. Without torch.distributed there is one rank.
        experts: which parameters are experts, in place of the marked ones.
        error_if_nonfinite: raise if the norm is infinite or NaN.
        timeout_s: seconds to wait for other ranks; the group's own timeout if None.

    Returns:
        fp32 scalar, fp64 if all parameters are; infinite if the norm is above what that can hold (fp32: 3.4e38).

    Raises:
        ValueError: if a tensor of ``experts`` is none of the parameters, if experts are marked for another group, or
            if a gradient that all ranks should share differs between them.
        RuntimeError: if ``error_if_nonfinite`` and the norm is not finite, on all ranks alike.
        RankFailure: if a rank is lost or too late.
    """
    items = _list(parameters)
    norm = _total_norm(items, group, experts, error_if_nonfinite, timeout_s)
    return _as_returned(norm, items)


def _total_norm(
    items: list[Tensor],
    group: dist.ProcessGroup | None,
    experts: Iterable[Tensor] | None,
    error_if_nonfinite: bool,
    timeout_s: float | None,
) -> Tensor:
    """:func:`total_norm` in fp64."""
    group = _group(group)
    both = _norms(items, _is_expert(items, experts, group), group, timeout_s)
    if group is not None:
        # Bits, because counts travel as they are and NaN is equal to itself that way.
        table = meet(_WHAT, both.view(torch.int64), group, timeout_s=timeout_s)
        if bool((table[:, 0] != table[0, 0]).any()):
            norms = ", ".join(f"{value:.9g}" for value in table[:, 0].clone().view(torch.float64).tolist())
            raise ValueError(
                "the gradients of the parameters that all ranks share differ between the ranks (norms "
                f"{norms} on ranks {dist.get_process_group_ranks(group)}): average them first, e.g. with "
                "DistributedDataParallel, or mark the parameters that are experts with lrmoe.parallel.mark_experts"
            )
        both = torch.cat([table[:1, 0], table[:, 1]]).view(torch.float64).to(both.device)
    norm = norm_of_norms(both)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}, so they cannot be clipped; look for the first loss that is "
            "not finite, or pass error_if_nonfinite=False"
        )
    return norm


def _as_returned(norm: Tensor, items: list[Tensor]) -> Tensor:
    return norm.to(torch.float64 if items and all(p.dtype == torch.float64 for p in items) else torch.float32)


def clip_grad_norm_(
    parameters: nn.Module | Iterable[Tensor],
    max_norm: float,
    *,
    group: dist.ProcessGroup | None = None,
    experts: Iterable[Tensor] | None = None,
    error_if_nonfinite: bool = False,
    timeout_s: float | None = None,
) -> Tensor:
    """Scales all gradients by ``max_norm / (norm + 1e-6)`` where that is below 1, as ``torch.nn.utils.clip_grad_norm_``
    does, with the norm of :func:`total_norm`: by the same factor on all ranks.

    Args:
        max_norm: the largest norm that is left as it is.

    Returns:
        the norm before.

    Raises:
        ValueError, RuntimeError, RankFailure: as :func:`total_norm`; the gradients are then untouched.
    """
    items = _list(parameters)
    norm = _total_norm(items, group, experts, error_if_nonfinite, timeout_s)
    with torch.no_grad():
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # In two steps where fp32 would hold the factor badly, or flush it to zero. The norms have been waited for.
        steps = [factor] if float(factor) >= 2.0**-120 else [torch.full_like(factor, 2.0**-64), factor * 2.0**64]
        for parameter in items:
            if parameter.grad is not None:
                for step in steps:
                    _local(parameter.grad).mul_(step.to(parameter.grad.device))
    return _as_returned(norm, items)


def _norms(
    items: list[Tensor], is_local: list[bool], group: dist.ProcessGroup | None, timeout_s: float | None
) -> Tensor:
    """Two norms, (2,) fp64: of what all ranks of the group share, and of what this one holds alone."""
    device = items[0].device if items else torch.device("cpu")
    norm_X = tensor_norms((_counted(parameter) for parameter in items), device)
    # One reduction a mesh, for all its tensors. Whether a parameter has a gradient here decides nothing about that.
    by_mesh: dict[tuple[tuple[dist.ProcessGroup, ...], bool], list[Tensor]] = {}
    for parameter, local, norm in zip(items, is_local, norm_X, strict=True):
        key = (sharding_groups(parameter), local and not is_spread_over(parameter, group))
        by_mesh.setdefault(key, []).append(norm)
    found: dict[bool, list[Tensor]] = {False: [], True: []}
    for (meshes, local), norms in by_mesh.items():
        norm = norm_of_norms(torch.stack(norms))
        for mesh in meshes:
            parts = meet(_WHAT, norm.view(1).view(torch.int64), mesh, timeout_s=timeout_s).to(device)
            norm = norm_of_norms(parts.contiguous().view(torch.float64)[:, 0])
        found[local].append(norm)
    none = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm_of_norms(torch.stack([none, *found[local]])) for local in (False, True)])


def _counted(parameter: Tensor) -> Tensor:
    """What of the parameter's gradient counts on this rank; nothing where there is no gradient."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(0, device=parameter.device)
    return counted_rows(_local(gradient, like=parameter).detach(), parameter)


def _local(gradient: Tensor, like: Tensor | None = None) -> Tensor:
    """This rank's part of a gradient, sharded as its parameter is."""
    if getattr(gradient, "placements", None) is None:
        return gradient
    wanted = getattr(like, "placements", None)
    if wanted is not None and gradient.placements != wanted:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=wanted)  # type: ignore[attr-defined]
    local: Tensor = gradient.to_local()  # type: ignore[attr-defined]
    return local


def _list(parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    return list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)


def _is_expert(items: list[Tensor], experts: Iterable[Tensor] | None, group: dist.ProcessGroup | None) -> list[bool]:
    if experts is None:
        for parameter in items:
            if is_expert(parameter) and not is_spread_over(parameter, group):
                check_group(f"a parameter of shape {tuple(parameter.shape)}", parameter, group)
        return [is_expert(parameter) for parameter in items]
    chosen = {id(parameter) for parameter in experts}
    strangers = len(chosen - {id(parameter) for parameter in items})
    if strangers:
        raise ValueError(f"{strangers} of the tensors in experts are none of the parameters; give the parameters")
    return [id(parameter) in chosen for parameter in items]


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is not None:
        return group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
