"""Speed of one MoE layer's experts, forward and backward, beside Transformers' `grouped_mm` experts.

All contenders run in one process, on one thread, one after the other in each round, on the same input; medians over
rounds, ratios of medians of the same rounds. Routing is synthetic: each token's top-k of random scores, which loads the
experts evenly. The dense bound is the same number of multiplications as a few large products.

    python benchmarks/layer.py --out docs/results/layer_speed_fp32.json
    python benchmarks/layer.py --dtype bfloat16 --host-rounds 1 --out docs/results/layer_speed_bf16.json
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import lrmoe
from lrmoe import strict_json

BOOKKEEPING = ("lrmoe::select", "lrmoe::index")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """T tokens, D model width, F expert width, E experts, K choices per token."""

    T: int
    D: int
    F: int
    E: int
    K: int

    @property
    def forward_flops(self) -> int:
        return 6 * self.T * self.K * self.D * self.F


@dataclass(frozen=True)
class Inputs:
    x_TD: Tensor
    ids_TK: Tensor
    alpha_TK: Tensor
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    grad_TD: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x_TD, self.alpha_TK, self.gate_up_proj, self.down_proj


def make_inputs(shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    alpha_TK, ids_TK = normal(shape.T, shape.E).softmax(-1).topk(shape.K, dim=-1)
    gate_up = normal(shape.E, 2 * shape.F, shape.D) * shape.D**-0.5
    down = normal(shape.E, shape.D, shape.F) * shape.F**-0.5
    return Inputs(
        x_TD=normal(shape.T, shape.D).to(dtype).requires_grad_(),
        ids_TK=ids_TK,
        alpha_TK=(alpha_TK / alpha_TK.sum(-1, keepdim=True)).requires_grad_(),
        gate_up_proj=nn.Parameter(gate_up.to(dtype)),
        down_proj=nn.Parameter(down.to(dtype)),
        grad_TD=normal(shape.T, shape.D).to(dtype),
    )


def transformers_experts(shape: Shape, inputs: Inputs) -> Callable[[], Tensor]:
    """The experts of Transformers' Qwen3-MoE with its default implementation, on the same weights."""
    config = Qwen3MoeConfig(
        hidden_size=shape.D, moe_intermediate_size=shape.F, num_experts=shape.E, num_experts_per_tok=shape.K
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = inputs.gate_up_proj, inputs.down_proj
    return lambda: experts(inputs.x_TD, inputs.ids_TK, inputs.alpha_TK)


def lrmoe_experts(inputs: Inputs, **config: object) -> Callable[[], Tensor]:
    settings = lrmoe.LRMoEConfig(**config)  # type: ignore[arg-type]
    return lambda: lrmoe.routed_experts(
        inputs.x_TD, inputs.ids_TK, inputs.alpha_TK, inputs.gate_up_proj, inputs.down_proj, config=settings
    )


def time_once(forward: Callable[[], Tensor], inputs: Inputs) -> tuple[float, float]:
    """(forward, backward) seconds; gradients are new each time, as after zero_grad()."""
    for leaf in inputs.leaves:
        leaf.grad = None
    start = time.perf_counter()
    out_TD = forward()
    middle = time.perf_counter()
    out_TD.backward(inputs.grad_TD)
    return middle - start, time.perf_counter() - middle


def dense_bound(shape: Shape, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of the layer's (forward, backward) multiplications as single products over all pairs."""
    rows = shape.T * shape.K
    x, h, phi = (torch.randn(rows, width).to(dtype) for width in (shape.D, 2 * shape.F, shape.F))
    up, down = torch.randn(2 * shape.F, shape.D).to(dtype), torch.randn(shape.D, shape.F).to(dtype)
    start = time.perf_counter()
    _ = x @ up.T
    _ = phi @ down.T
    middle = time.perf_counter()
    _ = x @ down
    _ = x.T @ phi
    _ = h @ up
    _ = h.T @ x
    return middle - start, time.perf_counter() - middle


def bookkeeping_share(forward: Callable[[], Tensor], inputs: Inputs) -> float:
    """Profiled share of the backward spent on scoring, selecting and indexing (gathers of rows are compute)."""
    out_TD = forward()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        out_TD.backward(inputs.grad_TD)
    totals = {event.key: event.cpu_time_total for event in trace.key_averages()}
    return sum(totals.get(name, 0.0) for name in BOOKKEEPING) / totals["lrmoe::routed_experts_backward"]


def measure(shape: Shape, dtype: torch.dtype, rounds: int, host_rounds: int, seed: int) -> dict[str, object]:
    inputs = make_inputs(shape, dtype, seed)
    contenders: dict[str, Callable[[], Tensor]] = {"transformers grouped_mm": transformers_experts(shape, inputs)}
    for drop in (0.0, 0.2, 0.3, 0.5):
        contenders[f"lrmoe drop={drop:.0%}"] = lrmoe_experts(inputs, drop=drop)
    contenders["lrmoe drop=20% save=input"] = lrmoe_experts(inputs, drop=0.2, save="input")
    contenders["lrmoe drop=20% router_grad=exact"] = lrmoe_experts(inputs, drop=0.2, router_grad="exact")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in (*contenders, "dense bound")}
    for round_number in range(rounds + 1):
        for name, forward in contenders.items():
            if name == "transformers grouped_mm" and round_number > host_rounds:
                continue
            once = time_once(forward, inputs)
            if round_number:  # the first round warms up
                seconds[name].append(once)
        if 0 < round_number <= host_rounds:
            seconds["dense bound"].append(dense_bound(shape, dtype))
        print(f"round {round_number}/{rounds}", file=sys.stderr, flush=True)
    zero, host = seconds["lrmoe drop=0%"], seconds["transformers grouped_mm"]
    rows = [
        {
            "name": name,
            "forward_seconds": statistics.median(f for f, _ in times),
            "backward_seconds": statistics.median(b for _, b in times),
            "backward_over_drop_0": statistics.median(b / b0 for (_, b), (_, b0) in zip(times, zero, strict=False)),
            "total_over_transformers": statistics.median(
                (f + b) / (fh + bh) for (f, b), (fh, bh) in zip(times, host, strict=False)
            ),
        }
        for name, times in seconds.items()
    ]
    share = bookkeeping_share(contenders["lrmoe drop=20%"], inputs)
    return {"rows": rows, "bookkeeping_share_at_20": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("T", 2048), ("D", 1024), ("F", 512), ("E", 64), ("K", 8), ("rounds", 9), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--host-rounds", type=int, help="of them, those with Transformers and the dense bound (all)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(T=args.T, D=args.D, F=args.F, E=args.E, K=args.K)
    result = measure(shape, getattr(torch, args.dtype), args.rounds, args.host_rounds or args.rounds, args.seed)
    print(f"{'':36}{'forward s':>10}{'backward s':>11}{'bwd / drop 0':>13}{'f+b / Transformers':>20}")
    for row in result["rows"]:  # type: ignore[attr-defined]
        print(
            f"{row['name']:36}{row['forward_seconds']:10.3f}{row['backward_seconds']:11.3f}"
            f"{row['backward_over_drop_0']:13.3f}{row['total_over_transformers']:20.3f}"
        )
    print(f"selection and indexing: {result['bookkeeping_share_at_20']:.2%} of the backward at 20 %")
    if args.out:
        about = {
            "command": shlex.join(["python", "benchmarks/layer.py", *sys.argv[1:]]),
            "shape": vars(shape),
            "dtype": args.dtype,
            "rounds": args.rounds,
            "host_rounds": args.host_rounds or args.rounds,
            "threads": 1,
            "torch": torch.__version__,
            "cpu": platform.processor() or platform.machine(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(strict_json.dumps(about | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
