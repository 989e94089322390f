"""Critical path of MoE layers over several ranks that share one machine: fixed ownership, UltraEP, LRMoE.

Modelled, not wall time: every rank counts the CPU time of its own thread phase by phase, between collectives all wait
for the slowest, and transfers cost their bytes at the stated bandwidth (lrmoe.parallel.phase_timer). Routing is
synthetic: experts' popularity falls as a power of their number, which puts the hottest on rank 0.

    python benchmarks/critical_path.py --out docs/results/critical_path.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from two_ranks import CONTENDERS

import lrmoe
from lrmoe import strict_json
from lrmoe.balance import get
from lrmoe.parallel import ExpertParallel
from lrmoe.parallel.phase_timer import PhaseTimer


def power_law_ids(tokens: int, experts: int, top_k: int, power: float, generator: torch.Generator) -> Tensor:
    """(T, K) distinct experts, drawn in proportion to (1 + number) ** -power."""
    popularity_E = torch.arange(1, experts + 1, dtype=torch.float32).pow(-power).log()
    noise_TE = torch.rand(tokens, experts, generator=generator).log().neg().log().neg()
    return (popularity_E + noise_TE).topk(top_k, dim=1).indices


def run_rank(rank: int, port: int, options: dict[str, Any], answers: Any) -> None:
    torch.set_num_threads(1)
    size = options["ranks"]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    group = dist.group.WORLD
    T, D, F, E, K = (options[name] for name in "TDFEK")
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(T, D, generator=generator).requires_grad_()
    grad_TD = torch.randn(T, D, generator=generator) * torch.randn(T, 1, generator=generator).exp()
    ids_TK = power_law_ids(T, E, K, options["power"], generator)
    alpha_TK = torch.rand(T, K, generator=generator).softmax(-1).requires_grad_()
    rows = []
    for name, (policy, drop) in CONTENDERS.items():
        engine = ExpertParallel(
            group,
            num_experts=E,
            policy=get(policy, slots=options["slots"], **({"floor": 1} if policy == "ultraep" else {})),
            config=lrmoe.LRMoEConfig(drop=drop),
        )
        own = len(engine.local_experts)
        weights = (
            nn.Parameter(torch.randn(own, 2 * F, D, generator=generator) * D**-0.5),
            nn.Parameter(torch.randn(own, D, F, generator=generator) * F**-0.5),
        )
        for turn in range(options["rounds"] + 1):
            if turn == 1:  # the first round warms up
                engine.clock = PhaseTimer(bytes_per_s=options["bandwidth"])
            engine.routed_experts(x_TD, ids_TK, alpha_TK, *weights, step=turn).backward(grad_TD)
        assert engine.clock is not None
        path = engine.clock.collect(group)
        planned = engine.metrics()
        rows.append(
            {
                "name": name,
                **path.to_dict(),
                **{key: planned[key] for key in ("forward_max_over_mean", "backward_max_over_mean", "replicas")},
            }
        )
        if rank == 0:
            print(name, file=sys.stderr, flush=True)
    if rank == 0:
        answers.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with_port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = with_port.port
    del with_port
    ranks = range(options["ranks"])
    processes = [context.Process(target=run_rank, args=(rank, port, options, answers)) for rank in ranks]
    for process in processes:
        process.start()
    rows: list[dict[str, Any]] = answers.get()
    for process in processes:
        process.join()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"ranks": 4, "T": 1024, "D": 512, "F": 512, "E": 32, "K": 4, "slots": 1, "rounds": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--power", type=float, default=0.6, help="popularity of expert n is (1 + n) ** -power")
    parser.add_argument("--bandwidth", type=float, default=5e9, help="bytes a rank sends, and receives, in a second")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in (*sizes, "power", "bandwidth")}
    rows = measure(options)
    base = rows[0]
    print(rows[0]["label"])
    print(f"{'':18}{'critical s':>11}{'/ fixed':>9}{'compute s':>11}{'transfer s':>11}", end="")
    print(f"{'rows, kept max/mean':>21}{'replicas':>9}")
    for row in rows:
        print(
            f"{row['name']:18}{row['critical_s']:11.3f}{row['critical_s'] / base['critical_s']:9.3f}"
            f"{row['compute_s']:11.3f}{row['transfer_s']:11.3f}"
            f"{row['forward_max_over_mean']:13.2f}, {row['backward_max_over_mean']:.2f}{row['replicas']:9.1f}"
        )
    if args.out:
        about = {
            "command": shlex.join(["python", "benchmarks/critical_path.py", *sys.argv[1:]]),
            "options": options,
            "tokens": "T a rank",
            "torch": torch.__version__,
            "rows": rows,
        }
        args.out.write_text(strict_json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
