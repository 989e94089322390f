"""MoE against a loop over tokens and experts in fp64, and what a user relies on around it.

T tokens, K choices, E experts, D model width, F expert width, S shared expert width.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lrmoe
from lrmoe import LRMoEConfig, MoE
from lrmoe.experts.meter import shares
from lrmoe.experts.reference import reference_experts

T, D, WIDTH, E, K = 24, 16, 24, 8, 2

EXACT = LRMoEConfig(drop=0.0)
HALF = LRMoEConfig(drop=0.5, router_grad="exact")


def make(**options: Any) -> MoE:
    return MoE(**{"dim": D, "expert_dim": WIDTH, "num_experts": E, "top_k": K, "config": EXACT, **options})


def loop(layer: MoE, x_TD: Tensor) -> Tensor:
    """The layer as its formulas, token by token; for ``drop=0`` also its gradients. Softmax gate, no groups."""
    rows = []
    experts = layer.experts
    for x_D in x_TD:
        gates_E = (layer.router.weight @ x_D).softmax(0)
        chosen = gates_E.topk(layer.top_k).indices
        alpha_K = gates_E[chosen]
        if layer.router.normalize:
            alpha_K = alpha_K / alpha_K.sum()
        out_D = torch.zeros_like(x_D)
        for alpha, e in zip(alpha_K * layer.router.scale, chosen.tolist(), strict=True):
            h_2F = experts.gate_up_proj[e] @ x_D
            if experts.gate_up_bias is not None:
                h_2F = h_2F + experts.gate_up_bias[e]
            gate_F, up_F = h_2F.chunk(2)
            y_D = experts.down_proj[e] @ (F.silu(gate_F) * up_F)
            if experts.down_bias is not None:
                y_D = y_D + experts.down_bias[e]
            out_D = out_D + alpha * y_D
        if layer.shared_expert is not None:
            gate_S, up_S = (layer.shared_expert.gate_up_proj.weight @ x_D).chunk(2)
            shared_D = layer.shared_expert.down_proj.weight @ (F.silu(gate_S) * up_S)
            if layer.shared_expert_gate is not None:
                shared_D = shared_D * (layer.shared_expert_gate.weight @ x_D).sigmoid()
            out_D = out_D + shared_D
        rows.append(out_D)
    return torch.stack(rows)


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name].to(tensor.dtype), tensor, msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": True, "scale": 2.5},
    {"normalize": False, "shared_expert_dim": 8},
    {"bias": True, "shared_expert_dim": 8, "shared_expert_gate": True},
    {"top_k": 1, "normalize": False},
    {"top_k": E},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_and_exact_gradients_equal_the_loop(options: dict[str, Any], dtype: torch.dtype) -> None:
    layer = make(**options).to(dtype)
    x_TD = torch.randn(T, D, dtype=dtype, requires_grad=True)
    grad_TD = torch.randn(T, D, dtype=dtype)
    reference = copy.deepcopy(layer).double()
    reference_x_TD = x_TD.detach().double().requires_grad_()

    out_TD = layer(x_TD)
    out_TD.backward(grad_TD)
    expected_TD = loop(reference, reference_x_TD)
    expected_TD.backward(grad_TD.double())

    tolerance = {"rtol": 1e-4, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    assert out_TD.dtype == dtype
    torch.testing.assert_close(out_TD.double(), expected_TD, **tolerance)
    torch.testing.assert_close(x_TD.grad.double(), reference_x_TD.grad, **tolerance)
    assert_same(gradients(layer), gradients(reference), **tolerance)


@pytest.mark.parametrize("selector", ["pps", "topq", "random", "auto"])
@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_dropping_changes_the_gradients_alone_and_as_recorded(selector: str, save: str) -> None:
    config = LRMoEConfig(drop=0.5, selector=selector, save=save, router_grad="exact")
    layer = make(config=config, bias=True, gate="sigmoid", num_groups=4, top_groups=2).double()
    x_TD = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    grad_TD = torch.randn(T, D, dtype=torch.float64)
    with lrmoe.recording() as calls:
        out_TD = layer(x_TD)
        out_TD.backward(grad_TD)
    actual, actual_dx = gradients(layer), x_TD.grad.clone()
    assert len(calls) == 1
    assert calls[0].kept_TK.sum() == T * K // 2

    layer.zero_grad()
    x_TD.grad = None
    routing = layer.router(x_TD)
    experts = layer.experts
    expected_TD = reference_experts(
        x_TD,
        routing.topk_ids_TK,
        routing.topk_weights_TK,
        experts.gate_up_proj,
        experts.down_proj,
        gate_up_bias=experts.gate_up_bias,
        down_bias=experts.down_bias,
        pair_weight_TK=calls[0].weight_TK.double(),
    )
    torch.testing.assert_close(out_TD, expected_TD, rtol=1e-10, atol=1e-12)
    expected_TD.backward(grad_TD)
    # Weights are recorded in fp32.
    torch.testing.assert_close(actual_dx, x_TD.grad, rtol=1e-5, atol=1e-7)
    assert_same(actual, gradients(layer), rtol=1e-5, atol=1e-7)


def test_leading_dimensions_are_kept() -> None:
    layer = make()
    x = torch.randn(2, 3, 4, D)
    assert layer(x).shape == x.shape
    assert torch.equal(layer(x).reshape(-1, D), layer(x.reshape(-1, D)))
    assert layer(x[0, 0, 0]).shape == (D,)
    assert torch.equal(layer(x.transpose(0, 1)), layer(x.transpose(0, 1).contiguous()))


def test_evaluation_mode_is_exact_and_counts_nothing() -> None:
    layer = make(config=LRMoEConfig(drop=0.9), selection_bias=True)
    exact = make(selection_bias=True)
    exact.load_state_dict(layer.state_dict())
    x_TD = torch.randn(T, D)
    layer.eval()(x_TD).square().sum().backward()
    exact(x_TD).square().sum().backward()
    assert_same(gradients(layer), gradients(exact), rtol=0, atol=0)
    assert layer.control.meter.backwards == 0
    with pytest.warns(UserWarning, match="trains in evaluation mode"):
        layer.step()
    assert torch.equal(layer.router.selection_bias, torch.zeros(E))


# Auxiliary losses


AUX = {"balance_loss_weight": 0.3, "z_loss_weight": 0.2}


@pytest.mark.parametrize("drop", [0.0, 0.9])
def test_aux_loss_reaches_router_and_input_whatever_is_dropped(drop: float) -> None:
    config = LRMoEConfig(drop=drop, router_grad="kept")
    layer, plain = make(config=config, **AUX), make(config=config)
    plain.load_state_dict(layer.state_dict())
    x_TD, plain_x_TD, aux_x_TD = (torch.randn(T, D).requires_grad_() for _ in range(3))
    with torch.no_grad():
        plain_x_TD.copy_(x_TD)
        aux_x_TD.copy_(x_TD)
    grad_TD = torch.randn(T, D)

    out_TD, plain_TD = layer(x_TD), plain(plain_x_TD)
    assert torch.equal(out_TD, plain_TD)
    out_TD.backward(grad_TD)
    plain_TD.backward(grad_TD)
    (aux_router,) = torch.autograd.grad(layer.router(aux_x_TD).aux_loss, layer.router.weight, retain_graph=True)
    layer.router(aux_x_TD).aux_loss.backward(inputs=[aux_x_TD])

    assert aux_router.abs().max() > 1e-3
    torch.testing.assert_close(layer.router.weight.grad, plain.router.weight.grad + aux_router)
    torch.testing.assert_close(x_TD.grad, plain_x_TD.grad + aux_x_TD.grad)
    assert torch.equal(layer.experts.gate_up_proj.grad, plain.experts.gate_up_proj.grad)
    assert torch.equal(layer.experts.down_proj.grad, plain.experts.down_proj.grad)


def test_aux_loss_scale_follows_accumulation_and_gradient_scaler() -> None:
    layer = make(**AUX)
    microbatches = torch.randn(4, T, D)
    for x_TD in microbatches:
        (layer(x_TD).square().mean() + layer.router(x_TD).aux_loss.detach()).div(4).backward()
    unscaled = layer.router.weight.grad.clone()

    layer.zero_grad()
    factor = 2.0**10
    layer.set_aux_loss_scale(factor / 4)
    for x_TD in microbatches:
        (layer(x_TD).square().mean() / 4 * factor).backward()
    actual = layer.router.weight.grad / factor

    layer.zero_grad()
    layer.set_aux_loss_scale(0.0)
    for x_TD in microbatches:
        ((layer(x_TD).square().mean() + layer.router(x_TD).aux_loss) / 4).backward()
    torch.testing.assert_close(actual, layer.router.weight.grad, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(unscaled, actual, rtol=0.1)  # without the scale it would be four times as strong

    layer.set_aux_loss_scale(torch.tensor(1.0))
    out_TD = layer(microbatches[0])
    layer.set_aux_loss_scale(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out_TD.sum().backward()
    with pytest.raises(ValueError, match=r"scale=-1\.0 must be a finite number >= 0"):
        layer.set_aux_loss_scale(-1.0)


def test_no_aux_gradient_without_a_backward_through_the_layer() -> None:
    layer = make(**AUX)
    with torch.no_grad():
        assert not layer(torch.randn(T, D)).requires_grad
    layer(torch.randn(T, D))
    assert layer.router.weight.grad is None


# Activation checkpointing and repeated forwards


class Model(nn.Module):
    """Two layers in residual form, each in a checkpoint if asked for."""

    def __init__(self, use_reentrant: bool | None, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(**options) for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("attached", [True, False])
def test_checkpointing_is_bitwise_equal_and_counts_once(use_reentrant: bool, attached: bool) -> None:
    config = LRMoEConfig(drop=0.4)
    results = []
    state = None
    for mode in (None, use_reentrant):
        model = Model(mode, config=config, selection_bias=True, gate="sigmoid", shared_expert_dim=8, **AUX)
        state = copy.deepcopy(model.state_dict()) if state is None else state
        model.load_state_dict(state)
        recalibrator = lrmoe.attach(model, config) if attached else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(5)
        for _ in range(2):
            for _ in range(2):
                x = torch.randn(2, T // 2, D, generator=generator, requires_grad=True)
                (model(x).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if recalibrator is not None:
                recalibrator.step()
            else:
                for layer in model.layers:
                    layer.step()
        results.append((model.state_dict(), x.grad, [layer.control.meter.load_E for layer in model.layers]))
    (plain, plain_dx, plain_loads), (checkpointed, dx, loads) = results
    for name in plain:
        assert torch.equal(plain[name], checkpointed[name]), name
    assert torch.equal(plain_dx, dx)
    assert all(torch.equal(a, b) for a, b in zip(plain_loads, loads, strict=True))
    assert plain_loads[0].sum() == 4 * T * K
    assert plain["layers.0.router.selection_bias"].abs().max() > 0


def test_several_forwards_before_one_backward() -> None:
    layer = make(config=HALF, **AUX)
    inputs = [torch.randn(n, D) for n in (T, 5)]
    separate: dict[str, Tensor] = {}
    for x_TD in inputs:
        layer(x_TD).square().sum().backward()
    separate = gradients(layer)
    layer.zero_grad()
    first, second = layer(inputs[0]), layer(inputs[1])
    with torch.no_grad():
        layer(torch.randn(40, D))
    (first.square().sum() + second.square().sum()).backward()
    assert_same(gradients(layer), separate, rtol=1e-5, atol=1e-6)


def test_nothing_of_a_forward_outlives_its_backward() -> None:
    layer = make(config=HALF, selection_bias=True, **AUX)
    x_TD = torch.randn(T, D, requires_grad=True)
    out_TD = layer(x_TD)
    watch = [weakref.ref(x_TD), weakref.ref(out_TD)]
    out_TD.sum().backward()
    del x_TD, out_TD
    gc.collect()
    assert [ref() for ref in watch] == [None, None]


# Selection bias and step


def test_step_updates_the_bias_once_from_all_microbatches() -> None:
    layer = make(selection_bias=True, bias_update_rate=0.01)
    loads_E = torch.zeros(E, dtype=torch.int64)
    for _ in range(3):
        x_TD = torch.randn(T, D) + 1
        loads_E += layer.router(x_TD).loads_E
        layer(x_TD).sum().backward()
    with torch.no_grad():
        layer(torch.randn(T, D))
    layer.step()
    assert torch.equal(layer.router.selection_bias, 0.01 * torch.sign(loads_E.float().mean() - loads_E))
    assert layer.control.clock.step == 1
    before_E = layer.router.selection_bias.clone()
    layer.step()  # no backward since
    assert torch.equal(layer.router.selection_bias, before_E)
    assert layer.control.clock.step == 2


def test_recalibrator_updates_the_bias_even_if_metrics_were_read() -> None:
    model = nn.Sequential(make(selection_bias=True, bias_update_rate=0.01))
    recalibrator = lrmoe.attach(model, LRMoEConfig(drop=0.5))
    x_TD = torch.randn(T, D) + 1
    loads_E = model[0].router(x_TD).loads_E
    model(x_TD).sum().backward()
    assert recalibrator.metrics(reset=True)["layers"]["0"]["load"] == loads_E.tolist()
    recalibrator.step()
    assert torch.equal(model[0].router.selection_bias, 0.01 * torch.sign(loads_E.float().mean() - loads_E))
    with pytest.raises(RuntimeError, match="attached to a recalibrator"):
        model[0].step()
    recalibrator.detach()
    model[0].step()
    assert model[0].control.clock.step == 1


def test_step_moves_the_schedule_and_the_draws() -> None:
    layer = make(config=LRMoEConfig(drop=0.5, warmup_steps=1))
    x_TD = torch.randn(T, D)
    with lrmoe.recording() as calls:
        for _ in range(3):
            layer(x_TD).square().sum().backward()
            layer.step()
    assert [int(call.kept_TK.sum()) for call in calls] == [T * K, T * K // 2, T * K // 2]
    assert [call.step for call in calls] == [0, 1, 2]
    assert not torch.equal(calls[1].kept_TK, calls[2].kept_TK)


def test_selection_bias_balances_training() -> None:
    layer = make(selection_bias=True, bias_update_rate=0.02, gate="sigmoid", config=LRMoEConfig(drop=0.2))
    x_TD = torch.randn(128, D) + 1
    history = []
    for _ in range(60):
        layer.control.meter.reset()
        layer(x_TD).square().mean().backward()
        history.append(shares(layer.control.meter.totals())["load_max_over_mean"])
        layer.step()
    assert history[0] > 1.8
    assert history[-1] < 1.3


# Masks


def test_masked_tokens_get_an_output_but_count_nowhere() -> None:
    layer = make(config=LRMoEConfig(drop=0.5, selector="topq"), selection_bias=True, **AUX)
    x = torch.randn(2, 8, D)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 3:] = False
    x[~mask] = 1.0  # identical padding goes to the same few experts
    real = x[mask]

    out = layer(x, mask)
    torch.testing.assert_close(out, layer(x))
    with lrmoe.recording() as calls:
        out[mask].square().sum().backward()
    padded = gradients(layer)
    assert calls[0].load_E.sum() == 11 * K
    assert not calls[0].kept_TK[~mask.flatten()].any()
    assert torch.equal(layer.control.meter.take_load_E(), layer.router(real).loads_E)

    layer.zero_grad()
    layer(real).square().sum().backward()
    assert_same(padded, gradients(layer), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_the_models_attention_mask_is_used_when_attached(drop: float) -> None:
    config = LRMoEConfig(drop=drop, selector="topq")
    x, mask = torch.randn(2, 8, D), torch.arange(16).view(2, 8) < 11
    model = Model(None, **AUX)
    ignored, told = copy.deepcopy(model), copy.deepcopy(model)
    for each in (model, ignored, told):
        lrmoe.attach(each, config)
    with lrmoe.recording() as calls:
        model(x, attention_mask=mask.long())[mask].sum().backward()
        ignored(x)[mask].sum().backward()
    assert [int(call.load_E.sum()) for call in calls] == [11 * K, 11 * K, 16 * K, 16 * K]
    with pytest.warns(UserWarning, match=r"layer layers\.0 was trained without a call of the Model"):
        y = x + told.layers[0](x, mask)
    (y + told.layers[1](y, mask))[mask].sum().backward()
    assert_same(gradients(model), gradients(told), rtol=0, atol=0)
    assert not torch.allclose(model.layers[0].router.weight.grad, ignored.layers[0].router.weight.grad)
    # The mask of a training forward does not reach an evaluation of the same shape or another.
    model.eval()
    for each in (x, torch.randn(2, 5, D)):
        with lrmoe.recording() as calls:
            model(each).sum().backward()
        assert int(calls[0].load_E.sum()) == each.shape[:2].numel() * K


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 4), "token_mask has dtype torch.float32; it must be torch.bool"),
        (torch.ones(8, dtype=torch.bool), r"token_mask has shape \(8,\); it must be \(2, 4\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(torch.randn(2, 4, D), mask)


@pytest.mark.parametrize("masked", [True, False])
def test_no_token_at_all(masked: bool) -> None:
    layer = make(config=HALF, bias=True, selection_bias=True, shared_expert_dim=8, **AUX)
    x_TD = torch.randn(4 if masked else 0, D, requires_grad=True)
    mask_T = torch.zeros(4, dtype=torch.bool) if masked else None
    out_TD = layer(x_TD, mask_T)
    assert out_TD.shape == x_TD.shape
    out_TD.sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        if "shared" not in name:
            assert torch.equal(p.grad, torch.zeros_like(p)), name


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("router_fp32", [True, False])
def test_low_precision_model(dtype: torch.dtype, router_fp32: bool) -> None:
    layer = make(config=LRMoEConfig(drop=0.3), selection_bias=True, shared_expert_dim=8, **AUX).to(dtype)
    if router_fp32:
        layer.router.float()
    x_TD = torch.randn(T, D).to(dtype).requires_grad_()
    assert layer.router(x_TD).topk_weights_TK.dtype == torch.float32
    out_TD = layer(x_TD)
    assert out_TD.dtype == dtype
    torch.testing.assert_close(out_TD.double(), loop(copy.deepcopy(layer).double(), x_TD.double()), rtol=0.1, atol=0.03)
    out_TD.float().square().mean().backward()
    for name, p in layer.named_parameters():
        assert p.grad.dtype == p.dtype, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().sum() > 0, name
    assert x_TD.grad.dtype == dtype


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [torch.float32, torch.bfloat16, torch.float16])
def test_every_mix_of_dtypes(autocast: torch.dtype | None, parameters: torch.dtype, tokens: torch.dtype) -> None:
    layer = make(config=LRMoEConfig(drop=0.3), bias=True).to(parameters)
    x_TD = torch.randn(T, D).to(tokens).requires_grad_()
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        out_TD = layer(x_TD)
    assert out_TD.dtype == tokens
    torch.testing.assert_close(out_TD.double(), loop(copy.deepcopy(layer).double(), x_TD.double()), rtol=0.1, atol=0.03)
    out_TD.float().square().mean().backward()
    assert x_TD.grad.dtype == tokens
    assert all(p.grad.dtype == parameters and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_shared_expert_takes_tokens_of_another_dtype(autocast: torch.dtype | None) -> None:
    layer = make(shared_expert_dim=8, shared_expert_gate=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
        out_TD = layer(torch.randn(T, D, dtype=torch.bfloat16))
    assert out_TD.dtype == torch.bfloat16


# Training parts of it


@pytest.mark.parametrize("x_trains", [True, False])
@pytest.mark.parametrize("router_trains", [True, False])
@pytest.mark.parametrize("experts_train", [True, False])
def test_frozen_parts(x_trains: bool, router_trains: bool, experts_train: bool) -> None:
    layer = make(config=HALF, bias=True, **AUX)
    x_TD = torch.randn(T, D, requires_grad=True)
    layer(x_TD).square().sum().backward()
    full, full_dx = gradients(layer), x_TD.grad.clone()
    layer.zero_grad()

    x_TD = x_TD.detach().requires_grad_(x_trains)
    layer.router.requires_grad_(router_trains)
    layer.experts.requires_grad_(experts_train)
    out_TD = layer(x_TD)
    assert out_TD.requires_grad == (x_trains or router_trains or experts_train)
    if not out_TD.requires_grad:
        return
    out_TD.square().sum().backward()
    trained = {n: g for n, g in full.items() if (router_trains if n.startswith("router") else experts_train)}
    assert_same(gradients(layer), trained, rtol=1e-5, atol=1e-6)
    assert (x_TD.grad is not None) == x_trains
    if x_trains:
        torch.testing.assert_close(x_TD.grad, full_dx)


def test_every_expert_with_a_kept_pair_moves_and_no_other() -> None:
    layer = make(num_experts=32, config=LRMoEConfig(drop=0.5))
    before = copy.deepcopy(layer.experts)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with lrmoe.recording() as calls:
        layer(torch.randn(T, D)).square().mean().backward()
    optimizer.step()
    kept_E = torch.bincount(layer_ids(layer, calls[0].kept_TK), minlength=32) > 0
    assert 0 < kept_E.sum() < 32
    for name in ("gate_up_proj", "down_proj"):
        moved_E = (getattr(layer.experts, name) != getattr(before, name)).flatten(1).any(1)
        assert torch.equal(moved_E, kept_E), name


def layer_ids(layer: MoE, kept_TK: Tensor) -> Tensor:
    """Experts of the kept pairs of the first forward of ``test_every_expert...``, rebuilt from the seed."""
    torch.manual_seed(0)
    again = make(num_experts=32)
    return again.router(torch.randn(T, D)).topk_ids_TK[kept_TK]


# Construction, saving, copies


def test_state_dict_round_trip_is_strict() -> None:
    layer = make(bias=True, selection_bias=True, shared_expert_dim=8, shared_expert_gate=True)
    with torch.no_grad():
        for e in range(E):
            for p in layer.experts.parameters():
                p[e] = e + 1
    state = layer.state_dict()
    assert set(state) == {
        "router.weight",
        "router.selection_bias",
        "experts.gate_up_proj",
        "experts.down_proj",
        "experts.gate_up_bias",
        "experts.down_bias",
        "shared_expert.gate_up_proj.weight",
        "shared_expert.down_proj.weight",
        "shared_expert_gate.weight",
    }
    assert {k: tuple(v.shape) for k, v in state.items() if k.startswith("experts")} == {
        "experts.gate_up_proj": (E, 2 * WIDTH, D),
        "experts.down_proj": (E, D, WIDTH),
        "experts.gate_up_bias": (E, 2 * WIDTH),
        "experts.down_bias": (E, D),
    }
    other = make(bias=True, selection_bias=True, shared_expert_dim=8, shared_expert_gate=True)
    other.load_state_dict(state)
    assert all(torch.equal(state[k], v) for k, v in other.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*experts\.extra"):
        other.load_state_dict({**state, "experts.extra": torch.zeros(1)})
    for missing in state:
        with pytest.raises(RuntimeError, match=f"Missing key.*{re.escape(missing)}"):
            other.load_state_dict({k: v for k, v in state.items() if k != missing})
    with pytest.raises(RuntimeError, match=r"Unexpected key"):
        make().load_state_dict(state)


def test_attaching_changes_no_key() -> None:
    model = nn.Sequential(make())
    keys = list(model.state_dict())
    lrmoe.attach(model)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent(way: Any) -> None:
    layer = make(config=LRMoEConfig(drop=0.4), selection_bias=True, **AUX)
    layer.step()
    twin = way(layer)
    assert twin.control.clock.step == 1
    x_TD = torch.randn(T, D)
    twin(x_TD).square().sum().backward()
    assert layer.control.meter.backwards == 0
    assert layer.router.weight.grad is None
    layer(x_TD).square().sum().backward()
    assert_same(gradients(twin), gradients(layer), rtol=0, atol=0)
    twin.step()
    assert layer.control.clock.step == 1
    twin.set_aux_loss_scale(0.5)
    layer(x_TD).sum().backward()


def test_same_seed_same_layer_and_reset() -> None:
    first = make(bias=True, shared_expert_dim=8, shared_expert_gate=True)
    torch.manual_seed(0)
    second = make(bias=True, shared_expert_dim=8, shared_expert_gate=True)
    assert all(torch.equal(v, second.state_dict()[k]) for k, v in first.state_dict().items())
    second.reset_parameters()
    assert not any(torch.equal(v, second.state_dict()[k]) for k, v in first.state_dict().items())


def test_meta_device_then_real() -> None:
    layer = make(device="meta", dtype=torch.bfloat16, bias=True, selection_bias=True, shared_expert_dim=8)
    layer.to_empty(device="cpu").reset_parameters()
    assert layer(torch.randn(T, D, dtype=torch.bfloat16)).isfinite().all()
    assert all(p.isfinite().all() and p.abs().max() > 0 for p in layer.parameters())


def test_outputs_have_a_sensible_size_at_initialisation() -> None:
    out_TD = MoE(dim=64, expert_dim=128, num_experts=E, top_k=K)(torch.randn(512, 64))
    assert 0.01 < out_TD.std() < 1.0


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu(alpha=1.702,limit=7.0)"])
def test_activation_is_that_of_all_experts(activation: str) -> None:
    # All experts equal to the shared one: the routed part is then the shared part, as routing weights add up to 1.
    layer = make(activation=activation, shared_expert_dim=WIDTH)
    with torch.no_grad():
        layer.experts.gate_up_proj.copy_(layer.shared_expert.gate_up_proj.weight.expand(E, -1, -1))
        layer.experts.down_proj.copy_(layer.shared_expert.down_proj.weight.expand(E, -1, -1))
    x_TD = torch.randn(T, D)
    torch.testing.assert_close(layer(x_TD), 2 * layer.shared_expert(x_TD), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_dim": 0}, "expert_dim=0 must be an integer >= 1"),
        ({"dim": -1}, "dim=-1 must be an integer >= 1"),
        ({"top_k": 9}, "top_k=9 must be at most num_experts=8"),
        ({"shared_expert_dim": 0}, "shared_expert_dim=0 must be an integer >= 1"),
        ({"shared_expert_gate": True}, "set shared_expert_dim"),
        ({"activation": "swish"}, "activation='swish' is not known"),
        ({"activation": "silu|interleaved"}, "gate rows come first"),
        ({"num_groups": 3, "top_groups": 1}, "num_groups=3 must divide"),
    ],
)
def test_bad_options_name_field_and_mend(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x has shape \(4, 7\); its last dimension must be dim=16"):
        make()(torch.randn(4, 7))
    with pytest.raises(ValueError, match=r"x has dtype torch\.int64; it must be a floating dtype"):
        make()(torch.zeros(4, D, dtype=torch.int64))


# torch.compile


@torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
@pytest.mark.parametrize("options", [{}, {"selection_bias": True, "gate": "sigmoid", "shared_expert_dim": 8, **AUX}])
def test_compiles_as_one_graph(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    layer = make(config=LRMoEConfig(drop=0.4), **options)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    # One graph for the first length, one for all lengths; a third is an error.
    for step, length in enumerate((6, 9, 6, 11, 9, 13)):
        x = torch.randn(2, length, D)
        for module, call in ((layer, compiled), (eager, eager)):
            module.zero_grad()
            call(x).square().mean().backward()
            module.step()
        assert layer.control.clock.step == step + 1
        assert_same(gradients(layer), gradients(eager), rtol=1e-5, atol=1e-6)


# Documentation


def test_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "docs" / "layer.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert snippets
    scope: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/layer.md", "exec"), scope)
    assert "load max/mean" in capsys.readouterr().out
