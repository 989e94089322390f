"""All nine policies on a recorded trace and on the eight synthetic workloads: how even, and what it costs.

Rows and bytes are counted and planning is timed; all other times are modelled (`docs/balancing.md`).

    python benchmarks/replay.py --trace docs/results/router_trace --out docs/results/replay.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from lrmoe import strict_json
from lrmoe.balance.shapes import SHAPES
from lrmoe.studies.replay_config import ReplayConfig
from lrmoe.studies.replay_run import describe, run_replay, short_cell
from lrmoe.studies.systems import SYSTEMS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="of lrmoe train --trace")
    parser.add_argument("--steps", type=int, help="of each workload, and of the trace (40, and all)")
    parser.add_argument("--slots", type=int, default=1, help="experts a rank may hold on top of its own (1)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shared = {"slots": arguments.slots, "steps": arguments.steps}
    found: dict[str, dict[str, Any]] = {}
    if arguments.trace:
        found["trace"] = run_replay(ReplayConfig(trace=arguments.trace, **shared)).summary()
        # As it would be over more ranks.
        found["trace, dealt out over 8"] = run_replay(ReplayConfig(trace=arguments.trace, ranks=8, **shared)).summary()
    for name in SHAPES:
        found[name] = run_replay(ReplayConfig(workload=name, **shared)).summary()
    for name, summary in found.items():
        print(f"{name}: {'; '.join(describe(summary))}", flush=True)
    for drop in (0.0, 0.2):
        print(f"\nbusiest / mean rank in the forward, modelled time over fixed ownership's; {drop:.0%} dropped\n")
        print(f"| loads | {' | '.join(f'`{name}`' for name in SYSTEMS)} |")
        print(f"|---|{'---:|' * len(SYSTEMS)}")
        for name, summary in found.items():
            records = [record for record in summary["policies"] if record["drop"] == drop]
            print(f"| {name} | {' | '.join(map(short_cell, records))} |")
    # One record a line.
    parts = []
    for name, summary in found.items():
        lines = ",\n".join(strict_json.dumps(record) for record in summary.pop("policies"))
        parts.append(f'{strict_json.dumps(name)}: {strict_json.dumps(summary)[:-1]},\n"policies": [\n{lines}\n]}}')
    joined = ",\n".join(parts)
    arguments.out.write_text(f"{{\n{joined}\n}}\n", encoding="utf-8")
    print("\n" + shlex.join(["python", "benchmarks/replay.py", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
