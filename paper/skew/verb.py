"""``python -m paper skew``: what fixed ownership, UltraEP and LRMoE can do with skewed loads under the same capacity.

Loads are synthetic, with a given largest-over-mean rows of a rank (8 ranks, 128 experts, 8 a token, 4096 tokens a
rank), and recorded from a router (docs/results/router_loads.json, see `benchmarks/router_loads.py`). Nothing is timed:
rows and replicas are counted.

    python -m paper skew --out docs/results/balance.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from lrmoe import strict_json
from paper import PROGRAM

SKEWS = (1.5, 2.0, 2.5, 3.0, 4.0)
LAYERS = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """All settings."""
    parser.add_argument("--loads", type=Path, default=Path("docs/results/router_loads.json"), help="recorded loads")
    parser.add_argument("--drop", type=float, default=0.2, help="share of backward rows LRMoE may leave out (0.2)")
    parser.add_argument("--slots", type=int, default=2, help="replicas a rank may hold (2)")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic loads (0)")
    parser.add_argument("--out", type=Path, default=None, help="write the table as JSON")


def run(given: dict[str, Any]) -> int:
    """The verb."""
    from lrmoe.studies.loads import read_loads, skewed_loads
    from paper.skew.capacities import BELOW_MEAN, HEADINGS, argue, cells

    loads = [(f"synthetic, {skew}", skewed_loads(skew, seed=given["seed"])) for skew in SKEWS]
    for number, lam_GE in enumerate(read_loads(given["loads"], None)):
        microbatch, layer = divmod(number, LAYERS)
        loads.append((f"router, layer {layer}, microbatch {microbatch}", lam_GE))
    records = [argue(label, lam_GE, drop=given["drop"], slots=given["slots"]) for label, lam_GE in loads]

    for row in (HEADINGS, ["---"] * len(HEADINGS), *map(cells, records)):
        print(f"| {' | '.join(row)} |")
    print(f"\nfixed and UltraEP at a capacity of {BELOW_MEAN} mean loads:")
    for record in records[:1]:
        for policy in record["below_mean"]["policies"][:2]:
            print(policy["reason"])
    if given["out"] is not None:
        command = shlex.join([*PROGRAM.split(), *sys.argv[1:]])
        text = strict_json.dumps({"command": command, "records": records}, indent=1)
        given["out"].write_text(text + "\n", encoding="utf-8")
    return 0
