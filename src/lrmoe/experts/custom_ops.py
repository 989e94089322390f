"""The operator as torch knows it: two custom operators, which torch.compile sees as opaque, and their autograd.

T tokens, K choices, N = T*K pairs (rows once sorted by expert), M kept rows, E experts, D model width, F expert width.

The forward computes every pair. It saves the layer's input, the routing weights, the norms of phi (the down
projection's input) and, with save="preactivation", the up projection; never the gathered input, phi or the experts'
output. The backward scores all pairs from scalars, selects, gathers the kept rows, and runs every GEMM on those alone.

A *ticket* says whose call it is: int64 CPU, (seed, step, microbatch, layer, meter handle). A list of a schema holds
tensors and no None, so the recipe's text says which biases are among the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrmoe.experts.backward import Saved, backward_pass
from lrmoe.experts.batches import each_gradient, one_by_one
from lrmoe.experts.compacted import Bank, Needs, forward_rows
from lrmoe.experts.meter import Meter, Stopwatch
from lrmoe.experts.recipe import Recipe, parse_recipe
from lrmoe.experts.validation import ONCE, check_ids, check_same_position, check_same_routing
from lrmoe.ops.autocast import without_autocast
from lrmoe.ops.permute import count_per_expert, sort_by_expert, weighted_combine
from lrmoe.recalibration import draws
from lrmoe.recalibration.quota import quotas


@torch.library.custom_op("lrmoe::routed_experts", mutates_args=())
def _forward(
    x_TD: Tensor,
    ids_TK: Tensor,
    alpha_TK: Tensor,
    weights: list[Tensor],
    token_mask_T: Tensor | None,
    sequence_T: Tensor | None,
    ticket_5: Tensor,
    drop_1: Tensor,
    recipe: str,
    train: bool,
) -> tuple[Tensor, list[Tensor]]:
    """(out_TD, [own_out_TD, h_N2F, phi_root_N, means_EX, pair_N, offs_E, load_E, quota_E, fingerprint]); the list is
    for the backward, and what is large in it is empty where that cannot come (``train`` false) or does not want it.

    ``drop_1``: fp64 CPU, the drop in force.
    """
    asked, bank = _named(recipe, weights)
    num_experts, top_k = bank.gate_up_proj.shape[0], ids_TK.shape[1]
    check_ids(ids_TK, num_experts)
    handle, drop = int(ticket_5[-1]), float(drop_1)
    on_cpu = x_TD.device.type == "cpu"
    with_means = train and asked.remainder == "mean"
    stopwatch = Stopwatch(Meter.find(handle) if train else None, "forward_seconds", on_cpu)
    # The operands have autocast's dtype already; inside, it would round what is meant to be fp32.
    with stopwatch, without_autocast(x_TD.device):
        pair_N, count_E = sort_by_expert(ids_TK.reshape(-1), num_experts)
        offs_E = count_E.cumsum(0).to(torch.int32)
        # On a GPU the number of live rows is not known without waiting; rows past it are then computed, never used.
        live = int(offs_E[-1]) if on_cpu else pair_N.numel()
        rows = forward_rows(
            x_TD.index_select(0, pair_N // top_k),
            bank,
            offs_E,
            asked.activation,
            live=live,
            norms=train,
            keep_h=train and asked.save == "preactivation",
            # While nothing is dropped nothing is missing.
            counted_R=counted_experts(ids_TK, token_mask_T, pair_N) if with_means and drop > 0 else None,
        )
        h_N2F, phi_root_N = rows.h_R2F, rows.phi_root_R
        if rows.means is None:
            dim, width = bank.down_proj.shape[1:]
            means_EX = alpha_TK.new_zeros((num_experts, dim + 3 * width) if with_means else 0)
        else:
            means_EX = rows.means.packed()
        out_TD = weighted_combine(rows.y_RD, alpha_TK, pair_N, offs_E[-1])
        del rows
        # The caller may change his output in place; only the sum rule reads it in the backward.
        keep_out = train and asked.router_grad == "sum_rule"
        own_out_TD = out_TD.clone() if keep_out else out_TD.new_empty(0, out_TD.shape[1])
        real_ids_TK = ids_TK if token_mask_T is None else torch.where(token_mask_T.unsqueeze(-1), ids_TK, -1)
        load_E = count_per_expert(real_ids_TK.reshape(-1), num_experts)
        quota_E = quotas(asked.quota, load_E, drop)
        fingerprint = routing_fingerprint(ids_TK, None if token_mask_T is None else real_ids_TK)
    return out_TD, [own_out_TD, h_N2F, phi_root_N, means_EX, pair_N, offs_E, load_E, quota_E, fingerprint]


@_forward.register_fake
def _(
    x_TD: Tensor,
    ids_TK: Tensor,
    alpha_TK: Tensor,
    weights: list[Tensor],
    token_mask_T: Tensor | None,
    sequence_T: Tensor | None,
    ticket_5: Tensor,
    drop_1: Tensor,
    recipe: str,
    train: bool,
) -> tuple[Tensor, list[Tensor]]:
    asked, bank = _named(recipe, weights)
    (num_tokens, dim), num_pairs = x_TD.shape, ids_TK.numel()
    num_experts, two_width = bank.gate_up_proj.shape[:2]

    def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return x_TD.new_empty(shape, dtype=dtype)

    return torch.empty_like(x_TD, memory_format=torch.contiguous_format), [
        x_TD.new_empty(num_tokens if train and asked.router_grad == "sum_rule" else 0, dim),
        x_TD.new_empty(num_pairs if train and asked.save == "preactivation" else 0, two_width),
        x_TD.new_empty(num_pairs if train else 0, dtype=alpha_TK.dtype),
        x_TD.new_empty(
            (num_experts, dim + 3 * two_width // 2) if train and asked.remainder == "mean" else 0, dtype=alpha_TK.dtype
        ),
        ints(num_pairs),
        ints(num_experts, dtype=torch.int32),
        ints(num_experts),
        ints(num_experts),
        ints(),
    ]


@torch.library.custom_op("lrmoe::routed_experts_backward", mutates_args=())
def _backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    alpha_TK: Tensor,
    weights: list[Tensor],
    token_mask_T: Tensor | None,
    sequence_T: Tensor | None,
    saved: list[Tensor],
    recipe: str,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of x, alpha and each of the weights, empty where ``needs``, of the same order, is false.

    ``saved``: the forward's list and the ticket, as a checkpoint may have computed them anew, then the fingerprint and
    the ticket of the forward itself.
    """
    out_TD, h_N2F, phi_root_N, means_EX, pair_N, offs_E, load_E, quota_E, fingerprint, ticket_5, *original = saved
    seed, step, microbatch, layer, handle = ticket = ticket_5.tolist()
    forward_fingerprint, forward_ticket_5 = original
    check_same_position(ticket, forward_ticket_5.tolist())
    check_same_routing(fingerprint, forward_fingerprint)
    asked, bank = _named(recipe, weights)
    kept = Saved(
        x_TD=x_TD,
        out_TD=out_TD,
        alpha_TK=alpha_TK,
        bank=bank,
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
    names = ("x", "alpha", *parse_recipe(recipe)[1])
    wanted = Needs(**{**dict.fromkeys(Needs.__annotations__, False), **dict(zip(names, needs, strict=True))})
    meter = Meter.find(handle)
    with Stopwatch(meter, "backward_seconds", x_TD.device.type == "cpu"), without_autocast(x_TD.device):
        gradients = dict(zip(Needs.__annotations__, backward_pass(grad_TD, kept, asked, wanted, meter), strict=True))
    return [x_TD.new_empty(0) if gradients[name] is None else gradients[name] for name in names]  # type: ignore[misc]


@_backward.register_fake
def _(
    grad_TD: Tensor,
    x_TD: Tensor,
    alpha_TK: Tensor,
    weights: list[Tensor],
    token_mask_T: Tensor | None,
    sequence_T: Tensor | None,
    saved: list[Tensor],
    recipe: str,
    needs: list[bool],
) -> list[Tensor]:
    return [
        tensor.new_empty(tensor.shape) if needed else x_TD.new_empty(0)
        for tensor, needed in zip((x_TD, alpha_TK, *weights), needs, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    x_TD, _, alpha_TK, weights, token_mask_T, sequence_T, ticket_5, _, ctx.recipe, _ = inputs
    ctx.num_weights = len(weights)
    ctx.save_for_backward(x_TD, alpha_TK, token_mask_T, sequence_T, *weights, *output[1], ticket_5)
    # A few bytes that no checkpoint recomputes: they tell whether a recompute is of this forward, and routed as it did.
    ctx.original = [output[1][-1], ticket_5]
    ctx.mark_non_differentiable(*output[1])
    # Otherwise the backward would be handed zeros in the shapes of the other outputs, one of them (N, 2F).
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_TD: Tensor | None, _: Any) -> tuple[Any, ...]:
    x_TD, alpha_TK, token_mask_T, sequence_T, *rest = ctx.saved_tensors
    weights, saved = rest[: ctx.num_weights], rest[ctx.num_weights :]
    result: list[Any] = [None] * len(ctx.needs_input_grad)
    result[3] = [None] * len(weights)
    if grad_TD is None:
        return tuple(result)
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], *ctx.needs_input_grad[3]]
    gradients = each_gradient(torch.ops.lrmoe.routed_experts_backward, grad_TD)(
        x_TD, alpha_TK, weights, token_mask_T, sequence_T, [*saved, *ctx.original], ctx.recipe, needs
    )
    found = [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]
    result[0], result[2], result[3] = found[0], found[1], found[2:]
    return tuple(result)


def _differentiate_twice(ctx: Any, *_: Any) -> None:
    raise RuntimeError(ONCE)


torch.library.register_vmap("lrmoe::routed_experts", one_by_one(torch.ops.lrmoe.routed_experts))
torch.library.register_vmap("lrmoe::routed_experts_backward", one_by_one(torch.ops.lrmoe.routed_experts_backward))
torch.library.register_autograd("lrmoe::routed_experts", _differentiate, setup_context=_setup_context)
torch.library.register_autograd("lrmoe::routed_experts_backward", _differentiate_twice)


def _named(text: str, weights: list[Tensor]) -> tuple[Recipe, Bank]:
    """The recipe and the weights by name."""
    recipe, names = parse_recipe(text)
    given = dict(zip(names, weights, strict=True))
    return recipe, Bank(given["gate_up_proj"], given["down_proj"], given.get("gate_up_bias"), given.get("down_bias"))


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
