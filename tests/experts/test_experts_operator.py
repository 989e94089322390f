"""The operator as torch sees it: registration, compilation, what it saves, what it refuses."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from experts.problem import PARAMETERS, Problem, error, make, routes, run
from torch import Tensor
from torch._dynamo.utils import counters

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.experts.layer_control import Clock, LayerControl
from lrmoe.experts.operator import controlled_experts
from lrmoe.experts.recipe import Recipe, parse_recipe, recipe_text

SAVES = ("preactivation", "input")


def operator_arguments(problem: Problem, config: LRMoEConfig, *, train: bool = True) -> tuple[Any, ...]:
    control = LayerControl(Clock(config, step=2))
    leaves = problem.leaves()
    biases = (problem.gate_up_bias is not None, problem.down_bias is not None)
    return (
        leaves["x_TD"],
        problem.ids_TK,
        leaves["topk_weights_TK"],
        [leaves[name] for name in PARAMETERS if name in leaves],
        problem.mask_T,
        torch.arange(len(problem.ids_TK)) // 3,
        torch.cat([control.clock.position_3, control.identity_3[:2]]),
        control.clock.drop_L,
        recipe_text(config, problem.activation, biases=biases),
        train,
    )


@pytest.mark.parametrize(("dim", "width", "dtype"), [(8, 12, torch.float64), (16, 7, torch.float32)])
@pytest.mark.parametrize("save", SAVES)
def test_operator_is_registered_as_it_behaves(save: Any, dim: int, width: int, dtype: torch.dtype) -> None:
    """Schema, fake tensors, strides and autograd, also for widths whose grouped products come back padded."""
    for bias, router_grad, remainder in ((False, "sum_rule", "none"), (True, "exact", "mean")):
        mask_T = torch.arange(17) < 12 if bias else None
        problem = make(dtype=dtype, dim=dim, width=width, bias=bias, mask_T=mask_T)
        config = LRMoEConfig(drop=0.5, save=save, router_grad=router_grad, remainder=remainder)  # type: ignore[arg-type]
        arguments = operator_arguments(problem, config)
        torch.library.opcheck(torch.ops.lrmoe.routed_experts.default, arguments)
        torch.library.opcheck(
            torch.ops.lrmoe.routed_experts.default,
            operator_arguments(problem, config, train=False),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize(("remainder", "drop"), [("none", 0.5), ("mean", 0.5), ("mean", 0.0)])
def test_backward_operator_is_registered_as_it_behaves(remainder: Any, drop: float) -> None:
    problem = make(dtype=torch.float32, dim=16, width=7, bias=True)
    config = LRMoEConfig(drop=drop, remainder=remainder)
    arguments = operator_arguments(problem, config)
    with torch.no_grad():
        _, saved = torch.ops.lrmoe.routed_experts(*arguments)
    x_TD, _, alpha_TK, weights, mask_T, sequence_T, ticket_5, _, recipe, _ = arguments
    x_TD, alpha_TK, weights = x_TD.detach(), alpha_TK.detach(), [weight.detach() for weight in weights]
    for needs in ([True] * 6, [False, True, False, True, False, True]):
        torch.library.opcheck(
            torch.ops.lrmoe.routed_experts_backward.default,
            (
                *(problem.grad_TD, x_TD, alpha_TK, weights, mask_T, sequence_T),
                *([*saved, ticket_5, saved[-1], ticket_5], recipe, needs),
            ),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu(alpha=1.702,limit=7.0)|interleaved"])
def test_a_recipe_is_read_as_it_was_written(activation: str, biases: tuple[bool, bool]) -> None:
    for budget in (None, 0.1, 1e-17 / 3):
        config = LRMoEConfig(selector="auto", metric="forward", quota="level", save="input", error_budget=budget)
        recipe, names = parse_recipe(recipe_text(config, activation, biases=biases))
        assert recipe == Recipe.of(config, activation)
        assert [name in names for name in PARAMETERS] == [True, True, *biases]


def test_compiled_training_does_not_recompile() -> None:
    """20 steps with other loads each, a rising drop, an expert without tokens on step 7 and a new length on step 12:
    one graph for the first length, one for all others, and the numbers of the eager run."""
    config = LRMoEConfig(drop=0.6, warmup_steps=3, ramp_steps=10, router_grad="exact", remainder="mean")
    base = make(dtype=torch.float32, tokens=32, dim=16, width=8)
    generator = torch.Generator().manual_seed(5)

    def train(function: Any) -> list[Tensor]:
        control = LayerControl(Clock(config))
        results = []
        generator.manual_seed(5)
        for step in range(20):
            control.clock.move_to(step=step)
            tokens = 32 if step < 12 else 20 + step
            ids_TK = routes(tokens, 5, 2, generator)
            if step == 7:
                ids_TK = torch.where(ids_TK == 3, 4, ids_TK)
            leaves = base.leaves()
            x_TD = torch.randn(tokens, 16, generator=generator).requires_grad_()
            alpha_TK = torch.rand(tokens, 2, generator=generator).requires_grad_()
            out_TD = function(x_TD, ids_TK, alpha_TK, leaves["gate_up_proj"], leaves["down_proj"], control)
            out_TD.square().sum().backward()
            results += [out_TD.detach(), x_TD.grad, alpha_TK.grad, leaves["gate_up_proj"].grad]
        meter = control.meter
        assert meter.backwards == 20
        return results

    def layer(x: Tensor, ids: Tensor, alpha: Tensor, gate_up: Tensor, down: Tensor, control: LayerControl) -> Tensor:
        return controlled_experts(x * 2, ids, alpha, gate_up, down, control=control, moment=control.moment(x)).tanh()

    torch._dynamo.reset()
    counters.clear()
    compiled = train(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    for found, wanted in zip(compiled, train(layer), strict=True):
        assert error(found, wanted.double()) < 1e-5


class Saved:
    """Every tensor autograd keeps for the backward."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __enter__(self) -> Saved:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self._hooks.__exit__(*reason)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor

    def sizes(self, but: list[Tensor]) -> int:
        """Bytes, counting each storage once, without those of ``but``."""
        known = {tensor.untyped_storage().data_ptr() for tensor in but}
        total = 0
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            if tensor.numel() and storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                total += storage.nbytes()
        return total


@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("router_grad", ["exact", "sum_rule"])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 12), (torch.bfloat16, 12), (torch.float32, 11)])
def test_bytes_saved_for_the_backward(dtype: torch.dtype, width: int, save: Any, router_grad: Any, drop: float) -> None:
    """x, alpha and ||phi||^2 in fp32, the permutation in int64 and five small things per expert and call; (N, 2F) with
    save="preactivation"; the output with the sum rule. The drop changes nothing: the choice needs gradients."""
    tokens, dim, experts, top_k = 33, 16, 5, 2
    pairs = tokens * top_k
    problem = make(dtype=dtype, tokens=tokens, dim=dim, width=width, experts=experts, top_k=top_k)
    leaves = problem.leaves()
    config = LRMoEConfig(drop=drop, save=save, router_grad=router_grad)
    with Saved() as saved:
        lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=config, **leaves)
    found = saved.sizes([leaves["gate_up_proj"], leaves["down_proj"]])
    item = dtype.itemsize
    scalars = pairs * (4 + 4 + 8)
    small = experts * (4 + 8 + 8) + 5 * 8 + 8
    wanted = tokens * dim * item + scalars + small
    wanted += pairs * 2 * width * item if save == "preactivation" else 0
    wanted += tokens * dim * item if router_grad == "sum_rule" else 0
    assert found == wanted
    # Neither the gathered input, nor the experts' outputs, nor phi.
    assert not [t.shape for t in saved.tensors if t.shape in ((pairs, dim), (pairs, width))]


def test_nothing_is_saved_where_no_backward_can_come() -> None:
    problem = make(dtype=torch.float32)
    with Saved() as saved, torch.no_grad():
        lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, **problem.leaves())
    assert saved.tensors == []
    arguments = operator_arguments(problem, LRMoEConfig(), train=False)
    _, (own_out_TD, h_N2F, phi_root_N, *_) = torch.ops.lrmoe.routed_experts(*arguments)
    assert own_out_TD.numel() == h_N2F.numel() == phi_root_N.numel() == 0


def test_both_save_modes_give_the_same_gradients() -> None:
    # To rounding: a grouped product over fewer rows may order its sums in another way.
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        problem = make(dtype=dtype, bias=True)
        first, second = (run(problem, LRMoEConfig(drop=0.4, save=save)) for save in SAVES)
        for name, grad in first.grads.items():
            assert error(second.grads[name], grad.double()) < tolerance


def test_the_same_call_gives_the_same_bits() -> None:
    problem = make(dtype=torch.float32, tokens=200, bias=True)
    first = run(problem, LRMoEConfig(drop=0.5), step=7, layer=2, microbatch=1)
    torch.rand(1000)  # The global generator has no say.
    again = run(problem, LRMoEConfig(drop=0.5), step=7, layer=2, microbatch=1)
    assert first.call is not None
    assert again.call is not None
    assert torch.equal(first.call.kept_TK, again.call.kept_TK)
    assert all(torch.equal(first.grads[name], again.grads[name]) for name in first.grads)
    for other in ({"step": 8}, {"layer": 3}, {"microbatch": 2}):
        call = run(problem, LRMoEConfig(drop=0.5), **{"step": 7, "layer": 2, "microbatch": 1, **other}).call
        assert call is not None
        assert not torch.equal(call.kept_TK, first.call.kept_TK)
        assert {"step": call.step, "layer": call.layer, "microbatch": call.microbatch}.items() >= other.items()
    seeded = run(problem, LRMoEConfig(drop=0.5, seed=1), step=7, layer=2, microbatch=1).call
    assert seeded is not None
    assert not torch.equal(seeded.kept_TK, first.call.kept_TK)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "x of 3 dimensions": ({"x_TD": torch.randn(2, 17, 8)}, r"x_TD must be \(tokens, width\).*flatten"),
    "integer x": ({"x_TD": torch.ones(17, 8, dtype=torch.int64)}, "x_TD must be floating point, got torch.int64"),
    "float ids": ({"topk_ids_TK": torch.rand(17, 2)}, "topk_ids_TK must be int64 or int32"),
    "ids of other tokens": ({"topk_ids_TK": torch.zeros(16, 2, dtype=torch.int64)}, r"topk_ids_TK must be \(17, K\)"),
    "no choice": (
        {"topk_ids_TK": torch.zeros(17, 0, dtype=torch.int64), "topk_weights_TK": torch.zeros(17, 0)},
        "at least one expert per token",
    ),
    "id too large": ({"topk_ids_TK": torch.full((17, 2), 5)}, r"holds id 5, but there are 5 experts.*\[0, 5\)"),
    "id too small": ({"topk_ids_TK": torch.full((17, 2), -2)}, "holds id -2"),
    "weights of another shape": ({"topk_weights_TK": torch.rand(17, 3)}, r"topk_weights_TK must have shape \(17, 2\)"),
    "weights input first": ({"gate_up_proj": torch.randn(5, 8, 24)}, r"gate_up_proj must be .*\.transpose\(1, 2\)"),
    "odd gate and up": ({"gate_up_proj": torch.randn(5, 23, 8)}, "gate_up_proj must be"),
    "no expert": ({"gate_up_proj": torch.randn(0, 24, 8), "down_proj": torch.randn(0, 8, 12)}, "has no expert"),
    "down of another width": ({"down_proj": torch.randn(5, 8, 11)}, r"down_proj must have shape \(5, 8, 12\)"),
    "bias of another shape": ({"gate_up_bias": torch.randn(5, 12)}, r"gate_up_bias must have shape \(5, 24\)"),
    "down bias of another shape": ({"down_bias": torch.randn(5, 12)}, r"down_bias must have shape \(5, 8\)"),
    "mask of 0 and 1": ({"token_mask_T": torch.ones(17)}, "token_mask_T must be bool"),
    "mask of other tokens": ({"token_mask_T": torch.ones(16).bool()}, r"token_mask_T must have shape \(17,\)"),
    "weights elsewhere": ({"down_proj": torch.empty(5, 8, 12, device="meta")}, "down_proj is on meta.*one device"),
    "ids elsewhere": (
        {"topk_ids_TK": torch.empty(17, 2, device="meta", dtype=torch.int64)},
        "topk_ids_TK is on meta",
    ),
}


@pytest.mark.parametrize("what", list(BAD))
def test_bad_arguments_are_refused_by_name(what: str) -> None:
    problem = make(dtype=torch.float32)
    wrong, message = BAD[what]
    arguments = {**problem.leaves(), "topk_ids_TK": problem.ids_TK, **wrong}
    with pytest.raises(ValueError, match=message):
        lrmoe.routed_experts(**arguments)


def test_every_choice_of_the_configuration_runs() -> None:
    problem = make(dtype=torch.float32)
    choices = {
        "selector": ("topq", "pps", "random", "auto"),
        "metric": ("lrm", "grad_norm", "abs_grad", "alpha_grad", "forward", "random"),
        "quota": ("expert", "level", "pooled"),
        "error_budget": (None, 0.0, 0.05),
    }
    for values in itertools.product(*choices.values()):
        options: dict[str, Any] = dict(zip(choices, values, strict=True))
        call = run(problem, LRMoEConfig(drop=0.5, **options)).call
        assert call is not None
        kept = int(call.kept_TK.sum())
        assert kept == 17 if options["error_budget"] is None else kept >= 17, options


def test_the_signature_of_the_two_entries_is_one() -> None:
    mine, inner = (inspect.signature(f).parameters for f in (lrmoe.routed_experts, controlled_experts))
    assert set(mine) - {"config", "step", "layer", "microbatch"} == set(inner) - {"control", "moment"}
