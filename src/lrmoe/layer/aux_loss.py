"""The auxiliary losses of a router, which travel with the gradient of its layer's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _CarryAuxLoss(torch.autograd.Function):
    """Identity on the layer's output; its backward also starts the gradient of the auxiliary loss, with 1.

    This way the loss arrives once per backward wherever the layer sits: activation checkpointing replays forwards,
    and nothing has to be kept on the module between forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, out_TD: Tensor, aux_loss: Tensor) -> Tensor:
        ctx.aux_dtype, ctx.aux_device = aux_loss.dtype, aux_loss.device
        return out_TD.view_as(out_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
        return grad_TD, torch.ones((), dtype=ctx.aux_dtype, device=ctx.aux_device)


def carry_aux_loss(out_TD: Tensor, aux_loss: Tensor) -> Tensor:
    """``out_TD`` as it is, whose gradient brings that of ``aux_loss`` with it."""
    carried_TD: Tensor = _CarryAuxLoss.apply(out_TD, aux_loss)  # type: ignore[no-untyped-call]
    return carried_TD
