"""The router: which experts each token visits and with what weight, and the losses that keep it balanced.

Shape suffixes: T tokens, K choices per token, E experts, G groups of experts, D model width.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrmoe.config import require_count
from lrmoe.ops.autocast import without_autocast

Gate = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """What a router decided for T tokens. A tuple, because what gathers a module's weights for its backward (DeepSpeed
    ZeRO-3, backward hooks of torch) finds the tensors of its output in those alone.

    Attributes:
        topk_ids_TK: int64, the chosen experts in falling order of preference; ties go to the lower id.
        topk_weights_TK: fp32 (fp64 in a float64 model), the factor of each chosen expert's output.
        loads_E: int64, pairs routed to each expert; masked tokens are not counted.
        logits_TE: fp32 (fp64 in a float64 model), the router's logits.
        aux_loss: scalar, the weighted sum of the auxiliary losses, differentiable; None where all are off.
        balance_loss: scalar, unweighted and detached, for logging; None where it is off.
        z_loss: scalar, unweighted and detached, for logging; None where it is off.
    """

    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    loads_E: Tensor
    logits_TE: Tensor
    aux_loss: Tensor | None = None
    balance_loss: Tensor | None = None
    z_loss: Tensor | None = None


class TopKRouter(nn.Module):
    """A linear gate and a top-k choice, computed in fp32 whatever the model's dtype and whatever autocast says.

    Args:
        dim: D, the width of a token.
        num_experts: E.
        top_k: K, experts per token, in [1, num_experts].
        gate: ``"softmax"`` over the experts, or an independent ``"sigmoid"`` for each.
        normalize: divide a token's K weights by their sum. Computed in log space: the result is exact, and finite
            even where every chosen gate underflows to 0.
        scale: factor of all weights, after the normalisation.
        num_groups: split the experts into this many groups of neighbours; a token then chooses only among the
            experts of its ``top_groups`` best ones. A group is as good as the sum of its two best gates.
        top_groups: how many groups a token may use; set together with ``num_groups``.
        selection_bias: keep a bias per expert that is added to the gates for the choice alone, never to a weight,
            and that :meth:`update_selection_bias` moves against the load (balancing without an auxiliary loss).
            A persistent fp32 buffer ``selection_bias``, which no ``.half()`` or ``.bfloat16()`` casts and no
            state of another dtype replaces.
        bias_update_rate: how far one update moves the bias.
        balance_loss_weight: weight of E * sum_e f_e P_e, with f_e the share of pairs and P_e the mean router
            probability of expert e; 1 where both are uniform, whatever K is. 0 turns it off.
        z_loss_weight: weight of the mean squared log-sum-exp of the logits. 0 turns it off.
        device, dtype: of the weight.

    Raises:
        ValueError: naming the argument, its value and what it may be.
    """

    weight: nn.Parameter
    selection_bias: Tensor | None

    def __init__(
        self,
        *,
        dim: int,
        num_experts: int,
        top_k: int,
        gate: Gate = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        num_groups: int | None = None,
        top_groups: int | None = None,
        selection_bias: bool = False,
        bias_update_rate: float = 1e-3,
        balance_loss_weight: float = 0.0,
        z_loss_weight: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dim = require_count("dim", dim, least=1)
        num_experts = require_count("num_experts", num_experts, least=1)
        top_k = require_count("top_k", top_k, least=1)
        if top_k > num_experts:
            raise ValueError(f"top_k={top_k} must be at most num_experts={num_experts}: a token visits an expert once")
        if gate not in get_args(Gate):
            raise ValueError(f"gate={gate!r} is not known; choose one of {', '.join(get_args(Gate))}")
        if not _is_finite(scale) or scale <= 0:
            raise ValueError(f"scale={scale!r} must be a finite number > 0")
        for field, value in (
            ("bias_update_rate", bias_update_rate),
            ("balance_loss_weight", balance_loss_weight),
            ("z_loss_weight", z_loss_weight),
        ):
            if not _is_finite(value) or value < 0:
                raise ValueError(f"{field}={value!r} must be a finite number >= 0; 0 turns it off")
        _check_groups(num_experts, top_k, num_groups, top_groups)
        if top_k == 1 and normalize:
            warnings.warn(
                "top_k=1 with normalize=True makes every routing weight exactly 1, so the router gets no gradient from "
                "the loss (only from auxiliary losses); set normalize=False to train it",
                stacklevel=2,
            )
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.gate = gate
        self.normalize = normalize
        self.scale = scale
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.bias_update_rate = bias_update_rate
        self.balance_loss_weight = balance_loss_weight
        self.z_loss_weight = z_loss_weight
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        bias_E = torch.empty(num_experts, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", bias_E)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight uniform in +-1/sqrt(D), as in ``nn.Linear``; selection bias 0."""
        bound = 1.0 / math.sqrt(self.dim)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def forward(self, x_TD: Tensor, token_mask_T: Tensor | None = None) -> Routing:
        """Routes every token.

        Args:
            x_TD: tokens, any floating dtype.
            token_mask_T: bool, True for real tokens. Others are routed too, but count neither in the loads nor in
                the auxiliary losses.

        Raises:
            ValueError: if a shape or the mask's dtype does not fit.
        """
        if x_TD.dim() != 2 or x_TD.shape[1] != self.dim:
            raise ValueError(f"x_TD has shape {tuple(x_TD.shape)}; the router takes (tokens, dim={self.dim})")
        if token_mask_T is not None:
            require_token_mask(token_mask_T, x_TD.shape[:1])
        with without_autocast(x_TD.device):
            logits_TE = _high_precision_linear(x_TD, self.weight)
            topk_ids_TK = self._choose(logits_TE.detach())
            topk_weights_TK = self._weigh(logits_TE, topk_ids_TK)
            loads_E = count_loads(topk_ids_TK, self.num_experts, token_mask_T)
            aux_loss, balance_loss, z_loss = self._aux_losses(logits_TE, loads_E, token_mask_T)
        return Routing(
            topk_ids_TK=topk_ids_TK,
            topk_weights_TK=topk_weights_TK,
            loads_E=loads_E,
            logits_TE=logits_TE,
            aux_loss=aux_loss,
            balance_loss=balance_loss,
            z_loss=z_loss,
        )

    @torch.no_grad()
    def update_selection_bias(self, loads_E: Tensor) -> None:
        """bias += rate * sign(mean load - load): an expert with less than its share is chosen more from now on.

        Call once per optimizer step with the *forward* loads of the whole step (int64, shape (E,)); in
        data-parallel training with their sum over ranks. Does nothing for a router without a selection bias.

        Raises:
            ValueError: if ``loads_E`` has another shape.
        """
        if loads_E.shape != (self.num_experts,):
            raise ValueError(f"loads_E has shape {tuple(loads_E.shape)}; it must be ({self.num_experts},)")
        if self.selection_bias is not None:
            # In integers, so that an expert with exactly the mean load is left alone.
            sign_E = torch.sign(loads_E.sum() - self.num_experts * loads_E)
            self._keep_bias_fp32()
            self.selection_bias.add_(sign_E.to(self.selection_bias), alpha=self.bias_update_rate)

    @torch.no_grad()
    def _choose(self, logits_TE: Tensor) -> Tensor:
        if self.selection_bias is None and self.num_groups is None:
            # The order of the gates, without the ties that their rounding (1.0, or underflow to 0) would add.
            return _top_ids(logits_TE, self.top_k)
        rank_TE = torch.softmax(logits_TE, dim=-1) if self.gate == "softmax" else torch.sigmoid(logits_TE)
        if self.selection_bias is not None:
            rank_TE = rank_TE + self.selection_bias
        if self.num_groups is not None and self.top_groups is not None and self.num_groups > 1:
            rank_TGx = rank_TE.view(-1, self.num_groups, self.num_experts // self.num_groups)
            group_TG = rank_TGx.topk(2, dim=-1).values.sum(-1)
            open_TG = torch.zeros_like(group_TG, dtype=torch.bool)
            open_TG.scatter_(-1, _top_ids(group_TG, self.top_groups), True)
            rank_TE = rank_TGx.masked_fill(~open_TG.unsqueeze(-1), -math.inf).flatten(-2)
        return _top_ids(rank_TE, self.top_k)

    def _weigh(self, logits_TE: Tensor, topk_ids_TK: Tensor) -> Tensor:
        chosen_TK = logits_TE.gather(-1, topk_ids_TK)
        if self.normalize:
            # gate / sum of gates = softmax of their logarithms. No epsilon: one large enough to help would outweigh
            # small but legitimate gates. The softmax gate's own normaliser cancels.
            weights_TK = torch.softmax(self._log_gates(chosen_TK), dim=-1)
        elif self.gate == "softmax":
            weights_TK = torch.exp(chosen_TK - torch.logsumexp(logits_TE, dim=-1, keepdim=True))
        else:
            weights_TK = torch.sigmoid(chosen_TK)
        return weights_TK if self.scale == 1.0 else weights_TK * self.scale

    def _log_gates(self, logits: Tensor) -> Tensor:
        """Logarithm of the gates, up to a constant per token."""
        return logits if self.gate == "softmax" else F.logsigmoid(logits)

    def _aux_losses(
        self, logits_TE: Tensor, loads_E: Tensor, token_mask_T: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(weighted sum, balance loss, z-loss); means over the real tokens, 0 where there is none."""
        if self.balance_loss_weight == 0.0 and self.z_loss_weight == 0.0:
            return None, None, None
        real_T = torch.ones_like(logits_TE[:, 0]) if token_mask_T is None else token_mask_T.to(logits_TE.dtype)
        mean_T = real_T / real_T.sum().clamp(min=1.0)
        terms: list[Tensor] = []
        balance_loss = z_loss = None
        if self.balance_loss_weight > 0.0:
            share_E = loads_E.to(logits_TE.dtype) / loads_E.sum().clamp(min=1)
            probability_E = mean_T @ torch.softmax(self._log_gates(logits_TE), dim=-1)
            balance_loss = self.num_experts * torch.dot(share_E, probability_E)
            terms.append(self.balance_loss_weight * balance_loss)
        if self.z_loss_weight > 0.0:
            z_loss = torch.dot(mean_T, torch.logsumexp(logits_TE, dim=-1).square())
            terms.append(self.z_loss_weight * z_loss)
        return (
            torch.stack(terms).sum(),
            None if balance_loss is None else balance_loss.detach(),
            None if z_loss is None else z_loss.detach(),
        )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # With assign=True the state's tensor, of whatever dtype, has become the buffer.
        self._keep_bias_fp32()

    def _keep_bias_fp32(self) -> None:
        """Makes the selection bias fp32 again: whoever replaces or casts the buffer itself (accelerate, the mixed
        precision of FSDP1 and DDP for buffers) goes by no method of a module, so each update looks."""
        bias_E = self.selection_bias
        if bias_E is not None and bias_E.dtype != torch.float32:
            self.selection_bias = bias_E.to(torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        # A cast of the model (.half(), .bfloat16(), .to(dtype)) must not round the selection bias, not even for a
        # moment: its steps are far below the resolution of bf16. Moves between devices go through.
        bias_E = self.selection_bias

        def keep_fp32(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if tensor is bias_E and result.dtype != tensor.dtype else result

        super()._apply(keep_fp32, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        groups = "" if self.num_groups is None else f", groups={self.top_groups} of {self.num_groups}"
        has_bias = self.selection_bias is not None
        return (
            f"dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}, gate={self.gate}, "
            f"normalize={self.normalize}, scale={self.scale}{groups}, selection_bias={has_bias}, "
            f"balance_loss_weight={self.balance_loss_weight}, z_loss_weight={self.z_loss_weight}"
        )


class _HighPrecisionLinear(torch.autograd.Function):
    """x W^T in fp32 (fp64 for fp64 operands), which keeps the operands as they are and not their fp32 copies."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        dtype = _compute_dtype(x_TD, weight_ED)
        return x_TD.to(dtype) @ weight_ED.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        dtype = grad_TE.dtype
        with without_autocast(grad_TE.device):
            dx_TD = (grad_TE @ weight_ED.to(dtype)).to(x_TD.dtype) if needs_x else None
            dweight_ED = (grad_TE.t() @ x_TD.to(dtype)).to(weight_ED.dtype) if needs_weight else None
        return dx_TD, dweight_ED


def _high_precision_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    logits_TE: Tensor = _HighPrecisionLinear.apply(x_TD, weight_ED)  # type: ignore[no-untyped-call]
    return logits_TE


def count_loads(topk_ids_TK: Tensor, num_experts: int, token_mask_T: Tensor | None = None) -> Tensor:
    """Pairs of real tokens routed to each expert, int64 (E,), without a (T, K, E) tensor."""
    if token_mask_T is None:
        pair_TK = torch.ones_like(topk_ids_TK)
    else:
        pair_TK = token_mask_T.to(torch.int64).unsqueeze(-1).expand_as(topk_ids_TK)
    # What bincount computes, with an output shape that a compiler knows; exact in integers in any order.
    loads_E = torch.zeros(num_experts, dtype=torch.int64, device=topk_ids_TK.device)
    return loads_E.scatter_add_(0, topk_ids_TK.reshape(-1), pair_TK.reshape(-1))


def require_token_mask(token_mask: Tensor, shape: torch.Size) -> None:
    """Raises ValueError unless the mask is bool and has one entry per token."""
    if token_mask.dtype != torch.bool:
        raise ValueError(
            f"token_mask has dtype {token_mask.dtype}; it must be torch.bool, True for real tokens "
            "(for a 0/1 attention mask pass attention_mask.bool())"
        )
    if token_mask.shape != shape:
        raise ValueError(f"token_mask has shape {tuple(token_mask.shape)}; it must be {tuple(shape)}, as the tokens")


def _check_groups(num_experts: int, top_k: int, num_groups: int | None, top_groups: int | None) -> None:
    if num_groups is None and top_groups is None:
        return
    if num_groups is None or top_groups is None:
        raise ValueError(f"num_groups={num_groups} and top_groups={top_groups} must be set together, or neither")
    num_groups = require_count("num_groups", num_groups, least=1)
    top_groups = require_count("top_groups", top_groups, least=1)
    if num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} must divide num_experts={num_experts}")
    size = num_experts // num_groups
    if num_groups > 1 and size < 2:
        raise ValueError(
            f"num_groups={num_groups} leaves {size} expert per group, and a group's score is the sum of its two best; "
            f"use at most num_experts/2 = {num_experts // 2} groups, or none"
        )
    if top_groups > num_groups:
        raise ValueError(f"top_groups={top_groups} must be at most num_groups={num_groups}")
    if top_groups * size < top_k:
        raise ValueError(
            f"top_groups={top_groups} groups of {size} experts hold fewer than top_k={top_k}; "
            f"set top_groups to at least {-(-top_k // size)}"
        )


def _compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def _top_ids(rank: Tensor, count: int) -> Tensor:
    # topk may break ties either way; a stable sort leaves equals in the order of their ids.
    return torch.sort(rank, dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
