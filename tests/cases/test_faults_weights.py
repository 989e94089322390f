"""L3, L4: expert weights that are not what they look like. Those that are stored in another way than they report are
refused where they come in, by name; those that DeepSpeed ZeRO-3 or FSDP1 has taken apart train, for they are whole
whenever a forward or a backward reads them.

DeepSpeed is not among what these tests run with. :class:`Partitioned` does to parameters what its sources do: the
attributes, the empty data, and when it gathers and frees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
import torch.distributed as dist
from distributed.world import run_world
from experts.problem import make
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils.parametrize import register_parametrization

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.hosts.restored_weights import sample_weights
from lrmoe.parallel import ExpertParallel, parallelize

CONFIG = LRMoEConfig(drop=0.4)
NAMED = "Int8, a tensor subclass with operators of its own.* Load the model unquantized"


class Int8(Tensor):
    """A weight stored as int8 with a scale, which reports the dtype that it was made from."""

    def __new__(cls, weight: Tensor) -> Int8:
        made: Int8 = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)
        return made

    def __init__(self, weight: Tensor) -> None:
        self.scale = float(weight.abs().max()) / 127
        self.stored = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.alias.default):
            return cls(args[0].dequantized())
        raise NotImplementedError(f"{func} has no int8 form")

    def dequantized(self) -> Tensor:
        return self.stored * self.scale

    def __repr__(self, **_: Any) -> str:
        return f"Int8{tuple(self.shape)}"


def quantize(module: nn.Module, name: str) -> None:
    weight = getattr(module, name).detach()
    setattr(module, name, nn.Parameter(Int8(weight), requires_grad=False))


def own_layers(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), lrmoe.MoE(dim=8, expert_dim=6, num_experts=4, top_k=2, bias=True, config=CONFIG, **options)
    )


# --- L3: quantised weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"])
def test_l3_quantized_experts_of_transformers_are_refused_at_attach(name: str) -> None:
    model = tiny.build("gpt_oss")
    quantize(model.model.layers[1].mlp.experts, name)
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.mlp\.experts: {name} of GptOssExperts is a .*{NAMED}"):
        lrmoe.attach(model, CONFIG)
    assert not hasattr(model.model.layers[0].mlp.experts, "lrmoe_control")


@pytest.mark.parametrize(
    "name", ["experts.gate_up_proj", "experts.down_proj", "experts.gate_up_bias", "experts.down_bias", "router.weight"]
)
def test_l3_quantized_weights_of_our_layers_are_refused_at_attach(name: str) -> None:
    model = own_layers()
    part, key = name.split(".")
    quantize(model[1].get_submodule(part), key)
    with pytest.raises(ValueError, match=f"^1: {name} is a .*{NAMED}"):
        lrmoe.attach(model, CONFIG)
    assert not model[1].is_attached


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "gate_up_bias", "down_bias"])
def test_l3_quantized_weights_are_refused_by_the_operator(name: str) -> None:
    problem = make(bias=True)
    weights = {key: getattr(problem, key) for key in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")}
    with pytest.raises(ValueError, match=f"^{name} is a .*{NAMED}"):
        lrmoe.routed_experts(problem.x_TD, problem.ids_TK, problem.alpha_TK, **{**weights, name: Int8(weights[name])})


@pytest.mark.parametrize(("name", "dtype"), [("down_proj", torch.float8_e4m3fn), ("down_bias", torch.float8_e5m2)])
def test_l3_float8_is_refused_whichever_weight_it_is(name: str, dtype: torch.dtype) -> None:
    """Silently cast, before: only of gate_up_proj was the dtype looked at."""
    problem = make(bias=True)
    weights = {key: getattr(problem, key) for key in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")}
    weights[name] = weights[name].to(dtype)
    with pytest.raises(ValueError, match=f"^{name} is {dtype}; it must be float32, bfloat16, float16 or float64"):
        lrmoe.routed_experts(problem.x_TD, problem.ids_TK, problem.alpha_TK, **weights)
    model = own_layers()
    setattr(model[1].experts, name, nn.Parameter(getattr(model[1].experts, name).detach().to(dtype)))
    with pytest.raises(ValueError, match=f"^1: experts.{name} is {dtype}"):
        lrmoe.attach(model, CONFIG)


def test_l3_sparse_weights_are_refused() -> None:
    problem = make()
    with pytest.raises(ValueError, match=r"^down_proj is stored as torch.sparse_coo, not densely"):
        lrmoe.routed_experts(
            problem.x_TD, problem.ids_TK, problem.alpha_TK, problem.gate_up_proj, problem.down_proj.to_sparse()
        )


def over_ranks(group: dist.ProcessGroup) -> list[str]:
    """What is said of quantised weights where experts are spread."""
    said = []

    def refused(call: Callable[[], object]) -> None:
        try:
            call()
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("accepted")

    for policy, slots in (("fixed", None), ("laer", 4)):  # Experts whole at home, and a part of each.
        ep = ExpertParallel(group, num_experts=4, policy=policy, slots=slots)
        model = own_layers()
        quantize(model[1].experts, "down_proj")
        refused(lambda model=model, ep=ep: parallelize(model, ep))
        refused(lambda model=model, ep=ep: ep.local(model[1].experts.down_proj))
        model = parallelize(own_layers(), ep)
        quantize(model[1].experts, "down_proj")
        refused(lambda model=model: model(torch.randn(6, 8)))

    model = tiny.build("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    local = Int8(experts.down_proj.detach())
    sharded = DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Replicate()], run_check=False)
    experts.down_proj = nn.Parameter(sharded, requires_grad=False)
    refused(lambda: lrmoe.attach(model, CONFIG))
    return said


def test_l3_quantized_weights_are_refused_where_experts_are_spread() -> None:
    said = run_world(1, over_ranks)[0]
    assert len(said) == 7
    for text, start in zip(
        said,
        2 * ["1.experts.down_proj", "weight", "down_proj"] + ["model.layers.0.mlp.experts: down_proj of"],
        strict=True,
    ):
        assert text.startswith(start), text
        assert "Int8, a tensor subclass with operators of its own" in text


class Named(nn.Parameter):
    """A parameter with a name, stored as any other."""


class Counting(Tensor):
    """Overrides what Python sees of a tensor; the numbers are a plain tensor's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Dequantize(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.dequantized() if isinstance(weight, Int8) else weight


def named(experts: nn.Module) -> None:
    experts.down_proj = Named(experts.down_proj.detach())


def counting(experts: nn.Module) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj.detach().as_subclass(Counting))


def dequantized(experts: nn.Module) -> None:
    """Stored as int8, and computed with as a plain tensor of the same numbers."""
    quantized = nn.Parameter(Int8(experts.down_proj.detach()), requires_grad=False)
    register_parametrization(experts, "down_proj", Dequantize())
    experts.parametrizations.down_proj.original = quantized


@pytest.mark.parametrize("change", [named, counting, dequantized])
@pytest.mark.parametrize("architecture", [None, "qwen3_moe"])
def test_l3_subclasses_that_store_plain_numbers_train_as_before(
    change: Callable[[nn.Module], None], architecture: str | None
) -> None:
    found = []
    for changed in (False, True):
        if architecture is None:
            model, data = own_layers(), torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
            experts = model[1].experts
        else:
            model, data = tiny.build(architecture), tiny.batch()
            experts = model.model.layers[0].mlp.experts
        if change is dequantized:
            experts.down_proj = nn.Parameter(Int8(experts.down_proj.detach()).dequantized(), requires_grad=False)
        if changed:
            change(experts)
        lrmoe.attach(model, CONFIG)
        loss = model(data).square().sum() if architecture is None else model(**data).loss
        loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 2
    for plain, subclass in zip(*found, strict=True):
        assert torch.equal(plain, subclass)


# --- L4: weights that are taken apart ------------------------------------------------------------------------------


class Partitioned:
    """One rank of ZeRO-3: every parameter is empty but from its module's forward to the end of it, and from the moment
    that the gradient of the module's output arrives until its own gradient is there.

    Args:
        apart: False for the same hooks, in which autograd adds up in the same order, around weights that stay whole.
    """

    def __init__(self, model: nn.Module, *, apart: bool = True) -> None:
        self.apart = apart
        self.gradients: dict[str, Tensor] = {}
        self.parameters = dict(model.named_parameters())
        for number, (name, parameter) in enumerate(self.parameters.items()):
            if apart:
                parameter.ds_id, parameter.ds_shape = number, parameter.shape
                parameter.ds_tensor = parameter.data.reshape(-1).clone()
            parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: self._take(name, parameter))
            self._free(parameter)
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own:
                module.register_forward_pre_hook(lambda *_, own=own: self._gather(own))
                module.register_forward_hook(lambda *_, own=own: [self._free(p) for p in own] and None)
                module.register_full_backward_pre_hook(lambda *_, own=own: self._gather(own))

    def descend(self) -> None:
        """A step of plain gradient descent on what this rank holds."""
        for name, gradient in self.gradients.items():
            parameter = self.parameters[name]
            held = parameter.ds_tensor if self.apart else parameter.data
            held -= 0.1 * gradient.view_as(held)
        self.gradients.clear()

    def _gather(self, parameters: list[Tensor]) -> None:
        for parameter in parameters if self.apart else []:
            parameter.data = parameter.ds_tensor.clone().view(parameter.ds_shape)
            parameter.ds_status = "AVAILABLE"

    def _free(self, parameter: Tensor) -> None:
        if not self.apart:
            return
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        parameter.ds_status = "NOT_AVAILABLE"

    def _take(self, name: str, parameter: Tensor) -> None:
        self.gradients[name] = self.gradients.get(name, 0) + parameter.grad
        parameter.grad = None
        self._free(parameter)


HOW = ["plain", "autocast", "checkpointing"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])  # The second stores its weights transposed.
def test_l4_attached_after_zero_3_a_model_trains_as_without_it(architecture: str, how: str) -> None:
    models = [tiny.build(architecture), tiny.build(architecture)]
    plain, zero = Partitioned(models[0], apart=False), Partitioned(models[1])
    assert models[1].model.layers[0].mlp.experts.down_proj.shape == (0,)
    if how == "checkpointing":
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    recals = [lrmoe.attach(model, CONFIG) for model in models]
    for step in range(2):
        losses = []
        for model in models:
            with torch.autocast("cpu", torch.bfloat16) if how == "autocast" else contextlib.nullcontext():
                loss = model(**tiny.batch(seed=step)).loss
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert zero.gradients.keys() == plain.gradients.keys() == set(zero.parameters)
        for name, gradient in plain.gradients.items():
            assert torch.equal(zero.gradients[name], gradient), name
        plain.descend()
        zero.descend()
        for recal in recals:
            recal.step()
    kept = [recal.metrics()["kept_share"] for recal in recals]
    assert kept[0] == kept[1]
    assert 0.5 < kept[0] < 0.7


def test_l4_what_is_wrong_with_a_whole_shape_is_still_said() -> None:
    model = tiny.build("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach()[:, :, :-1].clone())
    Partitioned(model)
    with pytest.raises(ValueError, match=r"gate_up_proj \(6, 48, 32\) and down_proj \(6, 32, 23\) .* do not fit"):
        lrmoe.attach(model, CONFIG)
    model = tiny.build("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().flatten(1))
    Partitioned(model)
    with pytest.raises(ValueError, match=r"has shape \(6, 768\); it must be 3-d"):
        lrmoe.attach(model, CONFIG)


def test_l4_a_partitioned_layer_of_ours_trains_and_is_printed() -> None:
    plain, taken_apart = own_layers(), own_layers()
    whole, zero = Partitioned(plain, apart=False), Partitioned(taken_apart)
    assert repr(taken_apart) == repr(plain)
    x_TD = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    for model in (plain, taken_apart):
        lrmoe.attach(model, CONFIG)
        model(x_TD).square().sum().backward()
    assert zero.gradients.keys() == whole.gradients.keys() == set(whole.parameters)
    for name, gradient in whole.gradients.items():
        assert torch.equal(zero.gradients[name], gradient), name


def test_l4_weights_that_are_not_gathered_are_named_with_who_partitioned_them() -> None:
    model = own_layers()
    zero = Partitioned(model)
    problem = make(bias=True)
    experts = model[1].experts
    text = r"^gate_up_proj is partitioned by DeepSpeed ZeRO-3 and not gathered: here its shape is \(0,\)"
    with pytest.raises(ValueError, match=text):
        lrmoe.routed_experts(problem.x_TD, problem.ids_TK, problem.alpha_TK, experts.gate_up_proj, experts.down_proj)
    zero._gather([experts.gate_up_proj])
    with pytest.raises(ValueError, match=r"^down_proj is partitioned by DeepSpeed ZeRO-3 and not gathered"):
        lrmoe.routed_experts(problem.x_TD, problem.ids_TK, problem.alpha_TK, experts.gate_up_proj, experts.down_proj)


def with_zero_3_over_ranks(group: dist.ProcessGroup) -> list[str]:
    ep = ExpertParallel(group, num_experts=4, policy="fixed")
    said = []
    model = own_layers()
    Partitioned(model)
    try:
        parallelize(model, ep)
    except ValueError as error:
        said.append(str(error))
    model = parallelize(own_layers(), ep)
    Partitioned(model)
    try:
        model(torch.randn(6, 8))
    except ValueError as error:
        said.append(str(error))
    return said


def test_l4_zero_3_and_spread_experts_are_refused_in_both_orders() -> None:
    before, after = run_world(1, with_zero_3_over_ranks)[0]
    assert before.startswith("1.experts.gate_up_proj is partitioned by DeepSpeed ZeRO-3 already (its shape is (0,))")
    assert after.startswith("gate_up_proj is partitioned by DeepSpeed ZeRO-3 as if all ranks had the same experts")


def fsdp1(group: dist.ProcessGroup, architecture: str, late: bool) -> tuple[Any, ...]:
    """Two steps of a model that FSDP1 shards over the ranks, attached before or after: losses, and what is sampled."""
    model = tiny.build(architecture)
    recal = None if late else lrmoe.attach(model, CONFIG)
    layer = type(model.model.layers[0])
    wrapped = FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({layer})
    )
    if recal is None:
        recal = lrmoe.attach(wrapped, CONFIG)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        loss = wrapped(**tiny.batch(seed=step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recal.step()
        losses.append(float(loss.detach()))
    return losses, recal.metrics()["kept_share"], sample_weights(recal)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_l4_fsdp_1_may_come_before_attach_or_after_it(architecture: str) -> None:
    early, late = (run_world(2, fsdp1, architecture, order) for order in (False, True))
    assert late[0][0] == pytest.approx(early[0][0])
    assert late[0][1] == early[0][1]
    assert 0.5 < late[0][1] < 0.7
    # Pieces of rows: what one rank has sampled, no other would find in its own on resuming.
    assert [told[2] for told in (*early, *late)] == [{}] * 4
