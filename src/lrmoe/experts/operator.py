"""routed_experts: full forward, recalibrated backward. Here what a caller may get wrong is said and dtypes are settled;
:mod:`lrmoe.experts.custom_ops` computes.

T tokens, K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

import lrmoe.experts.custom_ops  # noqa: F401  (registers the operators)
from lrmoe.config import LRMoEConfig, require_config, require_count
from lrmoe.experts.layer_control import LayerControl, Moment, moment_of
from lrmoe.experts.recipe import recipe_text
from lrmoe.experts.validation import check_arguments, check_not_forward_mode, check_not_transformed
from lrmoe.labels import layer_in_words
from lrmoe.ops import activations


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
    """The operator with its arguments checked and in the dtypes it takes."""
    check_arguments(*tensors)
    x_TD, topk_ids_TK, topk_weights_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T = tensors
    dtype = product_dtype(x_TD, gate_up_proj, activation)
    trainable = (x_TD, topk_weights_TK, gate_up_proj, down_proj, gate_up_bias, down_bias)
    check_not_forward_mode(*trainable)
    out_TD: Tensor = torch.ops.lrmoe.routed_experts(
        x_TD.to(dtype),
        topk_ids_TK.to(torch.int64),
        topk_weights_TK.to(torch.promote_types(dtype, torch.float32)),
        [weight.to(dtype) for weight in (gate_up_proj, down_proj, gate_up_bias, down_bias) if weight is not None],
        token_mask_T,
        sequence_T,
        torch.cat([position_3, identity_3[:2]]),
        drop_L.index_select(0, identity_3[2:]),
        recipe_text(config, activation, biases=(gate_up_bias is not None, down_bias is not None)),
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
