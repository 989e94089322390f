"""The parts of a layer that hold weights: its routed experts and its shared expert.

T tokens, K choices, E experts, D model width, F expert width, S shared expert width.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from lrmoe.experts.layer_control import LayerControl, Moment
from lrmoe.experts.operator import controlled_experts
from lrmoe.experts.stored_weights import whole_shape
from lrmoe.ops import activations


class ExpertsEngine(Protocol):
    """What can stand in for :func:`~lrmoe.experts.operator.controlled_experts`, with the same arguments: the experts of
    several ranks, :class:`lrmoe.parallel.ExpertParallel`."""

    rank: int

    def controlled_experts(
        self,
        x_TD: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        control: LayerControl,
        moment: Moment,
        activation: str = ...,
        gate_up_bias: Tensor | None = ...,
        down_bias: Tensor | None = ...,
        token_mask_T: Tensor | None = ...,
    ) -> Tensor: ...

    def add_up(self, tensor: Tensor, *, what: str) -> Tensor: ...


class Experts(nn.Module):
    """E gated experts with stacked weights, or this rank's part of them.

    Called as a module, so that wrappers which gather its parameters for the call (FSDP) can wrap it by itself.

    Attributes:
        engine: runs the experts where they are spread over ranks, see :func:`lrmoe.parallel.parallelize`; else None.
    """

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        dim: int,
        expert_dim: int,
        *,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.gate_up_proj = parameter(2 * expert_dim, dim)
        self.down_proj = parameter(dim, expert_dim)
        self.register_parameter("gate_up_bias", parameter(2 * expert_dim) if bias else None)
        self.register_parameter("down_bias", parameter(dim) if bias else None)
        self.engine: ExpertsEngine | None = None
        self.reset_parameters()

    def forward(
        self,
        x_TD: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        *,
        control: LayerControl,
        moment: Moment,
        activation: str,
        token_mask_T: Tensor | None,
    ) -> Tensor:
        """:func:`controlled_experts` of these weights, by the engine if there is one."""
        run = controlled_experts if self.engine is None else self.engine.controlled_experts
        return run(
            x_TD,
            topk_ids_TK,
            topk_weights_TK,
            self.gate_up_proj,
            self.down_proj,
            control=control,
            moment=moment,
            activation=activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            token_mask_T=token_mask_T,
        )

    def reset_parameters(self) -> None:
        """Each expert as a pair of ``nn.Linear``: uniform in +-1/sqrt(fan in)."""
        for weight, bias in ((self.gate_up_proj, self.gate_up_bias), (self.down_proj, self.down_bias)):
            bound = 1.0 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def extra_repr(self) -> str:
        bias = f"bias={self.down_bias is not None}"
        if (shape := whole_shape(self.down_proj)) is None:
            return bias
        num_experts, dim, expert_dim = shape
        return f"num_experts={num_experts}, dim={dim}, expert_dim={expert_dim}, {bias}"


class SharedExpert(nn.Module):
    """A dense gated expert with an ordinary backward."""

    def __init__(
        self,
        dim: int,
        expert_dim: int,
        activation: str,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(dim, 2 * expert_dim, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(expert_dim, dim, bias=False, device=device, dtype=dtype)
        self.activation = activations.get(activation)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TS, up_TS = self.activation.split(self.gate_up_proj(x_TD))
        out_TD: Tensor = self.down_proj(self.activation.forward(gate_TS, up_TS))
        return out_TD

    def reset_parameters(self) -> None:
        self.gate_up_proj.reset_parameters()
        self.down_proj.reset_parameters()
