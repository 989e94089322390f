"""Metrics of all ranks together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lrmoe.control import Recalibrator
from lrmoe.experts.meter import NONFINITE
from lrmoe.parallel.meeting import all_gather_json

_SUMS = ("importance_total", "importance_kept", "variance", NONFINITE)
# Ranks work side by side: the slowest one is what a step waits for.
_LARGEST = ("backwards", "forward_seconds", "backward_seconds")


def global_metrics(
    recal: Recalibrator,
    group: dist.ProcessGroup | None = None,
    *,
    reset: bool = True,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """:meth:`Recalibrator.metrics` over all ranks of ``group``, the same on each; every one of them has to call it.

    Loads, kept pairs and importance are added up: under expert parallelism a rank counts the pairs it computed, without
    it those of its own tokens, so each pair is counted once. Each rank has sequences of its own: means over backwards
    of what they kept are means over ranks as well. ``nonfinite_backwards`` are added up too, as each rank leaves out
    its own part: a backward in which all met NaN counts once for each of them. Seconds are the slowest rank's. Layers
    whose experts ran with nothing to drop count no importance there, and their shares are those of the other steps.

    Args:
        group: the ranks that train the model together, the default group if None.

    Raises:
        RankFailure: if a rank does not come.
    """
    own = {name: totals for name, control in recal.layers.items() if (totals := control.meter.totals())}
    told = all_gather_json(own, group, what="metrics", timeout_s=timeout_s)
    merged: dict[str, dict[str, Any]] = {}
    for name in recal.layers:
        parts = [ranks[name] for ranks in told if name in ranks]
        if parts:
            merged[name] = _merge(parts)
    if reset:
        recal.reset_metrics()
    return recal.summarize(merged)


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{
            key: [sum(counts) for counts in zip(*(part[key] for part in parts), strict=True)]
            for key in ("load", "kept", "sequences")
        },
        **{key: sum(part[key] for part in parts) for key in _SUMS},
        **{key: max(part[key] for part in parts) for key in _LARGEST},
    }
