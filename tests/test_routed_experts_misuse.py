"""What callers of routed_experts may do wrong: an error that says so, never a wrong number.

T tokens, K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import lrmoe
from lrmoe import LRMoEConfig

T, K, E, D, F = 12, 2, 4, 8, 8
NAMES = ("x_TD", "topk_ids_TK", "topk_weights_TK", "gate_up_proj", "down_proj")


def arguments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x_TD": (T, D), "topk_weights_TK": (T, K), "gate_up_proj": (E, 2 * F, D), "down_proj": (E, D, F)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**drawn, "topk_ids_TK": torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step": -1}, "step=-1 must be an integer >= 0"),
        ({"step": 2**63}, r"step=.* must be below 2\*\*63"),
        ({"step": "3"}, "step='3' must be an integer"),
        ({"step": 1.5}, "step=1.5 must be an integer"),
        ({"layer": -1}, "layer=-1 must be an integer"),
        ({"layer": 2**70}, r"layer=.* must be below 2\*\*63"),
        ({"microbatch": None}, "microbatch=None must be an integer"),
        ({"config": {"drop": 0.2}}, r"config=\{'drop': 0.2\} must be an LRMoEConfig"),
        ({"config": "pps"}, "config='pps' must be an LRMoEConfig"),
        ({"activation": None}, "activation=None must be a name"),
        ({"activation": torch.nn.SiLU()}, "activation=.* must be a name"),
        ({"activation": "clamped_swiglu(alpha=e,limit=7.0)"}, "alpha must be a finite number"),
        ({"activation": "clamped_swiglu(alpha=1.7,limit=-1)"}, "limit a finite number > 0"),
        ({"activation": "clamped_swiglu(alpha=1e999,limit=1)"}, "alpha must be a finite number"),
        ({"token_mask_T": [True] * T}, "token_mask_T must be a tensor, got list"),
        ({"down_bias": 0.0}, "down_bias must be a tensor, got float"),
        *(({name: [[0.0]]}, f"{name} must be a tensor, got list") for name in NAMES),
        *(({name: None}, f"{name} must be a tensor, got NoneType") for name in NAMES),
        (
            {"gate_up_proj": torch.zeros(E, 2 * F, D, dtype=torch.float8_e4m3fn)},
            "gate_up_proj is torch.float8_e4m3fn; .* must be float32, bfloat16, float16 or float64",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lrmoe.routed_experts(**{**arguments(), **wrong})


@pytest.mark.parametrize("name", ["x_TD", "topk_weights_TK", "gate_up_proj", "down_proj"])
def test_forward_mode_is_refused_and_not_zero(name: str) -> None:
    given = arguments()

    def experts(tensor: Tensor) -> Tensor:
        return lrmoe.routed_experts(**{**given, name: tensor})

    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(experts, (given[name],), (torch.ones_like(given[name]),))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        experts(forward_ad.make_dual(given[name], torch.ones_like(given[name])))


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_a_gradient_penalty_is_refused(drop: float) -> None:
    given = arguments()
    leaf = given["x_TD"].requires_grad_()
    out_TD = lrmoe.routed_experts(**given, config=LRMoEConfig(drop=drop))
    (dx_TD,) = torch.autograd.grad(out_TD.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        (out_TD.sum() + dx_TD.square().sum()).backward()


def change_weights(given: dict[str, Tensor]) -> None:
    given["down_proj"].mul_(2)


def change_tokens(given: dict[str, Tensor]) -> None:
    given["x_TD"].add_(1)


def change_mask(given: dict[str, Tensor]) -> None:
    given["token_mask_T"].fill_(False)


@pytest.mark.parametrize("change", [change_weights, change_tokens, change_mask])
def test_what_is_changed_before_the_backward_is_noticed(change: Callable[[dict[str, Tensor]], None]) -> None:
    given = {**arguments(), "token_mask_T": torch.ones(T, dtype=torch.bool)}
    given["gate_up_proj"].requires_grad_()
    out_TD = lrmoe.routed_experts(**given)
    with torch.no_grad():
        change(given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out_TD.sum().backward()


@pytest.mark.parametrize("selector", ["topq", "pps", "random", "auto"])
def test_the_default_dtype_changes_nothing(selector: Any) -> None:
    kept = []
    config = LRMoEConfig(drop=0.5, selector=selector, error_budget=0.031)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = arguments()
        # Loads beyond bfloat16's integers, and budgets that meet the quota halfway.
        given = {key: given[key].repeat(60, 1) if key in NAMES[:3] else given[key] for key in given}
        given["x_TD"].requires_grad_()
        torch.set_default_dtype(dtype)
        try:
            with lrmoe.recording() as calls:
                lrmoe.routed_experts(**given, config=config).sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        kept.append(calls[0].weight_TK)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


def test_it_compiles_as_one_graph() -> None:
    config = LRMoEConfig(drop=0.5, seed=4)

    def train(call: Callable[..., Tensor], **options: Any) -> list[Tensor]:
        given = arguments()
        leaves = [tensor.requires_grad_() for tensor in given.values() if tensor.is_floating_point()]
        out_TD = call(**given, **options)
        return [out_TD, *torch.autograd.grad(out_TD.square().sum(), leaves)]

    compiled = torch.compile(lrmoe.routed_experts, fullgraph=True, backend="aot_eager")
    for options in ({}, {"config": config, "step": 1, "layer": 2}, {"config": config, "step": 2, "layer": 2}):
        for found, wanted in zip(train(compiled, **options), train(lrmoe.routed_experts, **options), strict=True):
            torch.testing.assert_close(found, wanted)
