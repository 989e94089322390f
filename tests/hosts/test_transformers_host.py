"""The Transformers host on every architecture it names: exactness, checkpointing, padding, wrappers, refusals."""

from __future__ import annotations

import copy
import io
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_transformers import ARCHITECTURES, batch, build, gradients, largest_difference, padded
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

import lrmoe
from lrmoe.experts.layer_control import Call
from lrmoe.experts.tokens import Tokens
from lrmoe.hosts import transformers as host

DROP = lrmoe.LRMoEConfig(drop=0.3)
EXACT = lrmoe.LRMoEConfig(drop=0.0)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "is_transposed")}


# --- exactness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stock", ["eager", "grouped_mm"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradients_equal_the_stock_implementation(architecture: str, stock: str) -> None:
    data = padded(batch(), [12, 7, 4], side="right") if stock == "eager" else batch()
    model = build(architecture, implementation=stock)
    loss, grads = gradients(model, data)
    lrmoe.attach(model, EXACT)
    attached_loss, attached_grads = gradients(model, data)
    torch.testing.assert_close(attached_loss, loss, rtol=1e-6, atol=1e-6)
    assert largest_difference(attached_grads, grads) < 1e-5


def test_the_forward_is_full_whatever_is_dropped() -> None:
    model = build("qwen3_moe")
    loss, grads = gradients(model, batch())
    lrmoe.attach(model, lrmoe.LRMoEConfig(drop=0.7))
    attached_loss, attached_grads = gradients(model, batch())
    torch.testing.assert_close(attached_loss, loss, rtol=1e-6, atol=1e-6)
    assert largest_difference(attached_grads, grads) > 0.05


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_the_activation_is_read_off_the_module(act: str) -> None:
    model = build("mixtral")
    for experts in experts_of(model).values():
        experts.act_fn = ACT2FN[act]
    _, grads = gradients(model, batch())
    lrmoe.attach(model, EXACT)
    _, attached_grads = gradients(model, batch())
    assert largest_difference(attached_grads, grads) < 1e-5


def test_autocast_runs_the_experts_in_its_dtype_and_leaves_parameters_fp32() -> None:
    model = build("qwen3_moe")
    loss, _ = gradients(model, batch())
    recal = lrmoe.attach(model, DROP)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast_loss, grads = gradients(model, batch())
    torch.testing.assert_close(autocast_loss.float(), loss, rtol=0.02, atol=0.0)
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    assert recal.metrics()["kept_share"] == pytest.approx(0.7, abs=0.02)


def test_a_bfloat16_model_trains() -> None:
    model = build("gpt_oss").bfloat16()
    lrmoe.attach(model, DROP)
    _, grads = gradients(model, batch())
    assert {grad.dtype for grad in grads.values()} == {torch.bfloat16}


# --- without attach ----------------------------------------------------------------------------------------------


def test_the_name_alone_gives_the_exact_backward_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrmoe.hosts.bound_experts._warned", False)
    _, expected = gradients(build("qwen3_moe"), batch())
    model = build("qwen3_moe", implementation="lrmoe")
    with pytest.warns(UserWarning, match=r"lrmoe\.attach\(model, config\) was not called"):
        _, grads = gradients(model, batch())
    assert largest_difference(grads, expected) < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(model, batch())


def test_models_of_different_widths_share_the_exact_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrmoe.hosts.bound_experts._warned", True)
    for architecture in ("qwen3_moe", "glm4_moe", "gpt_oss"):
        gradients(build(architecture, implementation="lrmoe"), batch())


def test_inference_needs_no_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrmoe.hosts.bound_experts._warned", False)
    model = build("olmoe", implementation="lrmoe").eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        logits = model(batch()["input_ids"]).logits
        expected = build("olmoe").eval()(batch()["input_ids"]).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_eval_mode_has_the_exact_backward_and_counts_nothing() -> None:
    model = build("mixtral")
    _, expected = gradients(model.eval(), batch())
    recal = lrmoe.attach(model, DROP)
    gradients(model.train(), padded(batch(), [12, 7, 4], side="left"))
    recal.metrics()
    _, grads = gradients(model.eval(), batch(length=9, rows=2))
    _, grads = gradients(model, batch())
    assert largest_difference(grads, expected) < 1e-5
    assert recal.metrics()["layers"] == {}
    assert recal.clock.microbatch == 0


def test_set_experts_implementation_at_runtime() -> None:
    model = build("qwen3_moe", implementation="grouped_mm")
    model.set_experts_implementation("lrmoe")
    recal = lrmoe.attach(model, DROP)
    with lrmoe.recording() as calls:
        gradients(model, batch())
    assert len(calls) == len(recal.layers) == 2


# --- checkpointing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradient_checkpointing_changes_no_bit(architecture: str, use_reentrant: bool) -> None:
    data = padded(batch(), [12, 7, 4], side="right")
    plain, model = build(architecture), build(architecture)
    if use_reentrant:
        # Transformers collects the router logits inside the checkpoint, where this kind records no gradient: its
        # auxiliary loss then trains no router, under any experts implementation.
        plain.config.output_router_logits = model.config.output_router_logits = False
    plain_recal = lrmoe.attach(plain, DROP)
    expected = gradients(plain, data)
    recal = lrmoe.attach(model, DROP)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    found = gradients(model, data)
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, grad in found[1].items():
        assert torch.equal(grad, expected[1][name]), name
    counted, counted_plain = recal.metrics()["layers"], plain_recal.metrics()["layers"]
    for name, layer in counted.items():
        assert layer["load"] == counted_plain[name]["load"]
        assert layer["backwards"] == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_with_two_forwards_before_one_backward(use_reentrant: bool) -> None:
    first = padded(batch(seed=1), [12, 7, 4], side="right")
    second = padded(batch(seed=2, rows=2), [3, 12], side="left")

    def both(model: nn.Module) -> dict[str, torch.Tensor]:
        model.zero_grad()
        (model(**first).loss + model(**second).loss).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    plain, model = build("mixtral"), build("mixtral")
    lrmoe.attach(plain, DROP)
    lrmoe.attach(model, DROP)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    with lrmoe.recording() as plain_calls:
        expected = both(plain)
    with lrmoe.recording() as calls:
        found = both(model)
    assert [(c.layer, c.microbatch) for c in calls] == [(c.layer, c.microbatch) for c in plain_calls]
    assert {c.microbatch for c in calls} == {0, 1}
    for name, grad in found.items():
        assert torch.equal(grad, expected[name]), name


def test_detach_unwraps_the_checkpointing_function() -> None:
    model = build("mixtral")
    model.activation_checkpointing_enable()
    before = model.model.layers[0]._gradient_checkpointing_func
    recal = lrmoe.attach(model, DROP)
    gradients(model, batch())
    assert model.model.layers[0]._gradient_checkpointing_func is not before
    recal.detach()
    assert model.model.layers[0]._gradient_checkpointing_func is before


@pytest.mark.parametrize("left_padded", [False, True])
def test_a_users_own_checkpoint_around_a_layer(left_padded: bool) -> None:
    class Wrapped(nn.Module):
        def __init__(self, layer: nn.Module, use: bool) -> None:
            super().__init__()
            self.layer, self.use = layer, use

        def forward(self, *args: object, **kwargs: object) -> object:
            if self.use:
                return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)
            return self.layer(*args, **kwargs)

    found, shares = [], []
    for use in (False, True):
        model = build("olmoe")
        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = Wrapped(layer, use)
        recal = lrmoe.attach(model, DROP)
        data = padded(batch(), [12, 7, 4], side="left") if left_padded else batch()
        found.append(gradients(model, data)[1])
        shares.append(recal.metrics()["sequence_kept_share_min"])
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name
    assert shares[0] == shares[1] < 1.0


# --- padding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_is_neither_counted_nor_kept(architecture: str, side: str) -> None:
    data = padded(batch(), [12, 7, 4], side=side)
    mask_T = data["attention_mask"].bool().reshape(-1)
    model = build(architecture)
    recal = lrmoe.attach(model, DROP)
    # What the experts see is what their block saw, batch-major: the order the mask is flattened in.
    seen: dict[str, torch.Tensor] = {}
    for name in recal.layers:
        block, experts = model.get_submodule(name.rpartition(".")[0]), model.get_submodule(name)
        block.register_forward_pre_hook(lambda m, a, name=name: seen.__setitem__(name, a[0].detach()))
        experts.register_forward_pre_hook(
            lambda m, a, name=name: seen.__setitem__(f"{name} flat", a[0].detach()),
        )
    with lrmoe.recording() as calls:
        gradients(model, data)
    assert len(calls) == len(recal.layers)
    for name in recal.layers:
        assert seen[name].shape[:2] == data["input_ids"].shape
        assert torch.equal(seen[name].flatten(0, 1), seen[f"{name} flat"])
    for call in calls:
        real = int(mask_T.sum()) * call.kept_TK.shape[1]
        assert int(call.load_E.sum()) == real
        assert int(call.quota_E.sum()) == round(0.7 * real)
        assert not call.kept_TK[~mask_T].any()
        assert call.kept_TK[mask_T].any()


def test_a_positional_attention_mask_is_seen() -> None:
    data = padded(batch(), [12, 7, 4], side="right")
    model = build("qwen3_moe")
    lrmoe.attach(model, DROP)
    with lrmoe.recording() as calls:
        model(data["input_ids"], data["attention_mask"], labels=data["labels"]).loss.backward()
    assert int(calls[0].load_E.sum()) == 23 * 2


def test_a_mask_of_other_tokens_is_left_alone() -> None:
    """Experts that are handed a part of the tokens: the mask of all of them says nothing about these rows."""
    model = build("qwen3_moe")
    recal = lrmoe.attach(model, DROP)
    experts = model.get_submodule(next(iter(recal.layers)))
    inner = model.model.forward

    def forward(**kwargs: Any) -> Any:
        x, ids = torch.randn(5, 32), torch.tensor([[0, 1]] * 5)
        experts(x, ids, torch.rand(5, 2)).sum().backward()
        return inner(**kwargs)

    model.model.forward = forward
    with lrmoe.recording() as calls:
        model(**padded(batch(), [12, 7, 4], side="right"))
    assert int(calls[0].load_E.sum()) == 10


# --- draws -------------------------------------------------------------------------------------------------------


def test_microbatches_and_steps_draw_anew_and_repeat() -> None:
    def run() -> list[torch.Tensor]:
        model = build("qwen3_moe")
        recal = lrmoe.attach(model, DROP)
        with lrmoe.recording() as calls:
            for _ in range(2):
                for _ in range(2):
                    gradients(model, batch())
                recal.step()
        assert [(c.step, c.microbatch) for c in calls if c.layer == 0] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        return [c.kept_TK for c in calls if c.layer == 0]

    kept = run()
    for i in range(4):
        for j in range(i):
            assert not torch.equal(kept[i], kept[j])
    assert all(torch.equal(a, b) for a, b in zip(kept, run(), strict=True))


def test_training_without_calling_the_attached_model_is_noticed() -> None:
    model = build("mixtral")
    recal = lrmoe.attach(model, DROP)
    # What some adapter libraries do: hooks of the outer model are then skipped. The inner one is called, and brings the
    # tokens, so that the microbatch is counted.
    model.forward(**batch()).loss.backward()
    assert recal.clock.microbatch == 0
    experts = model.get_submodule(next(iter(recal.layers)))
    with pytest.warns(UserWarning, match=r"layer .*experts was trained without a call of the MixtralForCausalLM that"):
        experts(torch.randn(5, 32), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)).sum().backward()


# --- what stays as it was ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["eager", "grouped_mm", "lrmoe"])
def test_detach_restores_the_model(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrmoe.hosts.bound_experts._warned", True)
    model = build("gpt_oss", implementation=before)
    expected = gradients(model, batch())
    recal = lrmoe.attach(model, DROP)
    gradients(model, batch())
    recal.detach()
    assert model.config._experts_implementation == before
    assert all(experts.config is model.config for experts in experts_of(model).values())
    assert not any(hasattr(m, "lrmoe_control") or m._forward_pre_hooks for m in model.modules())
    found = gradients(model, batch())
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(grad, expected[1][name]) for name, grad in found[1].items())
    lrmoe.attach(model, DROP)


def test_parameters_and_checkpoints_keep_their_names(tmp_path: object) -> None:
    model = build("glm4_moe")
    keys = list(model.state_dict())
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lrmoe.attach(model, DROP)
    assert list(model.state_dict()) == keys
    gradients(model, batch())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config._experts_implementation != "lrmoe"
    assert list(again.state_dict()) == keys
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_model_has_a_recalibrator_of_its_own(how: str) -> None:
    model = build("mixtral")
    if how == "deepcopy":  # Transformers' own hook for this is not picklable.
        model.activation_checkpointing_enable()
    recal = lrmoe.attach(model, DROP)
    gradients(model, batch())
    recal.step()
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    twins = twin._lrmoe_recalibrator
    assert twins is not recal
    assert twins.clock.step == 1
    recal.metrics()
    expected = gradients(model, batch())[1]
    counted = recal.metrics()["layers"]
    found = gradients(twin, batch())[1]
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())
    assert recal.metrics()["layers"] == {}
    assert {n: r["load"] for n, r in twins.metrics()["layers"].items()} == {n: r["load"] for n, r in counted.items()}
    twins.detach()
    assert {experts.config._experts_implementation for experts in experts_of(twin).values()} == {"eager"}
    assert {experts.config._experts_implementation for experts in experts_of(model).values()} == {"lrmoe"}
    assert all(hasattr(module, "lrmoe_control") for module in experts_of(model).values())


# --- wrappers and parts ------------------------------------------------------------------------------------------


def test_a_wrapped_model_is_found_through_its_wrapper() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_model = base

        def forward(self, **kwargs: object) -> object:
            return self.base_model.forward(**kwargs)

    model = Adapter(build("qwen3_moe"))
    recal = lrmoe.attach(model, DROP)
    assert list(recal.layers) == [f"base_model.model.layers.{i}.mlp.experts" for i in range(2)]
    with lrmoe.recording() as calls, warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(model, padded(batch(), [12, 7, 4], side="right"))
        recal.step()
    assert int(calls[0].load_E.sum()) == 23 * 2


def test_attach_to_the_inner_model_only() -> None:
    model = build("qwen3_moe")
    recal = lrmoe.attach(model.model, DROP)
    with lrmoe.recording() as calls:
        gradients(model, batch())
    assert len(calls) == 2
    with pytest.raises(ValueError, match="its part model already has a recalibrator"):
        lrmoe.attach(model, DROP)
    recal.detach()
    lrmoe.attach(model, DROP)


def test_attaching_a_part_leaves_the_rest_as_it_was() -> None:
    model, stock = build("qwen3_moe"), build("qwen3_moe")
    lrmoe.attach(model.model.layers[1], DROP)
    with lrmoe.recording() as calls, warnings.catch_warnings():
        warnings.simplefilter("error")
        _, grads = gradients(model, batch())
    assert len(calls) == 1
    _, expected = gradients(stock, batch())
    last = "model.layers.1.mlp.experts.gate_up_proj"
    assert not torch.allclose(grads[last], expected[last], rtol=1e-2)
    # They have one config, which names what the part was attached for.
    assert model.get_experts_implementation() == {"": "lrmoe"}


def test_models_that_share_a_config_are_attached_apart() -> None:
    first = build("qwen3_moe")
    second = type(first)(first.config).train()
    assert second.config is first.config
    recal = lrmoe.attach(first, DROP)
    lrmoe.attach(second, DROP)
    recal.detach()
    with lrmoe.recording() as calls:
        gradients(first, batch())
        assert len(calls) == 0
        gradients(second, batch())
    assert len(calls) == 2


def test_a_part_of_an_attached_model_cannot_be_attached_again() -> None:
    model = build("qwen3_moe")
    lrmoe.attach(model, DROP)
    with pytest.raises(ValueError, match=r"mlp\.experts belongs to a model that already has a recalibrator"):
        lrmoe.attach(model.model.layers[0], DROP)


def test_a_model_whose_experts_cannot_share_an_engine_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(layers: list[object]) -> None:
        raise ValueError("different numbers of experts")

    model = build("qwen3_moe")
    layers = list(experts_of(model).values())
    configs = [layer.config for layer in layers]
    spread = SimpleNamespace(of_module=lambda _: SimpleNamespace(chosen=False), share_engine=refuse)
    monkeypatch.setattr(host, "transformers_ep", spread)
    with pytest.raises(ValueError, match="different numbers of experts"):
        lrmoe.attach(model, DROP)
    assert all(layer.config is config for layer, config in zip(layers, configs, strict=True))
    assert not any(hasattr(layer, "lrmoe_control") for layer in layers)


def test_frozen_experts_pass_the_gradient_through() -> None:
    model = build("mixtral")
    for experts in experts_of(model).values():
        experts.requires_grad_(False)
    _, expected = gradients(model, batch())
    lrmoe.attach(model, EXACT)
    _, grads = gradients(model, batch())
    assert not any("experts" in name for name in grads)
    assert largest_difference(grads, expected) < 1e-5


class LowRank(nn.Module):
    """W + B A per expert, as adapter libraries parametrise stacked expert weights."""

    def __init__(self, weight: torch.Tensor, rank: int = 4) -> None:
        super().__init__()
        experts, rows, columns = weight.shape
        self.a = nn.Parameter(0.1 * torch.randn(experts, rank, columns))
        self.b = nn.Parameter(0.1 * torch.randn(experts, rows, rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_low_rank_adapters_on_frozen_experts(architecture: str) -> None:
    model = build(architecture)
    for experts in experts_of(model).values():
        experts.requires_grad_(False)
        for name in ("gate_up_proj", "down_proj"):
            parametrize.register_parametrization(experts, name, LowRank(getattr(experts, name)))
    _, expected = gradients(model, batch())
    recal = lrmoe.attach(model, EXACT)
    _, grads = gradients(model, batch())
    assert largest_difference(grads, expected) < 1e-5
    recal.detach()
    lrmoe.attach(model, DROP)
    with lrmoe.recording() as calls:
        _, grads = gradients(model, batch())
    by_layer = {call.layer: call for call in calls}
    for layer, name in enumerate(experts_of(model)):
        kept_E = by_layer[layer].quota_E > 0
        for part in ("gate_up_proj", "down_proj"):
            moved_E = grads[f"{name}.parametrizations.{part}.0.a"].flatten(1).abs().amax(dim=1) > 0
            assert torch.equal(moved_E, kept_E)
            assert f"{name}.parametrizations.{part}.original" not in grads


def test_choices_of_other_ranks_are_left_out() -> None:
    """Under expert parallelism id num_experts, weight 0, marks a choice that another rank computes."""
    model = build("mixtral")
    experts = experts_of(model)["model.layers.0.mlp.experts"]
    experts._is_expert_parallel = True
    ids = torch.tensor([[0, 6], [6, 6], [5, 2], [6, 1], [3, 0]])
    found = []
    for implementation in ("grouped_mm", "lrmoe"):
        if implementation == "lrmoe":
            recal = lrmoe.attach(model, EXACT)
            # The rows come from other ranks: a mask of this rank's tokens must not be applied.
            nobody = Tokens((1, 5), torch.zeros(1, 5, dtype=torch.bool), device=torch.device("cpu"))
            recal.clock.calls.append(Call(model, nobody, counts=True))
        else:
            model.set_experts_implementation(implementation)
        torch.manual_seed(1)
        x = torch.randn(5, 32, requires_grad=True)
        weights = torch.rand(5, 2).masked_fill(ids == 6, 0.0).requires_grad_()
        out = experts(x, ids, weights)
        grads = torch.autograd.grad(
            out.square().sum(), [x, weights, experts.gate_up_proj, experts.down_proj], materialize_grads=True
        )
        found.append([out.detach(), *grads])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- refusals ----------------------------------------------------------------------------------------------------


def experts_class(*, gate: object = None, **layout: bool) -> type[nn.Module]:
    """A decorated expert class as a model library would write it."""

    class StrangeExperts(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.num_experts = 4
            self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
            self.down_proj = nn.Parameter(torch.randn(4, 8, 6))
            self.act_fn = nn.SiLU()

        def forward(self, *args: object) -> object:
            raise AssertionError("the stock forward is not used here")

    if gate is not None:
        StrangeExperts._apply_gate = gate
    return use_experts_implementation(**layout)(StrangeExperts)


CONFIG = SimpleNamespace(_experts_implementation="eager", _experts_implementation_internal="eager")


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ({"has_gate": False}, {}, "StrangeExperts has no gate"),
        ({"has_post_expert_norm": True}, {}, "normalises each expert's output"),
        ({}, {"down_proj": nn.Parameter(torch.randn(4, 8, 5))}, "do not fit"),
        ({"is_transposed": True}, {}, "do not fit"),
        ({}, {"down_proj": nn.Parameter(torch.randn(4, 48))}, "must be 3-d"),
        ({}, {"gate_up_proj": None}, "has no gate_up_proj"),
        (
            {},
            {"gate_up_proj": nn.Parameter(torch.zeros(4, 12, 8, dtype=torch.uint8), requires_grad=False)},
            "quantized weights cannot be trained",
        ),
        ({}, {"act_fn": nn.Mish()}, r"the gate of StrangeExperts \(its _apply_gate, act_fn=Mish\) is none of"),
        (
            {"gate": lambda self, h: F.silu(h.chunk(2, -1)[0]).clamp(max=1.0) * h.chunk(2, -1)[1]},
            {},
            "the gate of StrangeExperts",
        ),
    ],
)
def test_experts_that_cannot_be_recalibrated_are_named(
    layout: dict[str, object], change: dict[str, object], message: str
) -> None:
    model = nn.ModuleDict({"mlp": experts_class(**layout)(CONFIG)})
    for name, value in change.items():
        setattr(model["mlp"], name, value)
    with pytest.raises(ValueError, match=message):
        lrmoe.attach(model, DROP)
    assert not hasattr(model["mlp"], "lrmoe_control")


def test_a_gate_with_clamps_is_told_apart_from_one_without() -> None:
    def gate(self: nn.Module, h: torch.Tensor) -> torch.Tensor:
        a, b = h.chunk(2, dim=-1)
        a, b = a.clamp(max=self.swiglu_limit), b.clamp(-self.swiglu_limit, self.swiglu_limit)
        return (b + 1) * a * torch.sigmoid(a * self.swiglu_alpha)

    experts = experts_class(gate=gate)(CONFIG)
    experts.swiglu_alpha, experts.swiglu_limit = 1.25, 100.0
    lrmoe.attach(experts, DROP)
    assert experts._lrmoe_activation == "clamped_swiglu(alpha=1.25,limit=100.0)"


def test_tensor_parallel_experts_are_refused() -> None:
    class Sharded(nn.Parameter):
        placements = (SimpleNamespace(dim=1),)

    experts = experts_class()(CONFIG)
    experts.gate_up_proj = Sharded(experts.gate_up_proj.data)
    with pytest.raises(ValueError, match=r"sharded inside each expert .* use expert parallelism"):
        lrmoe.attach(experts, DROP)
    Sharded.placements = (SimpleNamespace(dim=0), SimpleNamespace())
    lrmoe.attach(experts, DROP)


def test_weights_rewritten_for_a_kernel_are_refused() -> None:
    config = SimpleNamespace(_experts_implementation="deepgemm_megamoe")
    with pytest.raises(ValueError, match=r"deepgemm_megamoe.*cannot be switched"):
        lrmoe.attach(experts_class()(config), DROP)


def test_a_dense_model_is_refused_with_what_it_holds() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ValueError, match=r"no MoE layer .* found in LlamaForCausalLM.*LlamaMLP"):
        lrmoe.attach(LlamaForCausalLM(config), DROP)


def test_a_list_of_experts_is_refused_by_name() -> None:
    block = nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))})
    with pytest.raises(ValueError, match=r"Lists of separate experts, which cannot be recalibrated: mlp\.experts"):
        lrmoe.attach(nn.ModuleDict({"mlp": block}), DROP)


# --- torch.compile -----------------------------------------------------------------------------------------------


def test_compiled_without_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of all is inside the compiled region: the gate is read off while tracing."""
    model = build("gpt_oss")
    experts = experts_of(model)["model.layers.0.mlp.experts"]
    x, ids, weights = torch.randn(6, 32), torch.randint(0, 6, (6, 2)), torch.rand(6, 2)
    expected = torch.autograd.grad(experts(x, ids, weights).square().sum(), list(experts.parameters()))
    model.set_experts_implementation("lrmoe")
    out = torch.compile(experts, fullgraph=True, backend="aot_eager")(x, ids, weights)
    found = torch.autograd.grad(out.square().sum(), list(experts.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["attach first", "compile first", "in place", "checkpointed"])
def test_a_compiled_model_equals_the_eager_one(order: str) -> None:
    steps = [batch(seed=0), padded(batch(seed=1), [12, 7, 4], side="left"), batch(length=16, seed=2)]

    def run(model: nn.Module, recal: lrmoe.Recalibrator) -> list[dict[str, torch.Tensor]]:
        found = []
        for data in steps:
            data = {"attention_mask": torch.ones_like(data["input_ids"]), **data}
            found.append({n.removeprefix("_orig_mod."): g for n, g in gradients(model, data)[1].items()})
            recal.step()
        return found

    plain, model = build("qwen3_moe"), build("qwen3_moe")
    for each in (plain, model):
        each.config.output_router_logits = False
    expected = run(plain, lrmoe.attach(plain, DROP))
    if order == "checkpointed":
        model.activation_checkpointing_enable()
    if order == "compile first":
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        recal = lrmoe.attach(compiled, DROP)
    else:
        recal = lrmoe.attach(model, DROP)
        compiled = model
        if order == "in place":
            model.compile(fullgraph=True, backend="aot_eager")
        else:
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(run(compiled, recal), expected, strict=True):
        assert largest_difference(found, wanted) < 1e-5
