"""Expert parallelism in Transformers: ``DistributedConfig(ep_size=..., ep_implementation="lrmoe")``.

Importing this module makes the name known to Transformers, whose expert-parallel plan then hands the tokens of a layer
to :class:`lrmoe.parallel.ExpertParallel`: rows travel to the experts, and of the backward only what its quotas keep.
Which rank keeps which parameters stays Transformers' business: experts are whole and in contiguous ranges
(``Shard(0)`` on its ``ep`` mesh), and FSDP2 divides the gradient of an expert by the number of batches it has seen.

T tokens (B*S, batch-major), K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from lrmoe.hosts.bound_experts import activation_name, control_of, moment_mask
from lrmoe.hosts.expert_modules import EXPERT_PARALLEL, Experts, weights

if TYPE_CHECKING:
    from lrmoe.balance.policy import Policy
    from lrmoe.parallel import ExpertParallel

__all__ = ["NAME", "LRMoEExpertParallel", "engines", "set_balancer"]

NAME = "lrmoe"


class LRMoEExpertParallel(EPImplementation):  # type: ignore[misc]
    """What brings the experts of one layer their tokens. Transformers makes one for each expert module it shards.

    It runs the experts too, so the model cannot be switched to another implementation of them: once attached, a forward
    then raises.

    Attributes:
        engine: the layer's :class:`~lrmoe.parallel.ExpertParallel`, shared by all layers of a model once it is attached
            or was given a balancer; until then the layer has one of its own that moves no experts.
        chosen: whether the engine is one that :func:`set_balancer` made.
    """

    def __init__(self, experts: Experts, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._experts = experts
        self.num_experts: int = self.num_local_experts * ep_mesh.size()
        self.engine: ExpertParallel | None = None
        self.chosen = False
        # Found again by `engines` and `set_balancer`; past nn.Module's own bookkeeping, as this is no part of it.
        object.__setattr__(experts, EXPERT_PARALLEL, self)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the tokens of this rank through all experts of the group; Transformers calls it with the parameters of
        the module being this rank's local tensors.

        Args:
            hidden_states: (T, D); the same on all ranks of a tensor-parallel group, of which each sends its part.
            top_k_index: (T, K) int64, global expert ids.
            top_k_weights: (T, K).

        Returns:
            (T, D) in the dtype of ``hidden_states``.

        Raises:
            ValueError: if the module is attached and its config names another experts implementation.
        """
        module = self._experts
        if hasattr(module, "lrmoe_control") and (named := module.config._experts_implementation) != NAME:
            raise ValueError(
                f"the attached model was switched to experts_implementation={named!r}, which cannot run its experts: "
                f'with ep_implementation="{NAME}" that is done by what exchanges the tokens. Set it back with '
                f'model.set_experts_implementation("{NAME}"); detach() gives the exact backward; load the model with '
                'ep_implementation="auto" to choose how experts run'
            )
        control = control_of(module)
        moment = control.moment(hidden_states, batch_major=True)
        mask_T = moment_mask(control, moment)
        num_tokens, dim = hidden_states.shape
        shares_tokens = self.tp_mesh.size() > 1
        if shares_tokens:
            hidden_states, top_k_index, top_k_weights = map(self._part, (hidden_states, top_k_index, top_k_weights))
            mask_T = None if mask_T is None else self._part(mask_T)
            # A part may begin and end within a sequence.
            moment = moment._replace(sequence_T=None)
        if self.engine is None:
            self.engine = _engine(self, policy="fixed")
        gate_up_proj, down_proj = weights(module)
        out_TD: Tensor = self.engine.controlled_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            gate_up_proj,
            down_proj,
            control=control,
            moment=moment,
            activation=activation_name(module),
            gate_up_bias=module.gate_up_proj_bias if module.has_bias else None,
            down_bias=module.down_proj_bias if module.has_bias else None,
            token_mask_T=mask_T,
        )
        if shares_tokens:
            # The gather's backward hands each rank the gradient of its own rows.
            whole = DTensor.from_local(
                out_TD.contiguous(), self.tp_mesh, [Shard(0)], shape=torch.Size((num_tokens, dim)), stride=(dim, 1)
            )
            out_TD = whole.full_tensor()
        return out_TD.to(hidden_states.dtype)

    def _part(self, tensor: Tensor) -> Tensor:
        """This rank's rows of what all ranks of the tensor-parallel group hold; its backward gathers the gradient."""
        whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        part: Tensor = whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()
        return part


def set_balancer(
    model: nn.Module,
    policy: str | Policy = "lrmoe",
    *,
    slots: int | None = None,
    capacity: float | None = None,
    timeout_s: float | None = None,
) -> ExpertParallel:
    """Says how the ranks of an expert-parallel model share its load; call it on every rank, before training.

    Without this call :func:`lrmoe.attach` gives the model the defaults. One engine serves all layers, so the slots are
    for the whole model.

    Args:
        model: loaded with ``DistributedConfig(ep_size=..., ep_implementation="lrmoe")``.
        policy: a name that :func:`lrmoe.balance.get` knows, or a :class:`~lrmoe.balance.policy.Policy`. Experts stay at
            home under every policy, where Transformers keeps them; ranks that compute with others get copies.
        slots: of a rank, in the policy's sense; None for its default.
        capacity: largest load of a rank in a layer, in the policy's unit; None for the policy's own target.
        timeout_s: seconds to wait for another rank; None for the process group's.

    Raises:
        ValueError: if no layer of the model came with this implementation, naming the mend.
    """
    found = engines(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer with ep_implementation={NAME!r}; load it with from_pretrained(..., "
            f'distributed_config=DistributedConfig(fsdp_size=N, ep_size=N, ep_implementation="{NAME}"))'
        )
    layers = list(found.values())
    engine = share_engine(layers, policy=policy, slots=slots, capacity=capacity, timeout_s=timeout_s)
    for layer in layers:
        layer.chosen = True
    return engine


def engines(model: nn.Module) -> dict[str, LRMoEExpertParallel]:
    """What brings the experts their tokens, by module name; empty for a model without this implementation."""
    found = {name: of_module(module) for name, module in model.named_modules()}
    return {name: layer for name, layer in found.items() if layer is not None}


def of_module(module: nn.Module) -> LRMoEExpertParallel | None:
    """What brings this expert module its tokens, or None."""
    layer = vars(module).get(EXPERT_PARALLEL)
    return layer if isinstance(layer, LRMoEExpertParallel) else None


def share_engine(layers: list[LRMoEExpertParallel], **options: Any) -> ExpertParallel:
    """Gives all layers one engine, made with ``options``."""
    sizes = sorted({layer.num_experts for layer in layers})
    if len(sizes) > 1:
        raise ValueError(
            f"the layers have different numbers of experts ({', '.join(map(str, sizes))}), which cannot share replica "
            'slots; load the model with ep_implementation="auto"'
        )
    engine = _engine(layers[0], **options)
    for layer in layers:
        layer.engine = engine
    return engine


def _engine(layer: LRMoEExpertParallel, **options: Any) -> ExpertParallel:
    from lrmoe.parallel import ExpertParallel

    group = layer.ep_mesh.get_group()
    # Parameters, their names and checkpoints are Transformers'.
    return ExpertParallel(group, num_experts=layer.num_experts, storage="home", **options)


EPImplementationInterface.register(NAME, LRMoEExpertParallel)
