"""A mixture-of-experts layer: router, routed experts with a recalibrated backward, optional shared expert.

Shape suffixes: T tokens (all leading dimensions flattened), K choices per token, E experts, D model width,
F expert width, S shared expert width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lrmoe.config import LRMoEConfig, require_config, require_count
from lrmoe.experts.layer_control import Clock, LayerControl, exact_control
from lrmoe.experts.stepping import Stepping
from lrmoe.experts.validation import check_not_transformed
from lrmoe.labels import layer_in_words
from lrmoe.layer.aux_loss import carry_aux_loss
from lrmoe.layer.parts import Experts, SharedExpert
from lrmoe.ops import activations
from lrmoe.routing import Gate, TopKRouter, require_token_mask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Stands in for a layer's control in evaluation mode.
_EXACT = exact_control("evaluation")


class MoE(nn.Module):
    """Replaces a transformer's feed-forward block. Full forward; backward as ``config`` says in training mode, exact in
    evaluation mode.

    Auxiliary losses need no collecting: the backward of the layer's output adds their gradient, times
    :meth:`set_aux_loss_scale`'s factor, once per forward trained on. The loss you print does not include them.

    Args:
        dim: D, the width of a token.
        expert_dim: F, the width of an expert.
        num_experts: E.
        top_k: K, experts per token.
        config: the recalibration of the backward; default ``LRMoEConfig()``. :func:`lrmoe.attach` replaces it.
        activation: of the gated experts, shared one included: ``"silu"`` (SwiGLU), ``"gelu"``, ``"gelu_tanh"``,
            ``"relu"`` or ``"clamped_swiglu(alpha=..,limit=..)"``.
        bias: give the experts biases.
        shared_expert_dim: S, the width of an expert that every token visits, never recalibrated; None for none.
        shared_expert_gate: multiply the shared expert's output by a learned sigmoid gate per token.
        gate, normalize, scale, num_groups, top_groups, selection_bias, bias_update_rate, balance_loss_weight,
            z_loss_weight: of the :class:`TopKRouter`.
        device, dtype: of the parameters.

    Attributes:
        router: the :class:`TopKRouter`.
        experts: holds ``gate_up_proj (E, 2F, D)``, gate rows first, ``down_proj (E, D, F)`` and, with ``bias``,
            ``gate_up_bias (E, 2F)`` and ``down_bias (E, D)``.
        control: position in training and meter of this layer.

    Raises:
        ValueError: naming the argument, its value and what it may be.
    """

    def __init__(
        self,
        *,
        dim: int,
        expert_dim: int,
        num_experts: int,
        top_k: int,
        config: LRMoEConfig | None = None,
        activation: str = "silu",
        bias: bool = False,
        shared_expert_dim: int | None = None,
        shared_expert_gate: bool = False,
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
        config = require_config(config)
        expert_dim = require_count("expert_dim", expert_dim, least=1)
        if shared_expert_dim is not None:
            shared_expert_dim = require_count("shared_expert_dim", shared_expert_dim, least=1)
        elif shared_expert_gate:
            raise ValueError("shared_expert_gate=True needs a shared expert; set shared_expert_dim")
        if activations.get(activation).interleaved:
            raise ValueError(
                f"activation={activation!r}: this layer's gate rows come first; drop '|interleaved', which is for "
                "routed_experts on weights of that layout"
            )
        self.router = TopKRouter(
            dim=dim,
            num_experts=num_experts,
            top_k=top_k,
            gate=gate,
            normalize=normalize,
            scale=scale,
            num_groups=num_groups,
            top_groups=top_groups,
            selection_bias=selection_bias,
            bias_update_rate=bias_update_rate,
            balance_loss_weight=balance_loss_weight,
            z_loss_weight=z_loss_weight,
            device=device,
            dtype=dtype,
        )
        self.experts = Experts(num_experts, dim, expert_dim, bias=bias, device=device, dtype=dtype)
        self.shared_expert: SharedExpert | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if shared_expert_dim is not None:
            self.shared_expert = SharedExpert(dim, shared_expert_dim, activation, device=device, dtype=dtype)
            if shared_expert_gate:
                self.shared_expert_gate = nn.Linear(dim, 1, bias=False, device=device, dtype=dtype)
        self.dim = self.router.dim
        self.expert_dim = expert_dim
        self.num_experts = self.router.num_experts
        self.top_k = self.router.top_k
        self.activation = activation
        self.control = self._own_control = LayerControl(Clock(config))
        self._stepping: Stepping | None = None
        # A tensor changed in place: a compiled layer sees a new scale as data. Not a buffer: neither cast nor saved.
        self._aux_loss_scale = torch.ones((), dtype=torch.float32, device="cpu")

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Every token through its experts.

        1. The control says at which step and microbatch this forward is, and which tokens are real.
        2. The router gives each token K experts and their weights, and counts the loads.
        3. The experts compute every pair, here or, with an engine, on the ranks that hold them
           (:func:`~lrmoe.experts.operator.controlled_experts`); what they save is for the recalibrated backward.
        4. The shared expert is added, and the auxiliary losses are hung on the output.

        Args:
            x: (..., D), any floating dtype.
            token_mask: bool of shape x.shape[:-1], True for real tokens. All tokens get an output; those that are
                not real count neither in loads nor in auxiliary losses, and displace nothing in the backward. By
                default all are real, or, under :func:`lrmoe.attach` in training, those of the model's own
                ``attention_mask`` argument where it fits.

        Returns:
            (..., D), in the dtype of x.

        Raises:
            ValueError: if a shape or dtype does not fit.
        """
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be dim={self.dim}")
        if not x.is_floating_point():
            raise ValueError(f"x has dtype {x.dtype}; it must be a floating dtype")
        if token_mask is not None:
            require_token_mask(token_mask, x.shape[:-1])
        check_not_transformed(layer_in_words(self.control.name), batches=True)
        control = self.control if self.training else _EXACT
        if not self.is_attached and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._watch_steps()
        moment = control.moment(x)
        x_TD = x.reshape(-1, self.dim)
        token_mask_T = None if token_mask is None else token_mask.reshape(-1)
        if token_mask is None and torch.is_grad_enabled():
            token_mask_T = moment.token_mask_T
        routing = self.router(x_TD, token_mask_T)
        out_TD: Tensor = self.experts(
            x_TD,
            routing.topk_ids_TK,
            routing.topk_weights_TK,
            control=control,
            moment=moment,
            activation=self.activation,
            token_mask_T=token_mask_T,
        )
        if self.shared_expert is not None:
            # The dtype of the products is that of the weights, as in the routed experts, or autocast's.
            shared_x_TD = x_TD.to(self.shared_expert.down_proj.weight.dtype)
            shared_TD = self.shared_expert(shared_x_TD)
            if self.shared_expert_gate is not None:
                shared_TD = shared_TD * torch.sigmoid(self.shared_expert_gate(shared_x_TD))
            out_TD = out_TD + shared_TD
        out_TD = out_TD.to(x.dtype)
        if routing.aux_loss is not None and routing.aux_loss.requires_grad:
            out_TD = carry_aux_loss(out_TD, routing.aux_loss * self._aux_loss_scale)
        return out_TD.reshape(x.shape)

    @property
    def is_attached(self) -> bool:
        """Whether a recalibrator moves this layer along with training."""
        return self.control is not self._own_control

    def hand(self, control: LayerControl) -> None:
        """Makes this control the layer's; whoever moves it on also sees to it that it is moved."""
        self.control = control
        if self._stepping is not None:
            self._stepping.close()
            self._stepping = None

    def _watch_steps(self) -> None:
        """A forward that may be trained on, without a recalibrator: nobody but the user moves this layer on."""
        drops = self.control.config.drop > 0.0
        # A router that somebody has put in the place of ours need not have one.
        has_bias = getattr(self.router, "selection_bias", None) is not None
        if self._stepping is None and (drops or has_bias):
            self._stepping = Stepping(self, [self], self.control.clock, wants_drop=drops, alone=True)
        if self._stepping is not None:
            self._stepping.before_forward(self.training)

    def step(self) -> None:
        """Call once after each optimizer step where no recalibrator is attached: moves this layer's schedule and
        draws on, and updates the selection bias if there is one.

        Raises:
            RuntimeError: if the layer is attached; then ``Recalibrator.step()`` does this for all layers.
        """
        if self.is_attached:
            raise RuntimeError("this layer is attached to a recalibrator; call the recalibrator's step() instead")
        if self._stepping is not None:
            self._stepping.stepped(counted=self.training)
        self.update_selection_bias()
        self.control.clock.move_to(step=self.control.clock.step + 1)

    def update_selection_bias(self, load_group: ProcessGroup | None = None) -> None:
        """Updates the router's selection bias from the loads of all forwards trained on since the last update.

        ``step`` does it; call it only to update at other times. Loads are counted when a backward runs in training
        mode, so neither evaluation nor the recomputation of activation checkpointing is counted. Does nothing without
        a selection bias, or where no backward ran.

        Args:
            load_group: ranks that train copies of this router on other tokens; their loads are added up first, so
                that the copies stay the same. Every rank of it has to call, whether it ran a backward or not. Ranks of
                one expert-parallel group know each other's loads already.
        """
        if self.router.selection_bias is None:
            return
        load_E = self.control.meter.take_load_E()
        if load_group is not None:
            if load_E is None:
                load_E = torch.zeros(self.num_experts, dtype=torch.int64, device=self.router.weight.device)
            load_E = load_E.clone()
            torch.distributed.all_reduce(load_E, group=load_group)
        if load_E is not None and bool(load_E.any()):
            self.router.update_selection_bias(load_E)

    def set_aux_loss_scale(self, scale: float | Tensor) -> None:
        """The factor on the auxiliary losses' gradient, 1 at first: what you multiply the loss by before backward.

        That is ``1 / n`` where n microbatches accumulate into one step, times ``scaler.get_scale()`` under a
        gradient scaler. Set it before the forward; changing it between a forward and its backward is an error that
        autograd reports.

        Raises:
            ValueError: if it is negative or not finite.
        """
        value = float(scale)
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"scale={value!r} must be a finite number >= 0")
        self._aux_loss_scale.fill_(value)

    def reset_parameters(self) -> None:
        """Draws all parameters anew from torch's generator; the selection bias becomes 0."""
        for part in (self.router, self.experts, self.shared_expert, self.shared_expert_gate):
            if part is not None:
                part.reset_parameters()

    def extra_repr(self) -> str:
        return f"activation={self.activation}, drop={self.control.config.drop}, selector={self.control.config.selector}"
