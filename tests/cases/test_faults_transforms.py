"""L6: derivatives asked for in other ways than ``tensor.backward()``. What works gives the same gradients; what does
not says of which layer, and what to do instead, before anything has moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from experts.problem import make
from tiny_transformers import batch, build
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import lrmoe
from lrmoe import LRMoEConfig

Loss = Callable[[dict[str, Tensor], Tensor], Tensor]


def own(training: bool = True) -> tuple[nn.Module, lrmoe.control.Recalibrator, Loss, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), lrmoe.MoE(dim=8, expert_dim=6, num_experts=4, top_k=2)).train(training)
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.4))
    return model, recal, lambda p, x_TD: functional_call(model, p, (x_TD,)).square().sum(), torch.randn(10, 8)


def transformers() -> tuple[nn.Module, lrmoe.control.Recalibrator, Loss, Tensor]:
    model = build("qwen3_moe")
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.4))

    def loss(parameters: dict[str, Tensor], ids_BS: Tensor) -> Tensor:
        found: Tensor = functional_call(model, parameters, (), {"input_ids": ids_BS, "labels": ids_BS}).loss
        return found

    return model, recal, loss, batch()["input_ids"]


# The first layer that a transform meets.
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "own": (own, "layer 1 "),
    "own in evaluation": (lambda: own(False), "layer 1 "),
    "transformers": (transformers, "layer model.layers.0.mlp.experts "),
}
TRANSFORMS: dict[str, Callable[[Loss, dict[str, Tensor], Tensor], Any]] = {
    "grad": lambda loss, p, x: grad(loss)(p, x),
    "vjp": lambda loss, p, x: vjp(lambda own: loss(own, x), p)[1](torch.tensor(1.0)),
    "jvp": lambda loss, p, x: jvp(lambda own: loss(own, x), (p,), (p,)),
    "jacrev": lambda loss, p, x: jacrev(loss)(p, x),
    "grad of grad": lambda loss, p, x: grad(lambda own: grad(lambda y: loss(own, y))(x.float()).sum())(p),
    "vmap of grad": lambda loss, p, x: vmap(grad(loss), in_dims=(None, 0))(p, torch.stack([x, x])),
}


# Token ids have no gradient.
CASES = [(name, how) for name in MODELS for how in TRANSFORMS if (name, how) != ("transformers", "grad of grad")]


@pytest.mark.parametrize(("name", "transform"), CASES)
def test_l6_a_transform_is_refused_and_the_layer_named(name: str, transform: str) -> None:
    make_model, layer = MODELS[name]
    model, recal, loss, x = make_model()
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    before = recal.state_dict(), recal.clock.microbatch
    with pytest.raises(RuntimeError, match=r"cannot run under torch\.func") as told:
        TRANSFORMS[transform](loss, parameters, x)
    assert str(told.value).startswith(layer)
    assert "torch.autograd.grad" in str(told.value)
    assert (recal.state_dict(), recal.clock.microbatch) == before
    # And the model trains on.
    model(x) if name != "transformers" else model(input_ids=x)
    torch.autograd.grad(loss(dict(model.named_parameters()), x), list(model.parameters()))


@pytest.mark.parametrize("name", ["own", "transformers"])
def test_l6_functional_call_gives_the_gradients_of_the_model(name: str) -> None:
    found, wanted = [], []
    for target, functional in ((found, True), (wanted, False)):
        model, _, loss, x = MODELS[name][0]()
        parameters = list(model.parameters())
        if functional:
            copies = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
            target += torch.autograd.grad(loss(copies, x), list(copies.values()))
        else:
            out = model(x).square().sum() if name == "own" else model(input_ids=x, labels=x).loss
            target += torch.autograd.grad(out, parameters)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_l6_the_bare_operator() -> None:
    problem = make(dtype=torch.float32)
    leaves = {name: leaf.detach() for name, leaf in problem.leaves().items()}

    def loss(given: dict[str, Tensor]) -> Tensor:
        out_TD = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=LRMoEConfig(drop=0.4), **given)
        return out_TD.square().sum()

    for transform in (lambda: grad(loss)(leaves), lambda: vjp(loss, leaves)):
        with pytest.raises(RuntimeError, match=r"^routed_experts cannot run under torch\.func"):
            transform()
    # Without gradients there is nothing to refuse.
    x_BTD = torch.randn(3, *problem.x_TD.shape)
    found_B = vmap(lambda x_TD: loss({**leaves, "x_TD": x_TD}))(x_BTD)
    assert torch.allclose(found_B, torch.stack([loss({**leaves, "x_TD": x_TD}) for x_TD in x_BTD]))


def test_l6_many_gradients_of_one_forward() -> None:
    """The way out that the message names."""
    model, _, _, x_TD = own()
    out_TD = model(x_TD)
    weights = list(model.parameters())
    rows_BTD = torch.randn(3, *out_TD.shape)
    found = torch.autograd.grad(out_TD, weights, rows_BTD, is_grads_batched=True, retain_graph=True)
    for row, row_TD in enumerate(rows_BTD):
        wanted = torch.autograd.grad(out_TD, weights, row_TD, retain_graph=True)
        assert all(torch.allclose(a[row], b, rtol=1e-5, atol=1e-6) for a, b in zip(found, wanted, strict=True))
