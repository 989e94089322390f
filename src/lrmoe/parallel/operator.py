"""The routed experts over several ranks, as one autograd function: exact forward, recalibrated backward.

What the holder of the experts computes is :mod:`lrmoe.experts.compacted`, as on one device, and so are importance,
selection and the router's gradient; only the way of the rows is longer.

    tokens' rank     x ──────────────▶ rows of all ranks, by expert          the forward: every pair
                     y ◀────────────── experts' output
                     |alpha| ||g|| ──▶ R = (.)^2 ||phi||^2, selection        the backward: 4 bytes a pair there,
                     kept? ◀────────── 1 byte a pair                         1 byte back,
                     g, alpha ───────▶ compacted experts                     then kept rows alone
                     dx, dalpha ◀───── kept rows

T tokens, K choices, L pairs of this rank that have an expert, R rows this rank computes, M kept rows, S instances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrmoe.experts.compacted import Bank, Needs, forward_rows
from lrmoe.experts.meter import Stopwatch
from lrmoe.experts.validation import ONCE, check_same_routing
from lrmoe.ops.autocast import without_autocast
from lrmoe.ops.permute import weighted_combine
from lrmoe.parallel.backward import DistributedBackward
from lrmoe.parallel.dispatched import Dispatched
from lrmoe.parallel.dispatcher import Dispatcher
from lrmoe.parallel.layout import BankRows
from lrmoe.parallel.remainder import counted_instances


class RoutedExperts(torch.autograd.Function):
    """(x_TD, alpha_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T, dispatched, path_0D) -> out_TD.

    ``path_0D``: no row of ``x_TD``, whose graph is kept with the rest where ``x_TD`` itself is not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        alpha_TK: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        token_mask_T: Tensor | None,
        dispatched: Dispatched,
        path_0D: Tensor,
    ) -> Tensor:
        owned = Bank(gate_up_proj, down_proj, gate_up_bias, down_bias)
        on_cpu = x_TD.device.type == "cpu"
        with (
            Stopwatch(dispatched.meter if dispatched.train else None, "forward_seconds", on_cpu),
            without_autocast(x_TD.device),
        ):
            out_TD, own_out_TD, y_LD, x_RD, h_parts, phi_root_R, means_SX = _forward(
                x_TD, alpha_TK, owned, token_mask_T, dispatched
            )
        ctx.dispatched = dispatched
        if dispatched.train:
            ctx.save_for_backward(
                x_RD, own_out_TD, y_LD, alpha_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T,
                *h_parts, phi_root_R, means_SX, dispatched.layout.pair_L, dispatched.fingerprint, path_0D,
            )  # fmt: skip
        ctx.set_materialize_grads(False)
        return out_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = RoutedExperts._backward(ctx, grad_TD, saved)
        if not torch.is_grad_enabled():
            return gradients
        # Somebody wants their graph: it leads to an error, wherever it is entered from.
        alpha_TK, gate_up_proj, down_proj, gate_up_bias, down_bias = saved[3:8]
        inputs = (grad_TD, saved[-1], alpha_TK, gate_up_proj, down_proj, gate_up_bias, down_bias)
        return _DifferentiatedOnce.apply(len(gradients), *gradients, *inputs)  # type: ignore[no-untyped-call,no-any-return]

    @staticmethod
    def _backward(ctx: Any, grad_TD: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        dispatched: Dispatched = ctx.dispatched
        (
            x_RD, own_out_TD, y_LD, alpha_TK, gate_up_proj, down_proj, gate_up_bias, down_bias, token_mask_T,
            h_first, h_second, phi_root_R, means_SX, pair_L, fingerprint, _,
        ) = saved  # fmt: skip
        check_same_routing(fingerprint, dispatched.fingerprint)
        if grad_TD is None:
            # Other ranks wait for this one's rows.
            grad_TD = own_out_TD.new_zeros(alpha_TK.shape[0], x_RD.shape[1])
        backward = DistributedBackward(
            dispatched=dispatched,
            needs=Needs(**dict(zip(Needs.__annotations__, ctx.needs_input_grad[:6], strict=True))),
            owned=Bank(gate_up_proj, down_proj, gate_up_bias, down_bias),
            alpha_TK=alpha_TK,
            token_mask_T=token_mask_T,
            own_out_TD=own_out_TD,
            y_LD=y_LD,
            x_RD=x_RD,
            h_parts=(h_first, h_second),
            phi_root_R=phi_root_R,
            means_SX=means_SX,
            pair_L=pair_L,
        )
        on_cpu = grad_TD.device.type == "cpu"
        with Stopwatch(dispatched.meter, "backward_seconds", on_cpu), without_autocast(grad_TD.device):
            return (*backward.run(grad_TD.contiguous()), None, None, None)


class _DifferentiatedOnce(torch.autograd.Function):
    """(count, gradients, what they come from) -> the gradients as they are, with a graph that cannot be followed."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if one is None else one.view_as(one) for one in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(ONCE)


def run_experts(
    x_TD: Tensor, alpha_TK: Tensor, owned: Bank, token_mask_T: Tensor | None, dispatched: Dispatched
) -> Tensor:
    """The outputs (T, D) of this rank's tokens, in their dtype; every rank has to call it, and run its backward.

    Args:
        x_TD: this rank's tokens.
        alpha_TK: their routing weights.
        owned: the weights that this rank owns, in the dtype of the products.
        token_mask_T: bool, which tokens are real; None for all.
        dispatched: all else.
    """
    dtype = owned.gate_up_proj.dtype
    out_TD: Tensor = RoutedExperts.apply(  # type: ignore[no-untyped-call]
        x_TD.to(dtype),
        alpha_TK.to(torch.promote_types(dtype, torch.float32)),
        owned.gate_up_proj,
        owned.down_proj,
        owned.gate_up_bias,
        owned.down_bias,
        token_mask_T,
        dispatched,
        x_TD[:0].clone(),
    )
    return out_TD.to(x_TD.dtype)


def _forward(
    x_TD: Tensor, alpha_TK: Tensor, owned: Bank, token_mask_T: Tensor | None, dispatched: Dispatched
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """(out_TD, own_out_TD, y_LD, x_RD, h of each of two banks, phi_root_R, means_SX); own_out_TD and y_LD are empty
    where the router's gradient does not need them, h with save="input", means_SX where no remainder is wanted."""
    layout, exchange, recipe = dispatched.layout, dispatched.exchange, dispatched.recipe
    dispatcher = Dispatcher(exchange, layout)
    num_tokens, top_k = alpha_TK.shape
    pair_L = layout.pair_L
    banks = dispatched.store.gather(exchange, layout, owned)
    with exchange.phase("dispatch"):
        x_LD = x_TD.index_select(0, pair_L // top_k)
    x_RD = dispatcher.dispatch(x_LD, "tokens to experts")
    del x_LD
    counted_R = None
    if dispatched.train and recipe.remainder == "mean":
        real_R = None
        if dispatched.masked:
            real_T = x_TD.new_ones(num_tokens, dtype=torch.bool) if token_mask_T is None else token_mask_T
            real_R = dispatcher.in_host_order(dispatcher.dispatch(real_T[pair_L // top_k], "token masks to experts"))
        counted_R = counted_instances(layout, real_R)
    with exchange.phase("forward experts"):
        keep_h = dispatched.train and recipe.save == "preactivation"
        parts = []
        for bank, part in zip(banks, layout.banks, strict=True):
            rows_RD = dispatcher.in_host_order(x_RD, part.rows)
            parts.append(
                forward_rows(
                    rows_RD,
                    bank,
                    part.offs_S,
                    recipe.activation,
                    live=rows_RD.shape[0],
                    norms=dispatched.train,
                    keep_h=keep_h,
                    counted_R=None if counted_R is None else _of_bank(counted_R, part),
                )
            )
            del rows_RD
        del banks, bank
        y_RD = torch.cat([part.y_RD for part in parts]) if len(parts) > 1 else parts[0].y_RD
        phi_root_R = torch.cat([part.phi_root_R for part in parts])
        means = [part.means.packed() for part in parts if part.means is not None]
        means_SX = torch.cat(means) if means else alpha_TK.new_empty(0)
        h_second = parts[1].h_R2F if len(parts) > 1 else parts[0].h_R2F.new_empty(0, parts[0].h_R2F.shape[1])
        h_parts = (parts[0].h_R2F, h_second)
    y_LD = dispatcher.combine(y_RD, "outputs to tokens")
    del y_RD, parts
    with exchange.phase("combine"):
        live = pair_L.numel()
        if live < num_tokens * top_k:
            # Pairs without an expert, which nothing was sent for.
            absent_N = torch.ones(num_tokens * top_k, dtype=torch.bool, device=pair_L.device)
            absent_N[pair_L] = False
            pair_N = torch.cat([pair_L, absent_N.nonzero().squeeze(-1)])
            y_ND = torch.cat([y_LD, y_LD.new_zeros(pair_N.numel() - live, y_LD.shape[1])])
        else:
            pair_N, y_ND = pair_L, y_LD
        out_TD = weighted_combine(y_ND, alpha_TK, pair_N, torch.tensor(live, device=pair_L.device))
    # The caller may change his output in place; only the sum rule reads it in the backward.
    keep_out = dispatched.train and recipe.router_grad == "sum_rule"
    own_out_TD = out_TD.clone() if keep_out else out_TD.new_empty(0, out_TD.shape[1])
    # With the experts' outputs at home, the exact rule costs memory and no traffic.
    keep_y = dispatched.train and recipe.router_grad == "exact" and not layout.all_kept
    kept_y_LD = y_LD if keep_y else y_LD.new_empty(0, y_LD.shape[1])
    return out_TD, own_out_TD, kept_y_LD, x_RD, h_parts, phi_root_R, means_SX


def _of_bank(instance_R: Tensor, part: BankRows) -> Tensor:
    """The rows of one bank, its instances counted from 0; -1 stays."""
    instance_R = instance_R[part.rows]
    return torch.where(instance_R < 0, -1, instance_R - part.instances.start)
