"""routed_experts: full forward, recalibrated backward, as two custom operators that torch.compile sees as opaque.

T tokens, K choices, N = T*K pairs (rows once sorted by expert), M kept rows, E experts, D model width, F expert width.

The forward computes every pair. It saves the layer's input, the routing weights, the norms of phi (the down
projection's input) and, with save="preactivation", the up projection; never the gathered input, phi or the experts'
output. The backward scores all pairs from scalars, selects, gathers the kept rows, and runs every GEMM on those alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lrmoe.config import (
    LRMoEConfig,
    Metric,
    Quota,
    Remainder,
    RouterGrad,
    Save,
    Selector,
    require_config,
    require_count,
)
from lrmoe.experts.backward import Saved, backward_pass
from lrmoe.experts.compacted import Bank, Needs, Recipe, forward_rows
from lrmoe.experts.layer_control import LayerControl, Moment, moment_of
from lrmoe.experts.meter import Meter, Stopwatch
from lrmoe.experts.validation import (
    ONCE,
    check_arguments,
    check_ids,
    check_not_forward_mode,
    check_not_transformed,
    check_same_position,
    check_same_routing,
)
from lrmoe.labels import layer_in_words
from lrmoe.ops import activations
from lrmoe.ops.autocast import without_autocast
from lrmoe.ops.permute import count_per_expert, sort_by_expert, weighted_combine
from lrmoe.recalibration import draws
from lrmoe.recalibration.quota import quotas


def routed_experts(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    config: LRMoEConfig | None = None,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    token_mask_T: Tensor | None = None,
    step: int = 0,
    layer: int = 0,
    microbatch: int = 0,
) -> Tensor:
    """Runs each token through its chosen experts; the backward computes only the pairs its quotas keep.

    The output is exact whatever the configuration. In the backward a kept pair's gradient is multiplied by its
    selection weight everywhere except in the routing weights' gradient; a dropped pair adds nothing to the gradients
    of weights, biases and input, and to the routing weights' gradient what ``config.router_grad`` says.

    Args:
        x_TD: tokens, floating point.
        topk_ids_TK: int32 or int64 expert of each pair in [0, E), or -1 for a pair without an expert.
        topk_weights_TK: routing weights alpha, floating point; applied to the experts' output.
        gate_up_proj: (E, 2F, D), gate rows first (or as ``activation`` says); may be a transposed view.
        down_proj: (E, D, F); may be a transposed view.
        config: default :class:`LRMoEConfig()`.
        activation: see :mod:`lrmoe.ops.activations`.
        gate_up_bias: (E, 2F) or None.
        down_bias: (E, D) or None.
        token_mask_T: bool, False for padding: computed in the forward, not counted in loads and quotas, and without
            any gradient.
        step, layer, microbatch: key the draws, together with ``config.seed``; ``step`` also drives the schedule.

    Returns:
        (T, D) in the dtype of ``x_TD``. The products run in autocast's dtype where it is on, else in the dtype of
        ``gate_up_proj``; scores, norms and the routing weights' gradient in fp32 or better. Gradients come in the
        dtype of what they belong to; weights that kept no pair get exact zeros.

    Raises:
        ValueError: naming the argument, its value and the mend, for shapes that do not fit and ids out of range.
        RuntimeError: under forward-mode differentiation and ``torch.func.grad`` or ``vjp``, and where the gradient is
            itself differentiated.
    """
    step, layer, microbatch = (
        require_count(name, value) for name, value in (("step", step), ("layer", layer), ("microbatch", microbatch))
    )
    config = require_config(config)
    check_not_transformed("routed_experts", forward_mode=False)
    moment = moment_of(config, step=step, microbatch=microbatch)
    return _experts(
        (x_TD, topk_ids_TK, topk_weights_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T),
        None,
        moment.position_3,
        # Nobody's meter.
        torch.tensor([layer, 0, 0], dtype=torch.int64, device="cpu"),
        moment.drop_L,
        config,
        activation,
    )


def controlled_experts(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    control: LayerControl,
    moment: Moment,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    token_mask_T: Tensor | None = None,
) -> Tensor:
    """What layers and hosts call: :func:`routed_experts` at the position of ``moment`` and with the meter of
    ``control``.

    The mask is the caller's: whether to take that of ``moment``, only the layer knows.
    """
    check_not_transformed(layer_in_words(control.name))
    return _experts(
        (x_TD, topk_ids_TK, topk_weights_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T),
        moment.sequence_T,
        moment.position_3,
        control.identity_3,
        moment.drop_L,
        control.config,
        activation,
    )


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _experts(
    tensors: _Tensors,
    sequence_T: Tensor | None,
    position_3: Tensor,
    identity_3: Tensor,
    drop_L: Tensor,
    config: LRMoEConfig,
    activation: str,
) -> Tensor:
    """The operator with its arguments checked and in the dtypes it takes; ``tensors`` in the order it takes them."""
    check_arguments(*tensors)
    x_TD, topk_ids_TK, topk_weights_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T = tensors
    dtype = product_dtype(x_TD, gate_up_proj, activation)
    trainable = (x_TD, topk_weights_TK, gate_up_proj, down_proj, gate_up_bias, down_bias)
    check_not_forward_mode(*trainable)
    out_TD: Tensor = torch.ops.lrmoe.routed_experts(
        x_TD.to(dtype),
        topk_ids_TK.to(torch.int64),
        topk_weights_TK.to(torch.promote_types(dtype, torch.float32)),
        gate_up_proj.to(dtype),
        down_proj.to(dtype),
        None if gate_up_bias is None else gate_up_bias.to(dtype),
        None if down_bias is None else down_bias.to(dtype),
        token_mask_T,
        sequence_T,
        position_3,
        identity_3,
        drop_L,
        activation,
        config.selector,
        config.metric,
        config.quota,
        config.router_grad,
        config.save,
        config.remainder,
        config.error_budget,
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trainable),
    )[0]
    return out_TD.to(x_TD.dtype)


def product_dtype(x_TD: Tensor, gate_up_proj: Tensor, activation: str) -> torch.dtype:
    """The dtype the products run in: autocast's where it is on, else that of the weights.

    Raises:
        ValueError: if the activation is not known.
    """
    if not isinstance(activation, str):
        activations.get(activation)  # Raises, saying what it may be.
    device = x_TD.device.type
    # Devices without autocast, such as meta, refuse the question.
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else gate_up_proj.dtype


def counted_experts(ids_TK: Tensor, token_mask_T: Tensor | None, pair_N: Tensor) -> Tensor:
    """The experts of the sorted rows, (N,), -1 for rows of nobody and of masked tokens: who counts in the means."""
    ids_TK = ids_TK if token_mask_T is None else torch.where(token_mask_T.unsqueeze(-1), ids_TK, -1)
    return ids_TK.reshape(-1).index_select(0, pair_N)


def routing_fingerprint(ids_TK: Tensor, real_ids_TK: Tensor | None = None) -> Tensor:
    """An int64 scalar that tells this routing from another; ``real_ids_TK``: the ids with -1 for masked tokens, so that
    it tells masks apart as well."""
    place_N = torch.arange(ids_TK.numel(), device=ids_TK.device)
    found = draws.mix(ids_TK.reshape(-1) * ids_TK.numel() + place_N).sum()
    # Twice the second, for masking nobody is not the same as having no mask.
    return found if real_ids_TK is None else found + 2 * routing_fingerprint(real_ids_TK) + 1


@torch.library.custom_op("lrmoe::routed_experts", mutates_args=())
def _forward(
    x_TD: Tensor,
    ids_TK: Tensor,
    alpha_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    token_mask_T: Tensor | None,
    sequence_T: Tensor | None,
    position_3: Tensor,
    identity_3: Tensor,
    drop_L: Tensor,
    activation: str,
    selector: str,
    metric: str,
    quota: str,
    router_grad: str,
    save: str,
    remainder: str,
    error_budget: float | None,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out_TD, own_out_TD, h_N2F, phi_root_N, means_EX, pair_N, offs_E, load_E, quota_E, key_5, fingerprint); all but
    first are for the backward, and what is large is empty where it cannot come (``train`` false) or is not wanted."""
    check_ids(ids_TK, gate_up_proj.shape[0])
    num_experts, top_k = gate_up_proj.shape[0], ids_TK.shape[1]
    key_5 = torch.cat([position_3, identity_3[:2]])
    _, handle, place = identity_3.tolist()
    drop = float(drop_L[place])
    on_cpu = x_TD.device.type == "cpu"
    with_means = train and remainder == "mean"
    stopwatch = Stopwatch(Meter.find(handle) if train else None, "forward_seconds", on_cpu)
    # The operands have autocast's dtype already; inside, it would round what is meant to be fp32.
    with stopwatch, without_autocast(x_TD.device):
        pair_N, count_E = sort_by_expert(ids_TK.reshape(-1), num_experts)
        offs_E = count_E.cumsum(0).to(torch.int32)
        # On a GPU the number of live rows is not known without waiting; rows past it are then computed, never used.
        live = int(offs_E[-1]) if on_cpu else pair_N.numel()
        bank = Bank(gate_up_proj, down_proj, gate_up_bias, down_bias)
        rows = forward_rows(
            x_TD.index_select(0, pair_N // top_k),
            bank,
            offs_E,
            activation,
            live=live,
            norms=train,
            keep_h=train and save == "preactivation",
            # While nothing is dropped nothing is missing.
            counted_R=counted_experts(ids_TK, token_mask_T, pair_N) if with_means and drop > 0 else None,
        )
        h_N2F, phi_root_N = rows.h_R2F, rows.phi_root_R
        if rows.means is None:
            means_EX = alpha_TK.new_zeros((num_experts, x_TD.shape[1] + 3 * down_proj.shape[2]) if with_means else 0)
        else:
            means_EX = rows.means.packed()
        out_TD = weighted_combine(rows.y_RD, alpha_TK, pair_N, offs_E[-1])
        del rows
        # The caller may change his output in place; only the sum rule reads it in the backward.
        own_out_TD = out_TD.clone() if train and router_grad == "sum_rule" else out_TD.new_empty(0, out_TD.shape[1])
        real_ids_TK = ids_TK if token_mask_T is None else torch.where(token_mask_T.unsqueeze(-1), ids_TK, -1)
        load_E = count_per_expert(real_ids_TK.reshape(-1), num_experts)
        quota_E = quotas(cast(Quota, quota), load_E, drop)
        fingerprint = routing_fingerprint(ids_TK, None if token_mask_T is None else real_ids_TK)
    return out_TD, own_out_TD, h_N2F, phi_root_N, means_EX, pair_N, offs_E, load_E, quota_E, key_5, fingerprint


@_forward.register_fake
def _(x_TD: Tensor, ids_TK: Tensor, alpha_TK: Tensor, gate_up_proj: Tensor, *args: Any) -> tuple[Tensor, ...]:
    router_grad, save, remainder, train = args[12], args[13], args[14], args[16]
    num_pairs, num_experts = ids_TK.numel(), gate_up_proj.shape[0]

    def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return x_TD.new_empty(shape, dtype=dtype)

    return (
        torch.empty_like(x_TD, memory_format=torch.contiguous_format),
        x_TD.new_empty(x_TD.shape[0] if train and router_grad == "sum_rule" else 0, x_TD.shape[1]),
        x_TD.new_empty(num_pairs if train and save == "preactivation" else 0, gate_up_proj.shape[1]),
        x_TD.new_empty(num_pairs if train else 0, dtype=alpha_TK.dtype),
        x_TD.new_empty(
            (num_experts, x_TD.shape[1] + 3 * gate_up_proj.shape[1] // 2) if train and remainder == "mean" else 0,
            dtype=alpha_TK.dtype,
        ),
        ints(num_pairs),
        ints(num_experts, dtype=torch.int32),
        ints(num_experts),
        ints(num_experts),
        torch.empty(5, dtype=torch.int64, device="cpu"),
        ints(),
    )


@torch.library.custom_op("lrmoe::routed_experts_backward", mutates_args=())
def _backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    out_TD: Tensor,
    alpha_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    token_mask_T: Tensor | None,
    sequence_T: Tensor | None,
    h_N2F: Tensor,
    phi_root_N: Tensor,
    means_EX: Tensor,
    pair_N: Tensor,
    offs_E: Tensor,
    load_E: Tensor,
    quota_E: Tensor,
    key_5: Tensor,
    fingerprint: Tensor,
    forward_key_5: Tensor,
    forward_fingerprint: Tensor,
    activation: str,
    selector: str,
    metric: str,
    quota: str,
    router_grad: str,
    save: str,
    remainder: str,
    error_budget: float | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (x, alpha, gate_up_proj, down_proj, gate_up_bias, down_bias), empty where ``needs`` is false."""
    seed, step, microbatch, layer, handle = key = key_5.tolist()
    check_same_position(key, forward_key_5.tolist())
    check_same_routing(fingerprint, forward_fingerprint)
    saved = Saved(
        x_TD=x_TD,
        out_TD=out_TD,
        alpha_TK=alpha_TK,
        bank=Bank(gate_up_proj, down_proj, gate_up_bias, down_bias),
        token_mask_T=token_mask_T,
        sequence_T=sequence_T,
        h_N2F=h_N2F,
        phi_root_N=phi_root_N,
        means_EX=means_EX,
        pair_N=pair_N,
        offs_E=offs_E,
        load_E=load_E,
        quota_E=quota_E,
        position=(seed, step, layer, max(microbatch, 0)),
    )
    # The operator's schema knows strings; LRMoEConfig has checked them.
    recipe = Recipe(
        activation=activation,
        selector=cast(Selector, selector),
        metric=cast(Metric, metric),
        quota=cast(Quota, quota),
        router_grad=cast(RouterGrad, router_grad),
        save=cast(Save, save),
        remainder=cast(Remainder, remainder),
        error_budget=error_budget,
    )
    wanted = Needs(**dict(zip(_DIFFERENTIABLE, needs, strict=True)))
    meter = Meter.find(handle)
    with Stopwatch(meter, "backward_seconds", x_TD.device.type == "cpu"), without_autocast(x_TD.device):
        gradients = backward_pass(grad_TD, saved, recipe, wanted, meter)
    dx, dalpha, dgate_up, ddown, dgate_up_bias, ddown_bias = (
        x_TD.new_empty(0) if gradient is None else gradient for gradient in gradients
    )
    return dx, dalpha, dgate_up, ddown, dgate_up_bias, ddown_bias


@_backward.register_fake
def _(
    grad_TD: Tensor,
    x_TD: Tensor,
    out_TD: Tensor,
    alpha_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    needs: list[bool] = rest[-1]
    inputs = (x_TD, alpha_TK, gate_up_proj, down_proj, gate_up_bias, down_bias)
    return tuple(
        tensor.new_empty(tensor.shape) if tensor is not None and needed else x_TD.new_empty(0)
        for tensor, needed in zip(inputs, needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_TD, _, alpha_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T, sequence_T = inputs[:9]
    activation, selector, metric, quota, router_grad, save, remainder, error_budget, _ = inputs[12:]
    _, own_out_TD, h_N2F, phi_root_N, means_EX, pair_N, offs_E, load_E, quota_E, key_5, fingerprint = output
    ctx.save_for_backward(
        x_TD, own_out_TD, alpha_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T, sequence_T,
        h_N2F, phi_root_N, means_EX, pair_N, offs_E, load_E, quota_E, key_5, fingerprint,
    )  # fmt: skip
    ctx.recipe = (activation, selector, metric, quota, router_grad, save, remainder, error_budget)
    # A few bytes that no checkpoint recomputes: they tell whether a recompute is of this forward, and routed as it did.
    ctx.forward_key_5 = key_5
    ctx.forward_fingerprint = fingerprint
    ctx.mark_non_differentiable(*output[1:])
    # Otherwise the backward would be handed zeros in the shapes of the other outputs, one of them (N, 2F).
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_TD: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_TD is None:
        return (None,) * len(ctx.needs_input_grad)
    needed = [ctx.needs_input_grad[position] for position in _DIFFERENTIABLE.values()]
    gradients = torch.ops.lrmoe.routed_experts_backward(
        grad_TD, *ctx.saved_tensors, ctx.forward_key_5, ctx.forward_fingerprint, *ctx.recipe, needed
    )
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for position, need, gradient in zip(_DIFFERENTIABLE.values(), needed, gradients, strict=True):
        result[position] = gradient if need else None
    return tuple(result)


def _differentiate_twice(ctx: Any, *_: Tensor | None) -> None:
    raise RuntimeError(ONCE)


# The differentiable inputs of the forward operator and their places in its signature.
_DIFFERENTIABLE = {"x": 0, "alpha": 2, "gate_up_proj": 3, "down_proj": 4, "gate_up_bias": 5, "down_bias": 6}

torch.library.register_autograd("lrmoe::routed_experts", _differentiate, setup_context=_setup_context)
torch.library.register_autograd("lrmoe::routed_experts_backward", _differentiate_twice)
