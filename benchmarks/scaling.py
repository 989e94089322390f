"""Scale on paper: 8 to 512 ranks in nodes of eight, planning measured on this machine and everything else modelled.

Experts of Qwen3-30B-A3B's size, 4096 tokens a rank and 8 experts a token, on H100s: as many experts as the model has,
and, as every rank owns one at least, as many as ranks where there are more. Loads are synthetic: the popularity of the
i-th expert falls as i to the minus a half, in drawn order.

    python benchmarks/scaling.py --out docs/results/scaling.json
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lrmoe import strict_json
from lrmoe.balance import get
from lrmoe.cluster import Hardware, ModelShape, hardware, layer_time, measure_planning, metadata, model
from lrmoe.cluster.scale import skewed_loads
from lrmoe.studies.loads import skew_of

RANKS = (8, 16, 32, 64, 128, 256, 512)
TOKENS = 4096
POWER = 0.5
DRAWS = 3
DROP = 0.2
SLOTS = 2
HEADINGS = (
    "ranks",
    "experts",
    "max/mean",
    "plan ms",
    "alloc ms",
    "counts MiB",
    "alloc MiB",
    "layer ms, even",
    "fixed",
    "lrmoe",
    "lrmoe, 20 %",
    "replicas",
    "weights ms",
    "planning / layer",
)


def at(ranks: int, shape: ModelShape, machine: Hardware) -> dict[str, Any]:
    """One row."""
    experts = max(shape.num_experts, ranks)
    shape = replace(shape, num_experts=experts)
    pairs = TOKENS * shape.top_k
    loads = [
        skewed_loads(num_experts=experts, ranks=ranks, pairs=pairs, power=POWER, seed=seed) for seed in range(DRAWS)
    ]
    planning = measure_planning(get("lrmoe", slots=SLOTS), loads, drop=DROP)
    times: dict[str, Any] = {}
    for name, policy, drop in (("fixed", "fixed", 0.0), ("lrmoe", "lrmoe", 0.0), ("lrmoe, drop", "lrmoe", DROP)):
        plan = get(policy, **({} if policy == "fixed" else {"slots": SLOTS})).plan(loads[0], drop=drop)
        found = layer_time(plan, shape, machine)
        times[name] = {
            "seconds": found.seconds,
            "balanced": found.balanced,
            "network": found.of("network"),
            "weights": found["weights to replicas"] + found["gradients of replicas home"],
            "replicas": plan.num_replicas,
        }
        del plan
    return {
        "ranks": ranks,
        "experts": experts,
        "skew": skew_of(loads[0]),
        "plan_s": planning.plan_s,
        "alloc_s": planning.alloc_s,
        "metadata": asdict(metadata(num_experts=experts, ranks=ranks, layers=shape.moe_layers, pairs=pairs)),
        "times": times,
    }


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table; times are in milliseconds."""
    times, about = row["times"], row["metadata"]
    best = times["lrmoe, drop"]
    return [
        str(row["ranks"]),
        str(row["experts"]),
        f"{row['skew']:.2f}",
        f"{1e3 * row['plan_s']:.1f}",
        f"{1e3 * row['alloc_s']:.1f}",
        f"{about['gathered'] / 2**20:.2f}",
        f"{about['alloc'] / 2**20:,.1f}",
        f"{1e3 * times['fixed']['balanced']:.2f}",
        *(f"{1e3 * times[name]['seconds']:.2f}" for name in times),
        str(best["replicas"]),
        f"{1e3 * best['weights']:.2f}",
        f"{(row['plan_s'] + row['alloc_s']) / best['seconds']:.2f}",
    ]


def main() -> int:
    """Runs and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape, machine = model("qwen3-30b-a3b"), hardware("h100")
    rows = []
    print("| " + " | ".join(HEADINGS) + " |\n|" + " ---: |" * len(HEADINGS))
    for ranks in given.ranks:
        rows.append(at(ranks, shape, machine))
        print("| " + " | ".join(cells(rows[-1])) + " |", flush=True)
    if given.out is not None:
        command = f"python benchmarks/scaling.py --out {given.out.as_posix()}"
        about = {"command": command, "torch": torch.__version__, "model": asdict(shape), "hardware": asdict(machine)}
        given.out.write_text(
            strict_json.dumps({**about, "tokens": TOKENS, "power": POWER, "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
