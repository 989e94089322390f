"""The operator, the layer and an attached model on one rank, through what users call.

T tokens, D model width, F expert width, E experts, K choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lrmoe
from freeze import records
from lrmoe import LRMoEConfig

T, D, F, E, K = 48, 16, 24, 6, 2
# What one of them decides may depend on each of the others, so each is met with each value of the two that steer most.
GRID = [
    *(
        {"drop": 0.3, "selector": s, "metric": m}
        for s in ("topq", "pps", "random", "auto")
        for m in ("lrm", "grad_norm", "abs_grad", "alpha_grad", "forward", "random")
    ),
    *(
        {"drop": 0.4, "selector": s, "quota": q, "router_grad": r}
        for s in ("topq", "pps")
        for q in ("expert", "level", "pooled")
        for r in ("exact", "sum_rule", "kept")
    ),
    *(
        {"drop": d, "selector": s, "save": v, "remainder": m}
        for d in (0.0, 0.2, 0.9)
        for s in ("topq", "pps")
        for v in ("preactivation", "input")
        for m in ("none", "mean")
    ),
    *({"drop": 0.5, "selector": s, "error_budget": b} for s in ("topq", "pps", "auto") for b in (0.01, 0.3)),
    *({"drop": 0.6, "warmup_steps": 3, "ramp_steps": 4, "seed": 7, "router_grad": r} for r in ("exact", "sum_rule")),
]


@dataclass(frozen=True)
class Kind:
    """How the operator is called, whatever the configuration."""

    name: str
    dtype: torch.dtype = torch.float32
    activation: str = "silu"
    bias: bool = False
    masked: bool = False
    autocast: bool = False


KINDS = (
    Kind("fp32"),
    Kind("fp64_masked", dtype=torch.float64, masked=True),
    Kind("bf16_bias", dtype=torch.bfloat16, bias=True),
    Kind("gelu_bias_masked", activation="gelu_tanh", bias=True, masked=True),
    Kind("autocast", autocast=True),
)


def save(folder: Path) -> None:
    torch.set_num_threads(1)
    for kind in KINDS:
        for number, settings in enumerate(GRID):
            records.write(folder, f"{kind.name}_{number:02d}", lambda k=kind, s=settings: _operator(k, s))  # type: ignore[misc]
    for number, settings in enumerate(GRID):
        records.write(folder, f"layers_{number:02d}", lambda s=settings: _layers(s))  # type: ignore[misc]


def _operator(kind: Kind, settings: dict[str, Any]) -> Any:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(kind.dtype)

    # Expert 0 is popular and expert E - 1 gets nothing.
    popularity_E = torch.linspace(2.0, 0.0, E, dtype=torch.float64)
    popularity_E[-1] = -100
    noise_TE = torch.randn(T, E, generator=generator, dtype=torch.float64)
    ids_TK = (popularity_E + noise_TE).topk(K).indices
    leaves = {
        "x_TD": draw(T, D),
        "topk_weights_TK": torch.rand(T, K, generator=generator, dtype=torch.float64).to(
            torch.promote_types(kind.dtype, torch.float32)
        ),
        "gate_up_proj": draw(E, 2 * F, D, scale=0.4),
        "down_proj": draw(E, D, F, scale=0.3),
    }
    if kind.bias:
        leaves |= {"gate_up_bias": draw(E, 2 * F, scale=0.3), "down_bias": draw(E, D, scale=0.3)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    grad_TD = draw(T, D) * draw(T, 1).exp()
    mask_T = torch.rand(T, generator=generator) < 0.8 if kind.masked else None
    with lrmoe.recording() as calls:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind.autocast), saved_bytes(leaves.values()) as saved:
            out_TD = lrmoe.routed_experts(
                topk_ids_TK=ids_TK, token_mask_T=mask_T, activation=kind.activation, config=LRMoEConfig(**settings),
                step=5, layer=2, microbatch=1, **leaves,
            )  # fmt: skip
        grads = torch.autograd.grad(out_TD, list(leaves.values()), grad_TD.to(out_TD.dtype))
    return {
        "out_TD": out_TD.detach(),
        "grads": dict(zip(leaves, grads, strict=True)),
        "saved_bytes": saved[0],
        "calls": [told(call) for call in calls],
    }


def _layers(settings: dict[str, Any]) -> Any:
    """Three steps of two layers in two microbatches, the second checkpointed, with the router's losses and a guard."""
    model = two_layers()
    config = LRMoEConfig(guard_variance=0.05, guard_tail=None, **settings)
    recal = lrmoe.attach(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        with lrmoe.recording() as calls:
            losses = []
            for microbatch in range(2):
                x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(10 * step + microbatch))
                out_TD = checkpoint(model, x_TD, use_reentrant=False) if microbatch else model(x_TD)
                loss = (out_TD - x_TD).square().mean()
                loss.backward()
                losses.append(loss.detach())
        grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        metrics = without_times(recal.metrics())
        optimizer.step()
        recal.step()
        steps.append({"losses": losses, "grads": grads, "metrics": metrics, "calls": [told(call) for call in calls]})
    parameters = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    return {"steps": steps, "parameters": parameters, "state": sorted(recal.state_dict())}


def two_layers() -> nn.Sequential:
    torch.manual_seed(4)
    first = lrmoe.MoE(dim=D, expert_dim=F, num_experts=E, top_k=K, bias=True)
    second = lrmoe.MoE(dim=D, expert_dim=F, num_experts=E, top_k=K, balance_loss_weight=0.01, z_loss_weight=1e-3)
    return nn.Sequential(first, second)


def told(call: Any) -> dict[str, Any]:
    """A recorded backward, field by field."""
    return {field.name: getattr(call, field.name) for field in fields(call)}


def without_times(metrics: Any) -> Any:
    if isinstance(metrics, dict):
        return {key: without_times(value) for key, value in metrics.items() if "seconds" not in key}
    return [without_times(value) for value in metrics] if isinstance(metrics, list | tuple) else metrics


@contextmanager
def saved_bytes(weights: Any) -> Iterator[list[int]]:
    """Bytes that autograd keeps, each storage once, without the weights."""
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    # The tensors are held, so that no address is used twice.
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    total = [0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total[0] = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
