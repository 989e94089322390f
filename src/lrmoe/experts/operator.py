"""routed_experts: full forward, recalibrated backward (under construction)."""

from __future__ import annotations

from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.experts.layer_control import Clock, LayerControl


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
    control = LayerControl(Clock(config or LRMoEConfig(), step=step, microbatch=microbatch), layer=layer)
    return controlled_experts(
        x_TD, topk_ids_TK, topk_weights_TK, gate_up_proj, down_proj, control=control, activation=activation,
        gate_up_bias=gate_up_bias, down_bias=down_bias, token_mask_T=token_mask_T,
    )


def controlled_experts(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    control: LayerControl,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    token_mask_T: Tensor | None = None,
) -> Tensor:
    """What layers and hosts call: :func:`routed_experts` at the position and with the meter of ``control``."""
    raise NotImplementedError
