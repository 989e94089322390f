"""How long planning takes: on the critical path of every layer, on one thread.

Loads are skewed and synthetic: experts' popularity is log-normal, each token's experts are drawn independently. For
every size and skew, medians over seeds of the plan's and of its allocation table's CPU time. For policies that plan
from history also that of deciding, once a layer and step (or less often), off the critical path: from the first
placement, having seen one microbatch of the same skew.

    python benchmarks/planning.py --out docs/results/planning.json
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrmoe import strict_json
from lrmoe.balance import get
from lrmoe.balance.ownership import HistoryPolicy
from lrmoe.studies.loads import skew_of

SIZES = ((128, 8), (256, 64))
SIGMAS = (0.3, 0.7, 1.0, 1.5, 2.0)


def sampled_loads(num_experts: int, num_ranks: int, sigma: float, seed: int, rows: int = 32768) -> Tensor:
    """(G, E): ``rows`` pairs of each source, experts with log-normal popularity."""
    generator = torch.Generator().manual_seed(seed)
    popularity_E = torch.exp(sigma * torch.randn(num_experts, generator=generator, dtype=torch.float64))
    chosen = [popularity_E.multinomial(rows, replacement=True, generator=generator) for _ in range(num_ranks)]
    return torch.stack([torch.bincount(ids, minlength=num_experts) for ids in chosen])


def milliseconds(run: Any, repeats: int) -> float:
    """CPU time of the thread, the fastest of a few runs: the machine may be busy with something else."""
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        run()
        times.append(1e3 * (time.thread_time() - begin))
    return min(times)


def decide_milliseconds(policy: Any, lam_GE: Tensor, repeats: int) -> float | None:
    """Of one layer's step after these loads, from the policy's first placement; None for policies without history."""
    if not isinstance(policy, HistoryPolicy):
        return None
    times = []
    for _ in range(repeats):
        fresh = copy.deepcopy(policy)
        fresh.observe(lam_GE, layer=0)
        times.append(milliseconds(fresh.step, 1))
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="load matrices of each kind (5)")
    parser.add_argument("--repeats", type=int, default=3, help="plans of each matrix, the fastest counts (3)")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    records = []
    for num_experts, num_ranks in SIZES:
        mean_rows = 32768
        contenders: dict[str, tuple[Any, float]] = {
            "ultraep": (get("ultraep", slots=1), 0.0),
            "lrmoe, no drop": (get("lrmoe", slots=1), 0.0),
            "lrmoe, 20 %": (get("lrmoe", slots=1), 0.2),
            "lrmoe, 20 %, capacity 0.9": (
                get("lrmoe", slots=1, forward_cost=0, backward_cost=1, capacity=0.9 * mean_rows),
                0.2,
            ),
            # One slot a rank more than it owns experts, for all that have slots.
            "symi": (get("symi", slots=num_experts // num_ranks + 1), 0.0),
            "laer": (get("laer", slots=num_experts // num_ranks + 1), 0.0),
            "flexmoe": (get("flexmoe", slots=num_experts // num_ranks + 1), 0.0),
            "smartmoe": (get("smartmoe", interval=1), 0.0),
            "fastermoe": (get("fastermoe", dim=2048, ratio=0.5625, flops=4e14, bandwidth=5e10, bytes=2), 0.0),
            "eplb": (get("eplb", slots=1, interval=1), 0.0),
        }
        for sigma in SIGMAS:
            loads = [sampled_loads(num_experts, num_ranks, sigma, seed) for seed in range(arguments.seeds)]
            for name, (policy, drop) in contenders.items():
                decide = [decide_milliseconds(policy, lam_GE, arguments.repeats) for lam_GE in loads]
                if isinstance(policy, HistoryPolicy):
                    # It has seen the first matrix, and plans all of them.
                    policy = copy.deepcopy(policy)
                    policy.observe(loads[0], layer=0)
                    policy.step()
                plans = [policy.plan(lam_GE, drop=drop) for lam_GE in loads]
                times = [
                    milliseconds(lambda lam=lam_GE, one=policy: one.plan(lam, drop=drop), arguments.repeats)  # noqa: B023
                    for lam_GE in loads
                ]
                alloc = [milliseconds(lambda plan=plan: plan.alloc, arguments.repeats) for plan in plans]
                record = {
                    "experts": num_experts,
                    "ranks": num_ranks,
                    "max_over_mean": statistics.median(map(skew_of, loads)),
                    "policy": name,
                    "plan_ms": statistics.median(times),
                    "plan_ms_largest": max(times),
                    "alloc_ms": statistics.median(alloc),
                    "decide_ms": None if decide[0] is None else statistics.median(decide),
                    "replicas": statistics.median(plan.num_replicas for plan in plans),
                }
                records.append(record)
                print(
                    f"E={num_experts} G={num_ranks} max/mean {record['max_over_mean']:5.2f} {name:26} "
                    f"plan {record['plan_ms']:6.2f} ms (largest {record['plan_ms_largest']:6.2f}), "
                    f"alloc {record['alloc_ms']:5.2f} ms, {record['replicas']:g} replicas"
                    + ("" if decide[0] is None else f", decides in {record['decide_ms']:.1f} ms"),
                    flush=True,
                )
    if arguments.out:
        text = strict_json.dumps(
            {
                "command": shlex.join(["python", "benchmarks/planning.py", *sys.argv[1:]]),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "processors": os.cpu_count(),
                "records": records,
            },
            indent=1,
        )
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
