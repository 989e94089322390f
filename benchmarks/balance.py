"""What fixed ownership, UltraEP and LRMoE can do with skewed loads under the same capacity.

Loads are synthetic, with a given largest-over-mean rows of a rank (8 ranks, 128 experts, 8 a token, 4096 tokens a
rank), and recorded from a router (docs/results/router_loads.json, see `benchmarks/router_loads.py`). Nothing is timed:
rows and replicas are counted.

    python benchmarks/balance.py --out docs/results/balance.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from lrmoe import strict_json
from lrmoe.studies.loads import read_loads, skewed_loads
from lrmoe.studies.skew import BELOW_MEAN, HEADINGS, argue, cells

SKEWS = (1.5, 2.0, 2.5, 3.0, 4.0)
LAYERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", type=Path, default=Path("docs/results/router_loads.json"), help="recorded loads")
    parser.add_argument("--drop", type=float, default=0.2, help="share of backward rows LRMoE may leave out (0.2)")
    parser.add_argument("--slots", type=int, default=2, help="replicas a rank may hold (2)")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic loads (0)")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()

    loads = [(f"synthetic, {skew}", skewed_loads(skew, seed=arguments.seed)) for skew in SKEWS]
    for number, lam_GE in enumerate(read_loads(arguments.loads, None)):
        microbatch, layer = divmod(number, LAYERS)
        loads.append((f"router, layer {layer}, microbatch {microbatch}", lam_GE))
    records = [argue(label, lam_GE, drop=arguments.drop, slots=arguments.slots) for label, lam_GE in loads]

    for row in (HEADINGS, ["---"] * len(HEADINGS), *map(cells, records)):
        print(f"| {' | '.join(row)} |")
    print(f"\nfixed and UltraEP at a capacity of {BELOW_MEAN} mean loads:")
    for record in records[:1]:
        for policy in record["below_mean"]["policies"][:2]:
            print(policy["reason"])
    if arguments.out:
        command = shlex.join(["python", "benchmarks/balance.py", *sys.argv[1:]])
        text = strict_json.dumps({"command": command, "records": records}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
