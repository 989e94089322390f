"""Backward of MoE layers on two real ranks whose routing is skewed: fixed ownership, UltraEP, LRMoE.

Two processes of one thread each, gloo, on one machine. Routing is synthetic: rank 0's experts get `--skew` times their
share of the pairs (1.6: rank 0 computes 80 % of all pairs, rank 1 20 %), and one of them alone the share `--hot`: one
slot can take a part of one expert. All contenders run in the same two processes,
one after the other in each round, on the same inputs. A backward begins for both ranks at a barrier and counts until
the slower of them is done; medians over rounds, ratios of medians of the same rounds.

    python benchmarks/two_ranks.py --out docs/results/two_ranks.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lrmoe
from lrmoe import strict_json
from lrmoe.balance import get
from lrmoe.parallel import ExpertParallel
from lrmoe.parallel.collectives import all_reduce, barrier

RANKS = 2
LAYERS = 2
# name: (policy, drop)
CONTENDERS: dict[str, tuple[str, float]] = {
    "fixed, drop 0": ("fixed", 0.0),
    "fixed, drop 20%": ("fixed", 0.2),
    "ultraep, drop 0": ("ultraep", 0.0),
    "lrmoe, drop 0": ("lrmoe", 0.0),
    "lrmoe, drop 20%": ("lrmoe", 0.2),
    "lrmoe, drop 30%": ("lrmoe", 0.3),
}


def skewed_ids(tokens: int, experts: int, top_k: int, skew: float, hot: float, generator: torch.Generator) -> Tensor:
    """(T, K): expert 0 gets the share ``hot`` of all pairs, rank 0's half of the experts, with it, skew/2."""
    half = experts // RANKS
    on_first_TK = torch.rand(tokens, top_k, generator=generator) < (skew / RANKS - hot) / (1.0 - hot)
    # Distinct experts: the k-th choice inside a half is the k-th of a random order of it, expert 0 left out.
    first_TK = torch.rand(tokens, half - 1, generator=generator).argsort(1)[:, :top_k] + 1
    second_TK = torch.rand(tokens, half, generator=generator).argsort(1)[:, :top_k] + half
    ids_TK = torch.where(on_first_TK, first_TK, second_TK)
    ids_TK[torch.rand(tokens, generator=generator) < hot * top_k, 0] = 0
    return ids_TK


def run_rank(rank: int, port: int, options: dict[str, Any], answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    T, D, F, E, K = (options[name] for name in "TDFEK")
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(T, D, generator=generator)
    grad_TD = torch.randn(T, D, generator=generator) * torch.randn(T, 1, generator=generator).exp()
    layers = []
    for _ in range(LAYERS):
        weights = (
            nn.Parameter(torch.randn(E // RANKS, 2 * F, D, generator=generator) * D**-0.5),
            nn.Parameter(torch.randn(E // RANKS, D, F, generator=generator) * F**-0.5),
        )
        ids_TK = skewed_ids(T, E, K, options["skew"], options["hot"], generator)
        alpha_TK = torch.rand(T, K, generator=generator).softmax(-1).requires_grad_()
        layers.append((ids_TK, alpha_TK, weights))
    engines = {}
    for name, (policy, drop) in CONTENDERS.items():
        plan = get(policy, slots=1, **({"floor": 1} if policy == "ultraep" else {}))
        config = lrmoe.LRMoEConfig(drop=drop)
        engines[name] = ExpertParallel(group, num_experts=E, policy=plan, config=config)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for turn in range(options["rounds"] + 1):
        for name, engine in engines.items():
            out_TD = x_TD.clone().requires_grad_()
            barrier(group, what="forward")
            start = time.perf_counter()
            for layer, (ids_TK, alpha_TK, weights) in enumerate(layers):
                out_TD = engine.routed_experts(out_TD, ids_TK, alpha_TK, *weights, step=turn, layer=layer)
            barrier(group, what="backward")
            middle = time.perf_counter()
            out_TD.backward(grad_TD)
            end = time.perf_counter()
            took = torch.tensor([middle - start, end - middle], dtype=torch.float64)
            all_reduce(took, group, what="seconds", op="max")
            if turn:  # the first round warms up
                seconds[name].append((float(took[0]), float(took[1])))
            for _, alpha_TK, weights in layers:
                alpha_TK.grad = weights[0].grad = weights[1].grad = None
        if rank == 0:
            print(f"round {turn}/{options['rounds']}", file=sys.stderr, flush=True)
    if rank == 0:
        answers.put((seconds, {name: engine.metrics() for name, engine in engines.items()}))
    barrier(group, what="end")
    dist.destroy_process_group()


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    # Held here: neither rank's end takes the store from the other.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    processes = [context.Process(target=run_rank, args=(rank, port, options, answers)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    seconds, metrics = answers.get()
    for process in processes:
        process.join()
    base = seconds["fixed, drop 0"]
    return [
        {
            "name": name,
            "forward_seconds": statistics.median(f for f, _ in times),
            "backward_seconds": statistics.median(b for _, b in times),
            "backward_over_fixed": statistics.median(b / b0 for (_, b), (_, b0) in zip(times, base, strict=True)),
            "step_over_fixed": statistics.median(
                (f + b) / (f0 + b0) for (f, b), (f0, b0) in zip(times, base, strict=True)
            ),
            "forward_max_over_mean": metrics[name]["forward_max_over_mean"],
            "backward_max_over_mean": metrics[name]["backward_max_over_mean"],
            "replicas": metrics[name]["replicas"],
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"T": 2048, "D": 512, "F": 512, "E": 16, "K": 2, "rounds": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--skew", type=float, default=1.6, help="rank 0's pairs over its share")
    parser.add_argument(
        "--hot", type=float, default=0.4, help="share of all pairs that falls on one expert, at most 1/K"
    )
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    rows = measure({**{name: getattr(args, name) for name in sizes}, "skew": args.skew, "hot": args.hot})
    print(
        f"{'':18}{'forward s':>10}{'backward s':>11}{'bwd / fixed':>12}{'step / fixed':>13}{'rows, kept max/mean':>21}"
    )
    for row in rows:
        print(
            f"{row['name']:18}{row['forward_seconds']:10.3f}{row['backward_seconds']:11.3f}"
            f"{row['backward_over_fixed']:12.3f}{row['step_over_fixed']:13.3f}"
            f"{row['forward_max_over_mean']:13.2f}, {row['backward_max_over_mean']:.2f}"
        )
    if args.out:
        about = {
            "command": shlex.join(["python", "benchmarks/two_ranks.py", *sys.argv[1:]]),
            "shape": {name: getattr(args, name) for name in "TDFEK"},
            "tokens": "T a rank",
            "layers": LAYERS,
            "skew": args.skew,
            "hot": args.hot,
            "rounds": args.rounds,
            "threads": "1 a rank",
            "torch": torch.__version__,
            "cpu": platform.processor() or platform.machine(),
            "rows": rows,
        }
        args.out.write_text(strict_json.dumps(about, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
