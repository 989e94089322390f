"""The paper's three comparisons (arXiv 2610.37720) beside ours, and what one would have to assume to get its figures.

Nothing here is fitted: loads, bytes and hardware are stated first, and what comes out is printed whatever it is. The
paper's figures are of one MoE layer of Qwen3-30B-A3B on 8 Hopper GPUs: sequences of 8192 tokens, 4 a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lrmoe.balance import Plan, get
from lrmoe.cluster import Hardware, ModelShape, expert_state, layer_time
from lrmoe.studies.loads import skewed_loads
from lrmoe.studies.pair_bytes import PairBytes, accounting
from lrmoe.studies.paper_config import ELEMENTWISE, GIB
from lrmoe.studies.pressure import completed

Record = dict[str, Any]
TOKENS = 8192 * 4
MEMORY = {
    "fixed": {"subtotal": 12.88, "buffers": 12.46},
    "lrmoe": {"subtotal": 5.44, "buffers": 4.97},
}
"""GiB: base placement, replicas and token buffers together, and token buffers alone."""
BACKWARD_MS = {"fixed": 29.64, "lrmoe": 12.69}
THROUGHPUT = {"lrmoe": 1.0, "ultraep": 0.584, "symi": 0.449, "fixed": 0.400}
"""At 20 times the batch, best first."""


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What the comparison is made with."""

    model: ModelShape
    hardware: Hardware
    ranks: int = 8
    tokens: int = TOKENS
    drop: float = 0.2
    slots: int = 2


def at_one(skew: float, assumed: Assumed) -> Record:
    """Memory and the backward's time at pressure 1, of fixed ownership and of LRMoE.

    Returns:
        ``skew``, ``base`` and ``replicas`` (GiB); under ``fixed`` and ``lrmoe``: ``kept_of_mean_rows`` (kept rows of
        the rank with most over the mean of all rows), ``buffers`` (GiB of the fullest rank, by way of counting), and,
        with plain activations as this library runs them on a GPU and with fused ones, ``backward_ms`` and
        ``experts_ms`` (of the backward all phases, and the experts alone).
    """
    model, slots = assumed.model, assumed.slots
    lam_GE = skewed_loads(
        skew, num_experts=model.num_experts, num_ranks=assumed.ranks, tokens=assumed.tokens, top_k=model.top_k
    )
    plans = {
        "fixed": get("fixed").plan(lam_GE),
        "lrmoe": get("lrmoe", slots=slots).plan(lam_GE, drop=assumed.drop),
    }
    record: Record = {
        "skew": skew,
        "base": expert_state(model, experts=-(-model.num_experts // assumed.ranks)) / GIB,
        "replicas": expert_state(model, experts=slots) / GIB,
    }
    mean_rows = int(lam_GE.sum()) / assumed.ranks
    for name, plan in plans.items():
        times = {how: layer_time(plan, model, assumed.hardware, elementwise=how) for how in ELEMENTWISE}
        record[name] = {
            "kept_of_mean_rows": int(plan.quota_EG.sum(0).max()) / mean_rows,
            "buffers": {which: _buffers(plan, accounting(which, model), model) for which in ("kept", "operator")},
            "backward_ms": {how: 1e3 * one.of("backward") for how, one in times.items()},
            "experts_ms": {how: 1e3 * one["backward experts"] for how, one in times.items()},
        }
    return record


def _buffers(plan: Plan, pair: PairBytes, model: ModelShape) -> float:
    return completed(plan, float("inf"), pair, model.top_k).demand / GIB


def needed(assumed: Assumed) -> list[Record]:
    """For each published figure what would give it, with every activation and gradient of a kept row counted and
    nothing else: ``figure``, ``needs`` (in words) and ``value``."""
    model = assumed.model
    each = 8 * model.dim + 12 * model.expert_dim
    mean_rows = assumed.tokens * model.top_k
    rows = {name: MEMORY[name]["buffers"] * GIB / each for name in MEMORY}
    flops = {name: 12 * model.dim * model.expert_dim * rows[name] for name in rows}
    rate = {name: flops[name] / BACKWARD_MS[name] * 1e3 for name in rows}
    capacity = THROUGHPUT["fixed"] * rows["fixed"] / mean_rows
    busiest = {name: capacity / THROUGHPUT[name] for name in ("ultraep", "symi")}
    budget = 20 * capacity * mean_rows * each / GIB
    found: list[tuple[str, str, float]] = [
        (
            "token buffers of Megatron-LM, 12.46 GiB",
            f"the busiest rank at {rows['fixed'] / mean_rows:.3f} times the mean, if every row takes {each:,} bytes; "
            "published is neither, and the figure gives their product alone",
            rows["fixed"] / mean_rows,
        ),
        (
            "token buffers of LRMoE, 4.97 GiB",
            f"a busiest rank that keeps {rows['lrmoe'] / mean_rows:.3f} of the mean rows: "
            f"{1 - rows['lrmoe'] / mean_rows:.1%} dropped and the rest even to the last row, with the forward's "
            "buffers counted for kept rows alone",
            rows["lrmoe"] / mean_rows,
        ),
        (
            "backward of Megatron-LM, 29.64 ms",
            f"{rate['fixed'] / 1e12:.0f} Tflop/s on these rows, if the experts' products are all there is",
            rate["fixed"],
        ),
        (
            "backward of LRMoE, 12.69 ms",
            f"{rate['lrmoe'] / 1e12:.0f} Tflop/s on these rows; what is published does not say what else the subtotal "
            "holds",
            rate["lrmoe"],
        ),
        (
            "40.0 % of Megatron-LM at 20 x",
            f"the fullest rank decides, and a rank holds {capacity:.3f} of the mean rows at 20 x: {budget:.0f} GiB for "
            "one layer if 1 x is the batch of the memory table. A GPU has 80: 1 x must be another batch, which is not "
            "published",
            budget,
        ),
        (
            "44.9 % of SYMI at 20 x",
            f"the same, with its busiest rank at {busiest['symi']:.2f} times the mean; its slots are not published",
            busiest["symi"],
        ),
        (
            "58.4 % of UltraEP at 20 x",
            f"the same, with its busiest rank at {busiest['ultraep']:.2f} times the mean; its slots are not published",
            busiest["ultraep"],
        ),
        (
            "100 % of LRMoE at 20 x",
            "rows whose backward is left out count as done, and the forward's buffers of those rows are not counted",
            1.0,
        ),
    ]
    return [{"figure": figure, "needs": words, "value": value} for figure, words, value in found]


def in_order(shares: Sequence[float], least: float = 1e-3) -> bool:
    """Whether each is larger than the next by at least ``least``."""
    return all(a - b >= least for a, b in pairwise(shares))
