"""Whether replicas pay: the one place that decides it, for ``lrmoe balance`` and for ``lrmoe plan``.

A layer's time is that of :func:`lrmoe.cluster.layer_time`, arithmetic for a model's experts on stated hardware.
Replicas pay where the layer with them takes at most :data:`FASTER` of its time with every expert at home, under the
same quotas.

Shapes: E experts, G ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lrmoe.balance import Plan, Policy
from lrmoe.balance.fixed import home_plan
from lrmoe.balance.policy import planned_quotas
from lrmoe.cluster import Elementwise, Hardware, LayerTime, ModelShape, Precision, hardware, layer_time, model
from lrmoe.config import Quota, Save
from lrmoe.studies.expert import Expert
from lrmoe.studies.loads import mean, scaled_loads
from lrmoe.studies.paper_config import DEFAULT_HARDWARE, DEFAULT_MODEL, FASTER

Record = dict[str, Any]
TOKENS = tuple(2**n for n in range(6, 17))
"""Tokens of a rank at which the break-even is looked at: 64 to 65536."""
TRAFFIC = ("weights to replicas", "gradients of replicas home")
"""Phases of a layer that there are for its replicas alone."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A policy and the drop it plans with."""

    label: str
    policy: Policy
    drop: float = 0.0
    quota: Quota = "expert"


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a layer's time is worked out with.

    Args:
        model: D, F and K of its experts.
        hardware: rates.
        save, elementwise, precision: as :func:`lrmoe.cluster.layer_time` takes them.
        recompute: the forward runs once more before the backward.
    """

    model: ModelShape = field(default_factory=lambda: model(DEFAULT_MODEL))
    hardware: Hardware = field(default_factory=lambda: hardware(DEFAULT_HARDWARE))
    save: Save = "preactivation"
    elementwise: Elementwise = "plain"
    precision: Precision = field(default_factory=Precision)
    recompute: bool = False

    def link(self, ranks: int) -> float:
        """Bytes a second that a rank's link to the others reaches: those between nodes where ranks are on several."""
        rate = self.hardware
        wide = ranks > rate.ranks_per_node
        return (rate.inter_bytes_per_s if wide else rate.intra_bytes_per_s) * rate.link_efficiency

    def expert(self, ranks: int) -> Expert:
        """Size and rates of one of the model's experts, for what :mod:`lrmoe.studies.systems` sends of it."""
        return Expert(
            dim=self.model.dim,
            expert_dim=self.model.expert_dim,
            flops=self.hardware.flops * self.hardware.gemm_efficiency,
            bandwidth=self.link(ranks),
        )

    def time(self, plan: Plan) -> LayerTime:
        """All phases of a layer under a plan, with recomputation the forward's twice."""
        once = layer_time(
            plan,
            self.model,
            self.hardware,
            precision=self.precision,
            save=self.save,
            elementwise=self.elementwise,
        )
        again = tuple(phase for phase in once.phases if phase.of == "forward") if self.recompute else ()
        return LayerTime((*again, *once.phases))


def pays(home_s: float, planned_s: float, replicas: float) -> bool:
    """Whether ``replicas`` that bring a layer's seconds from ``home_s`` to ``planned_s`` are worth having."""
    return replicas > 0 and planned_s <= FASTER * home_s


def break_even(
    contender: Contender,
    loads: Sequence[Tensor],
    *,
    prices: Sequence[Price],
    at: int | None = None,
) -> list[Record]:
    """At how many tokens a rank the replicas of a policy pay, a record a price.

    The loads are scaled to each size of :data:`TOKENS`, and to ``at``; at each a layer with every expert at home is
    held against the policy's plan, under the same quotas.

    Args:
        contender: with a policy that has no capacity, as sizes differ.
        loads: one or several matrices (G, E), each with a pair; what is said of a size is the mean over them.
        prices: of one model.
        at: the tokens that it is about.

    Returns:
        Of each ``policy``, its label; ``tokens``: from where on replicas pay, interpolated between the last size at
        which they do not and the next; None where they do not at the largest, 0 where they do at the smallest;
        ``sizes``: for each the ``tokens``, milliseconds ``home`` and ``planned`` of a layer, of which ``cost`` is the
        replicas' traffic and ``saved`` what they save beside it, the ``replicas``, and whether it ``pays``; ``here``:
        the one at ``at``, or None.
    """
    counts = sorted({*TOKENS, *([at] if at else [])})
    sizes: list[list[Record]] = [[] for _ in prices]
    for tokens in counts:
        for found, one in zip(sizes, _size(contender, loads, tokens, prices), strict=True):
            found.append(one)
    return [
        {
            "policy": contender.label,
            "tokens": _crossover(of_price),
            "sizes": of_price,
            "here": next((one for one in of_price if one["tokens"] == at), None),
        }
        for of_price in sizes
    ]


def _size(contender: Contender, loads: Sequence[Tensor], tokens: int, prices: Sequence[Price]) -> list[Record]:
    pairs: list[tuple[Plan, Plan]] = []
    for lam_GE in loads:
        scaled_GE = scaled_loads(lam_GE, tokens, prices[0].model.top_k)
        home = home_plan(scaled_GE, planned_quotas(scaled_GE, contender.drop, contender.quota))
        pairs.append((home, contender.policy.plan(scaled_GE, drop=contender.drop, quota=contender.quota)))
    replicas = mean([plan.num_replicas for _, plan in pairs])
    records = []
    for price in prices:
        times = [(price.time(home), price.time(plan)) for home, plan in pairs]
        home_ms, planned_ms = (1e3 * mean([one.seconds for one in side]) for side in zip(*times, strict=True))
        cost = 1e3 * mean([sum(phase.seconds for phase in one.phases if phase.name in TRAFFIC) for _, one in times])
        records.append(
            {
                "tokens": tokens,
                "home": home_ms,
                "planned": planned_ms,
                "saved": home_ms - (planned_ms - cost),
                "cost": cost,
                "replicas": replicas,
                "pays": pays(home_ms, planned_ms, replicas),
            }
        )
    return records


def _crossover(sizes: Sequence[Record]) -> float | None:
    losing = [i for i, size in enumerate(sizes) if not size["pays"]]
    if not losing:
        return 0.0
    if losing[-1] == len(sizes) - 1:
        return None
    below, above = sizes[losing[-1]], sizes[losing[-1] + 1]
    lost, won = (FASTER * size["home"] - size["planned"] for size in (below, above))
    # Without replicas nothing is lost: they begin somewhere between the two, which the larger is safe for.
    share = -lost / (won - lost) if below["replicas"] else 1.0
    return float(below["tokens"] + share * (above["tokens"] - below["tokens"]))


def advice(record: Record) -> str:
    """One sentence about a break-even."""
    policy = record["policy"]
    worth = f"bring a layer to at most {FASTER:.0%} of its time without"
    if all(size["replicas"] == 0 for size in record["sizes"]):
        return f"{policy}: plans no replica for these loads at any size; leave replicas off (slots=0)"
    if record["tokens"] is None:
        most = record["sizes"][-1]["tokens"]
        return f"{policy}: replicas do not {worth} at {most:,} tokens a rank; leave them off (slots=0)"
    if record["tokens"] == 0.0:
        return f"{policy}: replicas pay from {record['sizes'][0]['tokens']:,} tokens a rank on: they {worth}"
    return (
        f"{policy}: replicas pay from about {record['tokens']:,.0f} tokens a rank on: they {worth}; below that, leave "
        "them off (slots=0)"
    )
