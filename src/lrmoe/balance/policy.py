"""What a balancing policy is. Every rank asks its own copy with the same loads and gets the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from lrmoe.balance.plan import Ownership, Plan, home_ranks
from lrmoe.balance.quotas import rank_quotas
from lrmoe.config import Quota, require_number


class Policy(Protocol):
    """Plans who computes what, from exact loads; deterministic, with no communication.

    Attributes:
        name: under which :func:`lrmoe.balance.get` knows it.
        slots: replicas a rank may hold at a time; the engine sets aside memory for as many. Where the ownership is not
            ``home``: experts a rank holds.
        ownership: where the experts live, see :data:`lrmoe.balance.plan.Ownership`; ``home`` for a policy that does not
            have it. The others are :class:`lrmoe.balance.ownership.HistoryPolicy`, whose placements and moves the
            engine follows.
    """

    name: str
    slots: int
    ownership: Ownership

    def observe(self, lam_GE: Tensor, *, layer: int) -> None:
        """Told of the loads of each planned training forward; for policies that plan from history."""

    def plan(self, lam_GE: Tensor, *, drop: float = 0.0, quota: Quota = "expert", layer: int = 0) -> Plan:
        """The plan for these loads.

        Args:
            lam_GE: integer (G, E): pairs of each source rank for each expert.
            drop: fraction of all pairs that the backward may leave out, in [0, 1). With 0 all rows are kept.
            quota: which experts drop, see :func:`lrmoe.balance.quotas.rank_quotas`.
            layer: whose loads these are; for policies that plan from history.

        Raises:
            ValueError: if an argument is out of range, or (:class:`BudgetExceeded`) no plan fits the capacity.
        """

    def step(self) -> None:
        """Called once an optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as JSON can hold it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave."""


class ExactPolicy:
    """What the policies have in common that plan from this microbatch's loads alone: nothing to remember."""

    name: str
    slots: int
    ownership: Ownership = "home"

    def prepare(self, num_experts: int, num_ranks: int) -> None:
        """Says early whether the policy can run with these.

        Raises:
            ValueError: unless 1 <= num_ranks <= num_experts.
        """
        home_ranks(num_experts, num_ranks)

    def observe(self, lam_GE: Tensor, *, layer: int) -> None:
        """Nothing to remember."""

    def step(self) -> None:
        """Nothing to remember."""

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the empty state.

        Raises:
            ValueError: if there is something in it, which then is of another policy.
        """
        if state:
            raise ValueError(
                f"the policy {self.name!r} has no state, but is given {', '.join(map(repr, state))}: it belongs to "
                "another policy; resume with that one"
            )


class BudgetExceeded(ValueError):
    """No plan that the policy may make fits the capacity.

    Attributes:
        demand: of the fullest rank in the best plan found, in the unit of ``capacity``.
        capacity: what a rank may hold.
        rank: the fullest rank.
        would_fit: the least capacity at which the policy has a plan, in the same unit.
    """

    def __init__(
        self,
        policy: str,
        *,
        demand: float,
        capacity: float,
        rank: int,
        would_fit: float,
        mend: str,
        unit: str = " rows",
    ) -> None:
        super().__init__(
            f"policy {policy!r} does not fit: rank {rank} needs {demand:,.10g}{unit}, the capacity is "
            f"{capacity:,.10g}; a capacity of {would_fit:,.10g} would fit. {mend}"
        )
        self.demand, self.capacity, self.rank, self.would_fit = demand, capacity, rank, would_fit


def require_loads(lam_GE: Tensor) -> Tensor:
    """``lam_GE`` as int64 on the CPU.

    Raises:
        ValueError: if it is no integer matrix (G, E) with 1 <= G <= E and no negative entry.
    """
    if not isinstance(lam_GE, Tensor) or lam_GE.dim() != 2:
        found = f"{tuple(lam_GE.shape)}" if isinstance(lam_GE, Tensor) else type(lam_GE).__name__
        raise ValueError(f"lam_GE is {found}; it must be a tensor (ranks, experts): pairs of each source and expert")
    if lam_GE.is_floating_point() or lam_GE.is_complex() or lam_GE.dtype == torch.bool:
        raise ValueError(f"lam_GE is {lam_GE.dtype}; it counts pairs and must be of an integer type, e.g. torch.int64")
    num_ranks, num_experts = lam_GE.shape
    home_ranks(num_experts, num_ranks)
    lam_GE = lam_GE.to(device="cpu", dtype=torch.int64)
    if bool((lam_GE < 0).any()):
        source, expert = (lam_GE < 0).nonzero()[0].tolist()
        raise ValueError(
            f"lam_GE[{source}, {expert}]={int(lam_GE[source, expert])} is negative; it is the number of pairs of "
            f"rank {source} for expert {expert}"
        )
    return lam_GE


def require_capacity(capacity: object) -> float | None:
    """``capacity`` as a positive number or None.

    Raises:
        ValueError: naming the value.
    """
    if capacity is None:
        return None
    number = require_number("capacity", capacity)
    if number <= 0:
        raise ValueError(f"capacity={capacity!r} must be a positive number, or None for no limit")
    return number


def planned_quotas(lam_GE: Tensor, drop: float, quota: Quota) -> Tensor:
    """int64 (E,): how many rows of each expert the backward keeps.

    Raises:
        ValueError: if ``drop`` is outside [0, 1) or ``quota`` is not known.
    """
    drop = require_number("drop", drop)
    if not 0.0 <= drop < 1.0:
        raise ValueError(f"drop={drop!r} must be in [0, 1): the fraction of pairs the backward may leave out")
    if quota not in get_args(Quota):
        raise ValueError(f"quota={quota!r} is not known; choose one of {', '.join(get_args(Quota))}")
    num_ranks, num_experts = lam_GE.shape
    return rank_quotas(quota, lam_GE.sum(0), home_ranks(num_experts, num_ranks), drop)
