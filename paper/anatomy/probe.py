"""What dropping does to the gradient of given weights: measured against the exact gradient, batch by batch.

T tokens, K choices, E experts, D model width, F expert width. S is a layer's exact gradient of the experts' down
projection, the sum of all pairs' contributions, R a contribution's squared norm; a hat marks what dropping makes of
either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrmoe.config import LRMoEConfig
from lrmoe.control import Recalibrator
from lrmoe.experts.layer_control import Clock, LayerControl
from lrmoe.experts.meter import recording
from lrmoe.experts.operator import controlled_experts
from lrmoe.hosts.bound_experts import activation_name
from lrmoe.hosts.expert_modules import Experts, weights

Record = dict[str, Any]
WEIGHTS = ("down", "gate_up", "router")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A recalibration that is measured.

    Attributes:
        variant, rate, router_grad: what its records are known by.
        config: at a drop of ``rate``, without schedule and guard.
        alone: whether it is also measured one layer at a time.
    """

    variant: str
    rate: float
    router_grad: str
    config: LRMoEConfig
    alone: bool

    @property
    def about(self) -> Record:
        """The keys of its records."""
        return {"variant": self.variant, "rate": self.rate, "router_grad": self.router_grad}


def probe(
    model: PreTrainedModel,
    recal: Recalibrator,
    batches: Sequence[dict[str, Tensor]],
    settings: Sequence[Setting],
    *,
    step: int,
    progress: Callable[[int], None] = lambda batch: None,
) -> Record:
    """Measures every setting on every batch with the model's weights as they are.

    Only the layers' experts and routers get a gradient here; the model's weights, its generator's state and the
    recalibrator's position are afterwards what they were.

    Args:
        model: in float32, with Transformers' expert modules.
        recal: attached to it.
        batches: at least two, of ``input_ids`` and ``labels``; batch b draws as microbatch b of ``step``.
        settings: what to measure.
        progress: told of each batch, from 1 on.

    Returns:
        Squared norms, summed over experts; means over the B batches where nothing else is said.

        - ``loss``: nats a token, without the balancing loss.
        - ``exact``: for each layer and weight, ``gradient`` ||G||^2 of a batch, ``mean_gradient`` that of the batches'
          mean, ``noise`` E||G - mean G||^2 over batches (divided by B - 1).
        - ``errors``: for each setting, layer and weight, with all layers dropping at once as in training, ``one``
          ||Ghat - G||^2 of a batch and ``mean`` that of the batches' mean.
        - ``alone``: for each setting that is measured so and each layer, given the exact gradient of the layer's
          output: ``importance`` sum R, ``dropped_importance`` of the dropped pairs, ``variance`` V*, ``gradient``
          ||S||^2, ``error`` ||Shat - S||^2, ``dropped_sum`` ||sum of the dropped contributions||^2.
    """
    if len(batches) < 2:
        raise ValueError(f"batches={len(batches)} must be at least 2: one shows no noise and nothing that averages out")
    watched = _Watched(model, recal)
    totals = _Totals()
    with watched.in_training_mode(), _position_kept(recal):
        for number, batch in enumerate(batches):
            _set(recal, _EXACT, step, number)
            with watched.operands() as operands:
                loss, exact = watched.gradients(batch, number)
            totals.add_exact(loss, exact)
            for setting in settings:
                _set(recal, setting.config, step, number)
                _, found = watched.gradients(batch, number)
                totals.add_error(setting, exact, found)
            for setting in settings:
                if setting.alone:
                    for layer, control in enumerate(recal.layers):
                        gradient = watched.oriented(control, exact[layer, "down"])
                        totals.add_alone(
                            setting, layer, _alone(operands[layer], gradient, setting, step, number, layer)
                        )
            progress(number + 1)
    return totals.records(len(batches))


_EXACT = LRMoEConfig(drop=0.0, guard_variance=None, guard_tail=None)


@dataclass(slots=True)
class Operands:
    """What a layer's experts computed with, and the gradient of what they gave: ``grad_TD``."""

    module: Experts
    x_TD: Tensor
    ids_TK: Tensor
    alpha_TK: Tensor
    grad_TD: Tensor | None = None


def down_gradient(
    operands: Operands, config: LRMoEConfig, *, step: int, microbatch: int, layer: int, leave_TK: Tensor | None = None
) -> tuple[Tensor, LayerControl]:
    """The gradient of the down projection, (E, D, F), of one layer that drops alone; and its control, whose meter has
    seen this one backward.

    Args:
        leave_TK: bool, pairs to run without.
    """
    assert operands.grad_TD is not None
    module = operands.module
    control = LayerControl(Clock(config, layers=layer + 1, step=step, microbatch=microbatch), layer=layer)
    gate_up, down = (weight.detach() for weight in weights(module))
    down.requires_grad_()
    ids_TK = operands.ids_TK if leave_TK is None else operands.ids_TK.masked_fill(leave_TK, -1)
    with torch.enable_grad():
        out_TD = controlled_experts(
            operands.x_TD,
            ids_TK,
            operands.alpha_TK,
            gate_up,
            down,
            control=control,
            moment=control.moment(operands.x_TD, batch_major=True),
            activation=activation_name(module),
            gate_up_bias=module.gate_up_proj_bias.detach() if module.has_bias else None,
            down_bias=module.down_proj_bias.detach() if module.has_bias else None,
        )
        (gradient,) = torch.autograd.grad(out_TD, down, operands.grad_TD)
    return gradient, control


def _alone(
    operands: Operands, exact_EDF: Tensor, setting: Setting, step: int, microbatch: int, layer: int
) -> dict[str, float]:
    """One layer dropping by itself, in one batch: the terms of the ``alone`` records."""
    at = partial(down_gradient, operands, step=step, microbatch=microbatch, layer=layer)
    with recording() as calls:
        found_EDF, control = at(setting.config)
    totals = control.meter.totals()
    assert totals is not None
    error = _square(found_EDF - exact_EDF)
    call = calls[0]
    dropped_sum = error
    # With weights of 1 the error is the sum of what was dropped.
    if bool((call.weight_TK[call.kept_TK] != 1.0).any()):
        dropped_sum = _square(at(_EXACT, leave_TK=call.kept_TK)[0])
    return {
        "importance": totals["importance_total"],
        "dropped_importance": totals["importance_total"] - totals["importance_kept"],
        "variance": totals["variance"],
        "gradient": _square(exact_EDF),
        "error": error,
        "dropped_sum": dropped_sum,
    }


class _Watched:
    """The weights whose gradients are compared, and the operands of the layers they belong to."""

    def __init__(self, model: PreTrainedModel, recal: Recalibrator) -> None:
        self._model = model
        self._modules: dict[str, Experts] = dict(recal.modules())
        self._weights: dict[tuple[int, str], nn.Parameter] = {}
        for layer, (name, module) in enumerate(self._modules.items()):
            self._weights[layer, "down"] = module.down_proj
            self._weights[layer, "gate_up"] = module.gate_up_proj
            self._weights[layer, "router"] = _router_weight(model, name, module)

    def oriented(self, name: str, gradient: Tensor) -> Tensor:
        """A down projection's gradient as (E, D, F)."""
        return gradient.transpose(1, 2) if self._modules[name].is_transposed else gradient

    @contextmanager
    def in_training_mode(self) -> Iterator[None]:
        """Training mode, gradients for the watched weights alone; both as before afterwards."""
        training = self._model.training
        wanted = {parameter: parameter.requires_grad for parameter in self._model.parameters()}
        ours = set(self._weights.values())
        try:
            self._model.train()
            for parameter in wanted:
                parameter.requires_grad_(parameter in ours)
            yield
        finally:
            self._model.train(training)
            for parameter, before in wanted.items():
                parameter.requires_grad_(before)

    @contextmanager
    def operands(self) -> Iterator[list[Operands]]:
        """Fills the list with the layers' operands in the forward and backward that run inside the block."""
        found: list[Operands] = []

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out_TD: Tensor) -> None:
            x_TD, ids_TK, alpha_TK = (value.detach() for value in (*args, *kwargs.values()))
            operands = Operands(module, x_TD, ids_TK, alpha_TK)
            found.append(operands)
            out_TD.register_hook(partial(_keep_gradient, operands))  # type: ignore[no-untyped-call]

        handles = [module.register_forward_hook(keep, with_kwargs=True) for module in self._modules.values()]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def gradients(self, batch: dict[str, Tensor], number: int) -> tuple[float, dict[tuple[int, str], Tensor]]:
        """The language-model loss and the gradients of loss and balancing loss; what a model draws (dropout) depends on
        the batch's number alone."""
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(number)
            outputs = self._model(**batch)
            gradients = torch.autograd.grad(outputs.loss, list(self._weights.values()))
        loss, balance = float(outputs.loss.detach()), getattr(outputs, "aux_loss", None)
        if balance is not None:
            loss -= self._model.config.get_text_config().router_aux_loss_coef * float(balance.detach())
        return loss, dict(zip(self._weights, gradients, strict=True))


def _keep_gradient(operands: Operands, grad_TD: Tensor) -> None:
    operands.grad_TD = grad_TD


def _router_weight(model: nn.Module, name: str, experts: Experts) -> nn.Parameter:
    """The (E, D) weight of the router beside an expert module."""
    parent, _, own = name.rpartition(".")
    num_experts = experts.down_proj.shape[0]
    for path, parameter in model.get_submodule(parent).named_parameters():
        if parameter.dim() == 2 and parameter.shape[0] == num_experts and not path.startswith(f"{own}."):
            return parameter
    raise ValueError(f"no router weight of {num_experts} rows was found beside {name}; this model cannot be probed")


def _set(recal: Recalibrator, config: LRMoEConfig, step: int, microbatch: int) -> None:
    recal.clock.config = config
    # The model's own forward counts the microbatch up.
    recal.clock.move_to(step=step, microbatch=microbatch - 1)


@contextmanager
def _position_kept(recal: Recalibrator) -> Iterator[None]:
    clock = recal.clock
    before = clock.config, clock.step, clock.microbatch
    try:
        yield
    finally:
        clock.config = before[0]
        clock.move_to(step=before[1], microbatch=before[2])
        recal.reset_metrics()


def _square(tensor: Tensor) -> float:
    """The squared norm, accumulated in fp64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


@dataclass(slots=True)
class _Sum:
    """Of tensors over batches: their sum and the sum of their squared norms."""

    total: Tensor
    squares: float = 0.0

    def add(self, tensor: Tensor) -> None:
        self.total += tensor
        self.squares += _square(tensor)

    def mean_square(self, batches: int) -> float:
        """The squared norm of the mean."""
        return _square(self.total) / batches**2


@dataclass(slots=True)
class _Totals:
    """Sums over batches."""

    loss: float = 0.0
    exact: dict[tuple[int, str], _Sum] = field(default_factory=dict)
    errors: dict[tuple[Setting, int, str], _Sum] = field(default_factory=dict)
    alone: dict[tuple[Setting, int], dict[str, float]] = field(default_factory=dict)

    def add_exact(self, loss: float, gradients: dict[tuple[int, str], Tensor]) -> None:
        self.loss += loss
        for key, gradient in gradients.items():
            self.exact.setdefault(key, _Sum(torch.zeros_like(gradient))).add(gradient)

    def add_error(
        self, setting: Setting, exact: dict[tuple[int, str], Tensor], found: dict[tuple[int, str], Tensor]
    ) -> None:
        for (layer, weight), gradient in exact.items():
            error = found[layer, weight] - gradient
            self.errors.setdefault((setting, layer, weight), _Sum(torch.zeros_like(error))).add(error)

    def add_alone(self, setting: Setting, layer: int, terms: dict[str, float]) -> None:
        sums = self.alone.setdefault((setting, layer), dict.fromkeys(terms, 0.0))
        for name, value in terms.items():
            sums[name] += value

    def records(self, batches: int) -> Record:
        exact = []
        for (layer, weight), total in self.exact.items():
            mean = total.mean_square(batches)
            square = total.squares / batches
            noise = (square - mean) * batches / (batches - 1)
            about = {"layer": layer, "weight": weight}
            exact.append({**about, "gradient": square, "mean_gradient": mean, "noise": noise})
        return {
            "loss": self.loss / batches,
            "batches": batches,
            "exact": exact,
            "errors": [
                {
                    **setting.about,
                    "layer": layer,
                    "weight": weight,
                    "one": total.squares / batches,
                    "mean": total.mean_square(batches),
                }
                for (setting, layer, weight), total in self.errors.items()
            ],
            "alone": [
                {**setting.about, "layer": layer, **{name: value / batches for name, value in sums.items()}}
                for (setting, layer), sums in self.alone.items()
            ],
        }
