"""What a caller of ExpertParallel may get wrong on one rank, said before anything is exchanged."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.balance import get
from lrmoe.balance.policy import Policy
from lrmoe.config import require_count
from lrmoe.experts.compacted import Bank
from lrmoe.experts.operator import product_dtype
from lrmoe.experts.stored_weights import require_usable
from lrmoe.experts.validation import check_arguments, check_ids, check_not_forward_mode, check_not_transformed
from lrmoe.ops import activations
from lrmoe.parallel.stores.weight_store import WeightStore


class Tensors(NamedTuple):
    """The tensors of a call, as :meth:`lrmoe.parallel.ExpertParallel.routed_experts` describes them."""

    x_TD: Tensor
    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    token_mask_T: Tensor | None

    @property
    def owned(self) -> Bank:
        """The weights that this rank owns."""
        return Bank(self.gate_up_proj, self.down_proj, self.gate_up_bias, self.down_bias)

    @property
    def trainable(self) -> tuple[Tensor | None, ...]:
        """What may want a gradient."""
        return (self.x_TD, self.topk_weights_TK, *self[3:7])


def check_call(
    tensors: Tensors, activation: str, store: WeightStore, *, num_experts: int, rank: int
) -> tuple[torch.dtype, bool]:
    """(dtype of the products, whether a backward may follow), of arguments found right.

    Raises:
        ValueError: naming the argument, its value and the mend.
    """
    for name, tensor in tensors._asdict().items():
        _check_plain(name, tensor)
    # Before the store hands on stand-ins of them.
    for name, weight in zip(Tensors._fields[3:7], tensors[3:7], strict=True):
        if isinstance(weight, Tensor):
            _check_weight(name, weight)
    owned = tensors.owned
    if all(isinstance(t, Tensor) and t.dim() == dim for t, dim in zip(tensors[:5], (2, 2, 2, 3, 3), strict=True)):
        owned = store.as_experts(owned, tensors.x_TD.shape[1])
    check_arguments(
        tensors.x_TD,
        tensors.topk_ids_TK,
        tensors.topk_weights_TK,
        owned.gate_up_proj,
        owned.down_proj,
        owned.gate_up_bias,
        owned.down_bias,
        tensors.token_mask_T,
    )
    expected = store.num_owned(num_experts)
    if owned.gate_up_proj.shape[0] != expected:
        raise ValueError(
            f"gate_up_proj has {owned.gate_up_proj.shape[0]} experts; rank {rank} owns {expected} of the "
            f"{num_experts}: give what ExpertParallel.local returns"
        )
    check_ids(tensors.topk_ids_TK, num_experts)
    dtype = product_dtype(tensors.x_TD, tensors.gate_up_proj, activation)
    activations.get(activation)
    check_not_forward_mode(*tensors.trainable)
    check_not_transformed("ExpertParallel.routed_experts", forward_mode=False)
    return dtype, torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors.trainable)


def member_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group that was asked for, which this process is in.

    Raises:
        ValueError: if there is none, or this process is not in it.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group first")
    if not isinstance(found, dist.ProcessGroup) and found != dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group={found!r} must be a torch.distributed.ProcessGroup, or None for the default group")
    if not isinstance(found, dist.ProcessGroup) or found.rank() < 0:
        raise ValueError("this process is no member of the group; make an ExpertParallel on the group's ranks only")
    return found


def chosen_policy(policy: str | Policy, slots: int | None, capacity: float | None) -> Policy:
    """The policy of that name with those options, or the one that was given.

    Raises:
        ValueError: if the name is not known, an option is out of range, or it is no policy.
    """
    if isinstance(policy, str):
        chosen = {} if slots is None else {"slots": require_count("slots", slots)}
        return get(policy, **chosen, **({} if capacity is None else {"capacity": capacity}))
    for name, value in (("slots", slots), ("capacity", capacity)):
        if value is not None:
            raise ValueError(f"{name}={value!r} is for policies given by name; give it to the policy itself")
    if not all(hasattr(policy, part) for part in ("name", "slots", "plan", "observe")):
        raise ValueError(
            f"policy={policy!r} is neither the name of a policy nor one, see lrmoe.balance.policy.Policy; "
            'choose e.g. "lrmoe"'
        )
    return policy


def _check_plain(name: str, tensor: Tensor | None) -> None:
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return
    text = ", ".join(map(str, placements))
    if any(getattr(placement, "dim", 0) != 0 for placement in placements):
        raise ValueError(
            f"{name} is sharded inside the experts ({text}): every rank would see a part of each norm and gradient; "
            "expert tensor parallelism is not supported, give each rank whole experts"
        )
    raise ValueError(
        f"{name} is a DTensor ({text}); give this rank's own part as a plain tensor, e.g. by .to_local(), or, of "
        "parameters that FSDP2 shards, inside the forward of the module that it wraps"
    )


def _check_weight(name: str, weight: Tensor) -> None:
    require_usable(name, weight)
    # DeepSpeed's own mark of parameters that are not the same on all ranks.
    if hasattr(weight, "ds_id") and getattr(weight, "allreduce", True):
        raise ValueError(
            f"{name} is partitioned by DeepSpeed ZeRO-3 as if all ranks had the same experts: what it gathers mixes "
            "the experts of one rank with those of another. Train without ZeRO-3 beside ExpertParallel (DDP or FSDP2), "
            "or with ZeRO-3 and whole experts"
        )
