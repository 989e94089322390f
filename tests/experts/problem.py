"""Small routed-experts problems, run through the operator and through the fp64 reference.

T tokens, K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.experts.meter import BackwardCall
from lrmoe.experts.reference import reference_experts

PARAMETERS = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Inputs of the operator and the gradient that arrives at its output."""

    x_TD: Tensor
    ids_TK: Tensor
    alpha_TK: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    grad_TD: Tensor
    activation: str = "silu"
    mask_T: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.gate_up_proj.shape[0]

    def leaves(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Fresh differentiable copies of what has a gradient; the routing weights stay in fp32 or better."""
        found = {
            "x_TD": self.x_TD,
            "topk_weights_TK": self.alpha_TK,
            **{name: value for name in PARAMETERS if (value := getattr(self, name)) is not None},
        }
        # preserve_format: a transposed view stays one.
        return {
            name: tensor.detach().to(dtype or tensor.dtype).clone(memory_format=torch.preserve_format).requires_grad_()
            for name, tensor in found.items()
        }


@dataclass(frozen=True, kw_only=True)
class Result:
    out_TD: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)
    call: BackwardCall | None = None


def routes(tokens: int, experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """(T, K) distinct experts per token, skewed towards the first ones."""
    popularity_E = torch.linspace(2.0, 0.0, experts)
    noise_TE = torch.rand(tokens, experts, generator=generator).log().neg().log().neg()
    return (popularity_E + noise_TE).argsort(dim=-1, descending=True)[:, :top_k].contiguous()


def forced(loads_E: list[int], top_k: int) -> Tensor:
    """(T, K) ids with these loads. Pairs are dealt out expert by expert, so that a token's choices differ while no load
    exceeds T."""
    ids = [expert for expert, load in enumerate(loads_E) for _ in range(load)]
    assert len(ids) % top_k == 0
    return torch.tensor(ids, dtype=torch.int64).reshape(top_k, -1).t().contiguous()


def make(
    *,
    tokens: int = 17,
    dim: int = 8,
    width: int = 12,
    experts: int = 5,
    top_k: int = 2,
    dtype: torch.dtype = torch.float64,
    bias: bool = False,
    activation: str = "silu",
    ids_TK: Tensor | None = None,
    mask_T: Tensor | None = None,
    transposed: bool = False,
    seed: int = 0,
) -> Problem:
    """Random values, drawn in fp64 and rounded once, so that every dtype sees the same problem."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    if ids_TK is None:
        ids_TK = routes(tokens, experts, top_k, generator)
    tokens, top_k = ids_TK.shape
    gate_up_proj = draw(experts, 2 * width, dim, scale=1.5 * dim**-0.5)
    down_proj = draw(experts, dim, width, scale=1.5 * width**-0.5)
    if transposed:
        gate_up_proj, down_proj = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gate_up_proj, down_proj))
    alpha_TK = torch.randn(tokens, top_k, generator=generator, dtype=torch.float64).softmax(-1)
    return Problem(
        x_TD=draw(tokens, dim),
        ids_TK=ids_TK,
        alpha_TK=alpha_TK.to(torch.promote_types(dtype, torch.float32)),
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        gate_up_bias=draw(experts, 2 * width, scale=0.5) if bias else None,
        down_bias=draw(experts, dim, scale=0.5) if bias else None,
        # Norms of gradients differ widely between tokens, as they do in training.
        grad_TD=draw(tokens, dim) * torch.randn(tokens, 1, generator=generator, dtype=torch.float64).exp().to(dtype),
        activation=activation,
        mask_T=mask_T,
    )


def run(problem: Problem, config: LRMoEConfig | None = None, **position: int) -> Result:
    """The operator, forward and backward."""
    leaves = problem.leaves()
    with lrmoe.recording() as calls:
        out_TD = lrmoe.routed_experts(
            topk_ids_TK=problem.ids_TK,
            config=config,
            activation=problem.activation,
            token_mask_T=problem.mask_T,
            **leaves,
            **position,
        )
        grads = torch.autograd.grad(out_TD, list(leaves.values()), problem.grad_TD)
    assert len(calls) == 1
    return Result(out_TD=out_TD.detach(), grads=dict(zip(leaves, grads, strict=True)), call=calls[0])


def live_pairs(problem: Problem) -> Tensor:
    """(T, K) bool: the pair has an expert and its token is real."""
    live_TK = problem.ids_TK >= 0
    return live_TK if problem.mask_T is None else live_TK & problem.mask_T.unsqueeze(-1)


def expected(problem: Problem, weight_TK: Tensor | None = None, router_grad: Any = "exact") -> Result:
    """The fp64 reference, with ``weight_TK`` on each pair's upstream row; masked tokens get none."""
    live_TK = live_pairs(problem)
    weight_TK = live_TK.double() if weight_TK is None else weight_TK.double() * live_TK
    leaves = problem.leaves(torch.float64)
    out_TD = reference_experts(
        topk_ids_TK=problem.ids_TK,
        activation=problem.activation,
        pair_weight_TK=weight_TK,
        live_TK=live_TK,
        router_grad=router_grad,
        **leaves,
    )
    grads = torch.autograd.grad(out_TD, list(leaves.values()), problem.grad_TD.double())
    return Result(out_TD=out_TD.detach(), grads=dict(zip(leaves, grads, strict=True)))


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest deviation in units of the largest wanted value."""
    assert found.shape == wanted.shape
    if found.numel() == 0:
        return 0.0
    return ((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()


def assert_equal(found: Result, wanted: Result, tolerance: float) -> None:
    """Output and every gradient agree within ``tolerance`` of the tensor's largest value."""
    assert found.grads.keys() == wanted.grads.keys()
    pairs = {"out_TD": (found.out_TD, wanted.out_TD)}
    pairs |= {f"d({name})": (found.grads[name], wanted.grads[name]) for name in found.grads}
    errors = {name: error(*pair) for name, pair in pairs.items()}
    assert all(e <= tolerance for e in errors.values()), errors


def with_ids(problem: Problem, ids_TK: Tensor) -> Problem:
    return replace(problem, ids_TK=ids_TK)
