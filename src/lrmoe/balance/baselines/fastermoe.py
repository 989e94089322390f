"""FasterMoE (PPoPP'22): the hottest experts are copied to every rank, as long as that is faster than sending rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lrmoe.balance.fixed import home_plan
from lrmoe.balance.plan import Plan, build_plan, home_ranks
from lrmoe.balance.policy import ExactPolicy, planned_quotas, require_loads
from lrmoe.balance.quotas import split_quotas
from lrmoe.config import Quota, require_count, require_number


class FasterMoE(ExactPolicy):
    """Shadows: an expert is copied to all ranks or to none, and its rows then stay on their source ranks.

    Experts are tried in order of their load; each becomes a shadow if the modelled latency falls, and the first that
    does not ends it. The latency of a layer, forward and backward, is that of :class:`Machine`.

    Complexity: O(E log E + shadows G), from the exact loads of the microbatch.
    Memory: weights and gradients of every shadow on every rank, of no limit but the modelled latency: most where the
    skew is worst.

    Known limits: all ranks or none, which is wasteful for many small experts on many ranks; of no help where the
    sources themselves are uneven. The paper's pipelining of transfers and its gate that prefers near experts (it
    changes the routing) are not here.

    Args:
        dim: width D of a token.
        ratio: alpha, width of an expert over D, for experts of two matrices; for a gated expert of three give 1.5
            times as much.
        flops: of a rank, 1/s. This and the next two are the published defaults: 11.5 Tflop/s, 50 Gb/s, 4 bytes.
        bandwidth: of a rank, bytes/s.
        bytes: of a number on the wire.

    Raises:
        ValueError: if an option is out of range.
    """

    name = "fastermoe"

    def __init__(
        self,
        *,
        dim: int = 1024,
        ratio: float = 4.0,
        flops: float = 11.5e12,
        bandwidth: float = 6.25e9,
        bytes: int = 4,
    ) -> None:
        self.slots = sys.maxsize  # Nothing limits the shadows.
        self.dim = require_count("dim", dim, least=1)
        self.ratio, self.flops, self.bandwidth = (
            _require_positive(field, value)
            for field, value in (("ratio", ratio), ("flops", flops), ("bandwidth", bandwidth))
        )
        self.bytes = require_count("bytes", bytes, least=1)

    @property
    def machine(self) -> Machine:
        """The latency model of these options."""
        return Machine(self.dim, self.ratio, self.flops, self.bandwidth / self.bytes)

    def plan(self, lam_GE: Tensor, *, drop: float = 0.0, quota: Quota = "expert", layer: int = 0) -> Plan:
        """The plan with the shadows. See :meth:`lrmoe.balance.policy.Policy.plan`."""
        lam_GE = require_loads(lam_GE)
        quota_E = planned_quotas(lam_GE, drop, quota)
        shadowed, _ = shadows(lam_GE, self.machine)
        if not shadowed:
            return home_plan(lam_GE, quota_E)
        num_ranks, num_experts = lam_GE.shape
        homes = home_ranks(num_experts, num_ranks)
        exports = [
            (expert, rank, rows)
            for expert in shadowed
            for rank, rows in enumerate(lam_GE[:, expert].tolist())
            if rank != homes[expert]
        ]
        hosts, rows_EG = build_plan(lam_GE, homes, exports)
        return Plan(hosts, rows_EG, split_quotas(quota_E, rows_EG, hosts), lam_GE)


@dataclass(frozen=True, slots=True)
class Machine:
    """The paper's latency model of one layer.

    Args:
        dim: D.
        ratio: alpha; an expert has 2 alpha D^2 parameters.
        flops: 1/s.
        bandwidth: numbers/s.
    """

    dim: int
    ratio: float
    flops: float
    bandwidth: float

    def latency(self, rows_G: Sequence[int], remote_G: Sequence[int], num_shadows: int) -> float:
        """Seconds, forward and backward.

        Args:
            rows_G: computed by each rank; three passes of 4 alpha D^2 operations a row.
            remote_G: those that come from other ranks; each row travels four times.
            num_shadows: whose weights travel out, and whose gradients back.
        """
        compute = 3 * 4 * max(rows_G) * self.ratio * self.dim**2 / self.flops
        rows = 4 * max(remote_G) * self.dim / self.bandwidth
        return compute + rows + 2 * num_shadows * 2 * self.ratio * self.dim**2 / self.bandwidth


def shadows(lam_GE: Tensor, machine: Machine) -> tuple[list[int], list[float]]:
    """The experts to shadow, hottest first, and the latencies that were compared: without, with one, two ..."""
    num_ranks, num_experts = lam_GE.shape
    homes = home_ranks(num_experts, num_ranks)
    load_E = lam_GE.sum(0).tolist()
    rows_G, remote_G = [0] * num_ranks, [0] * num_ranks
    own_E = lam_GE[homes, range(num_experts)].tolist()
    for expert, home in enumerate(homes):
        rows_G[home] += load_E[expert]
        remote_G[home] += load_E[expert] - own_E[expert]
    latencies = [machine.latency(rows_G, remote_G, 0)]
    shadowed: list[int] = []
    for expert in sorted(range(num_experts), key=lambda e: -load_E[e]):
        home, lam_G = homes[expert], lam_GE[:, expert].tolist()
        rows_G = [rows + lam for rows, lam in zip(rows_G, lam_G, strict=True)]
        rows_G[home] -= load_E[expert]
        remote_G[home] -= load_E[expert] - lam_G[home]
        latencies.append(machine.latency(rows_G, remote_G, len(shadowed) + 1))
        if not latencies[-1] < latencies[-2]:
            break
        shadowed.append(expert)
    return shadowed, latencies


def _require_positive(field: str, value: float) -> float:
    number = require_number(field, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{field}={value!r} must be positive and finite")
    return number
