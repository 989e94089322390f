"""What a caller may get wrong, said before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd.forward_ad import unpack_dual

from lrmoe.experts.stored_weights import require_usable

# A second derivative, of the operator on one process and over ranks.
ONCE = (
    "routed_experts can be differentiated once: routed_experts_backward has no derivative of its own, as "
    "create_graph=True, gradient penalties and Hessians need it"
)


def check_arguments(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    token_mask_T: Tensor | None,
) -> None:
    """Shapes and kinds of the arguments of :func:`lrmoe.routed_experts`; looks at no values."""
    for name, tensor, required in (
        ("x_TD", x_TD, True),
        ("topk_ids_TK", topk_ids_TK, True),
        ("topk_weights_TK", topk_weights_TK, True),
        ("gate_up_proj", gate_up_proj, True),
        ("down_proj", down_proj, True),
        ("gate_up_bias", gate_up_bias, False),
        ("down_bias", down_bias, False),
        ("token_mask_T", token_mask_T, False),
    ):
        if not isinstance(tensor, Tensor) and (required or tensor is not None):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    for name, tensor in (
        ("gate_up_proj", gate_up_proj),
        ("down_proj", down_proj),
        ("gate_up_bias", gate_up_bias),
        ("down_bias", down_bias),
    ):
        if tensor is not None:
            require_usable(name, tensor)
    if x_TD.dim() != 2:
        raise ValueError(f"x_TD must be (tokens, width), got shape {_shape(x_TD)}; flatten batch and sequence first")
    num_tokens, dim = x_TD.shape
    if topk_ids_TK.dim() != 2 or topk_ids_TK.shape[0] != num_tokens:
        raise ValueError(f"topk_ids_TK must be ({num_tokens}, K), got shape {_shape(topk_ids_TK)}")
    if topk_ids_TK.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"topk_ids_TK must be int64 or int32 expert ids, got {topk_ids_TK.dtype}")
    _expect("topk_weights_TK", topk_weights_TK, topk_ids_TK.shape, "the shape of topk_ids_TK")
    if gate_up_proj.dim() != 3 or gate_up_proj.shape[1] % 2 or gate_up_proj.shape[2] != dim:
        raise ValueError(
            f"gate_up_proj must be (experts, 2 * expert width, {dim}) for tokens of width {dim}, got shape "
            f"{_shape(gate_up_proj)}; weights stored input-first are passed as .transpose(1, 2)"
        )
    num_experts, two_width = gate_up_proj.shape[0], gate_up_proj.shape[1]
    if num_experts < 1:
        raise ValueError("gate_up_proj has no expert; at least one is needed")
    if topk_ids_TK.shape[1] < 1:
        raise ValueError("topk_ids_TK must name at least one expert per token (K >= 1); use id -1 for none")
    _expect("down_proj", down_proj, (num_experts, dim, two_width // 2), "(experts, width, expert width)")
    if gate_up_bias is not None:
        _expect("gate_up_bias", gate_up_bias, (num_experts, two_width), "(experts, 2 * expert width)")
    if down_bias is not None:
        _expect("down_bias", down_bias, (num_experts, dim), "(experts, width)")
    if token_mask_T is not None:
        _expect("token_mask_T", token_mask_T, (num_tokens,), "(tokens,)")
        if token_mask_T.dtype != torch.bool:
            raise ValueError(f"token_mask_T must be bool (True for real tokens), got {token_mask_T.dtype}")
    for name, tensor in (
        ("x_TD", x_TD),
        ("topk_weights_TK", topk_weights_TK),
        ("gate_up_proj", gate_up_proj),
        ("down_proj", down_proj),
        ("gate_up_bias", gate_up_bias),
        ("down_bias", down_bias),
    ):
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
        _expect_device(name, tensor, x_TD)
    _expect_device("topk_ids_TK", topk_ids_TK, x_TD)
    _expect_device("token_mask_T", token_mask_T, x_TD)


def check_not_forward_mode(*tensors: Tensor | None) -> None:
    """No argument carries a tangent: the operator would drop it, and the derivative would silently be zero.

    Raises:
        RuntimeError: if one does.
    """
    if any(t is not None and unpack_dual(t).tangent is not None for t in tensors):  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "routed_experts has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); "
            "differentiate in reverse: tensor.backward() or torch.autograd.grad"
        )


def check_not_transformed(what: str, *, forward_mode: bool = True, batches: bool = False) -> None:
    """No transform of ``torch.func`` is about to differentiate: it cannot follow a custom backward, and would say so of
    a function that the user has never heard of.

    Args:
        what: the layer, for the message.
        forward_mode: refuse ``torch.func.jvp`` as well; not where :func:`check_not_forward_mode` looks for tangents.
        batches: refuse ``torch.func.vmap`` and ``functionalize`` as well.

    Raises:
        RuntimeError: if one is.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    kinds = {one.key() for one in torch._C._functorch.get_interpreter_stack() or ()}
    refused = {TransformType.Grad, TransformType.Jvp} if forward_mode else {TransformType.Grad}
    if batches or (torch.is_grad_enabled() and kinds & refused):
        raise RuntimeError(
            f"{what} cannot run under torch.func (grad, vjp, jacrev, jvp, vmap of them): what its backward computes "
            "is decided when gradients arrive, which these transforms do not wait for. Differentiate with "
            "tensor.backward() or torch.autograd.grad, also through torch.func.functional_call; for many gradients of "
            "one forward, torch.autograd.grad(..., is_grads_batched=True). Or call the recalibrator's detach() first, "
            "where the model has experts of its own"
        )


def check_ids(ids_TK: Tensor, num_experts: int) -> None:
    """Every id is -1 or in [0, num_experts), and no token has more experts than there are. On a GPU the ids are checked
    there, without waiting."""
    if ids_TK.device.type != "cpu":
        torch._assert_async(((ids_TK >= -1) & (ids_TK < num_experts)).all(), "topk_ids_TK has an id out of range")
        return
    if ids_TK.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids_TK))
    if low < -1 or high >= num_experts:
        wrong = high if high >= num_experts else low
        raise ValueError(
            f"topk_ids_TK holds id {wrong}, but there are {num_experts} experts: ids must be in [0, {num_experts}), "
            "or -1 for a pair without an expert"
        )
    if ids_TK.shape[1] > num_experts and (most := int((ids_TK >= 0).sum(dim=1).max())) > num_experts:
        # More choices than experts are fine where a rank holds few of them and the others are -1.
        raise ValueError(
            f"topk_ids_TK gives a token {most} experts, but there are {num_experts}: K must be at most the number of "
            "experts, not counting ids of -1"
        )


def check_same_position(recomputed: Sequence[int], original: Sequence[int]) -> None:
    """The forward a checkpoint recomputed is the one whose gradients arrive: its step, microbatch and layer.

    Raises:
        RuntimeError: if not.
    """
    if list(recomputed) != list(original):
        _, step, microbatch, layer = original[:4]
        raise RuntimeError(
            f"activation checkpointing recomputed layer {layer} as step {recomputed[1]}, microbatch {recomputed[2]}, "
            f"but its forward was step {step}, microbatch {microbatch}: other forwards, or an optimizer step, came in "
            "between, and what was recomputed does not say which forward it repeats. Use use_reentrant=False around "
            "the layer, or run each backward before the next forward"
        )


def check_same_routing(recomputed: Tensor, original: Tensor) -> None:
    """The routing a checkpoint recomputed is the one its forward produced.

    Raises:
        RuntimeError: if not; on a GPU the check runs there and does not wait.
    """
    message = (
        "activation checkpointing recomputed another routing than the forward used: the router is not deterministic "
        "(noise or dropout drawn anew), or the recompute was taken for another forward, with another mask. Use "
        "preserve_rng_state=True and use_reentrant=False, or keep the router outside the checkpoint"
    )
    if original.device.type != "cpu":
        torch._assert_async(recomputed == original, message)
    elif int(recomputed) != int(original):
        raise RuntimeError(message)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, {meaning}; got {_shape(tensor)}")


def _expect_device(name: str, tensor: Tensor | None, x_TD: Tensor) -> None:
    if tensor is not None and tensor.device != x_TD.device:
        raise ValueError(f"{name} is on {tensor.device}, x_TD on {x_TD.device}; move them to one device")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
