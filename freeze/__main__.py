"""``python -m freeze save DIR`` and ``python -m freeze compare DIR DIR``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from freeze import one_rank, ranks, records, saved_memory, verbs

PARTS = {
    "operator": one_rank.save,
    "ranks": ranks.save,
    "verbs": verbs.save_verbs,
    "studies": verbs.save_studies,
    "memory": saved_memory.save,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m freeze", description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    save = modes.add_parser("save", help="record this commit; goes on where it stopped")
    save.add_argument("folder", type=Path)
    compare = modes.add_parser("compare", help="say what differs between two records")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    compare.add_argument("--show", type=int, default=8, help="differences to show of a case (8)")
    for mode in (save, compare):
        mode.add_argument("--part", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    args = parser.parse_args()
    if args.mode == "save":
        for part in args.part:
            PARTS[part](args.folder / part)
        return 0
    return max(records.compare(args.before / part, args.after / part, show=args.show) for part in args.part)


if __name__ == "__main__":
    sys.exit(main())
