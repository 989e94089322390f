"""Policies that plan from history: which experts the slots of each rank hold, decided once an optimizer step.

Where the experts live is the policy's ``ownership``, see :data:`lrmoe.balance.plan.Ownership`.

Shapes: E experts, G ranks. A *slot* holds the weights of one expert; two slots of a rank may hold the same one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from lrmoe.balance.plan import Ownership, Plan, home_ranks
from lrmoe.balance.policy import Policy, planned_quotas, require_loads
from lrmoe.balance.quotas import split_quotas
from lrmoe.config import Quota

Slots = tuple[tuple[int, ...], ...]
"""The expert in each slot of each rank, in slot order."""


@dataclass(frozen=True, slots=True)
class Move:
    """A slot gets another expert, weights and optimizer state with it.

    The source is a slot of the placement *before* the step, and all moves of a step are one exchange: read every source
    before anything is written. Where the source is on the target's rank, nothing travels.
    """

    layer: int
    expert: int
    source_rank: int
    source_slot: int
    target_rank: int
    target_slot: int


def ownership_of(policy: Policy) -> Ownership:
    """Where ``policy`` has the experts live; ``home`` if it does not say."""
    return cast(Ownership, getattr(policy, "ownership", "home"))


@dataclass(slots=True)
class LayerHistory:
    """What a policy remembers of one layer.

    Args:
        placement: in force.
        loads: int64 tensors, whatever the policy decides from; the newest last.
        observed: microbatches since the last step.
    """

    placement: Slots
    loads: list[Tensor] = field(default_factory=list)
    observed: int = 0


class HistoryPolicy:
    """What the policies have in common that place experts in slots, from the loads of earlier microbatches.

    A policy fills in :meth:`_check`, :meth:`_initial`, :meth:`_remember` and :meth:`_decide`. Every decision is a
    function of the observed loads alone, so that all ranks, which observe the same, decide the same.
    """

    name: str
    slots: int
    ownership: Ownership

    def __init__(self) -> None:
        self._sizes: tuple[int, int] | None = None
        self._layers: dict[int, LayerHistory] = {}
        self._steps = 0
        self._moves: list[Move] = []

    def prepare(self, num_experts: int, num_ranks: int) -> None:
        """Says for how many experts and ranks to plan; the first loads do, too. From then on they stay the same.

        Raises:
            ValueError: if the policy cannot run with them, or was prepared for others.
        """
        sizes = (num_experts, num_ranks)
        if self._sizes == sizes:
            return
        if self._sizes is not None:
            raise ValueError(
                f"policy {self.name!r} plans for {self._sizes[0]} experts on {self._sizes[1]} ranks, but is given "
                f"{num_experts} on {num_ranks}: it remembers loads; make one policy for each"
            )
        home_ranks(num_experts, num_ranks)
        self._check(num_experts, num_ranks)
        self._sizes = sizes

    def placement(self, layer: int) -> Slots:
        """The expert in each slot of each rank, in force for ``layer``.

        Raises:
            ValueError: before :meth:`prepare` or the first loads.
        """
        return self._layer(layer).placement

    def moves(self) -> list[Move]:
        """What the last :meth:`step` changed, in ascending order of layer, target rank and slot."""
        return list(self._moves)

    def observe(self, lam_GE: Tensor, *, layer: int) -> None:
        """Remembers the loads of a planned training forward."""
        lam_GE = self._loads(lam_GE)
        history = self._layer(layer)
        self._remember(history, lam_GE)
        history.observed += 1

    def step(self) -> None:
        """Decides the placements of the next step."""
        self._steps += 1
        self._moves = []
        for layer in sorted(self._layers):
            history = self._layers[layer]
            new = self._decide(history)
            history.observed = 0
            if new is not None:
                if self.ownership == "placed":
                    self._moves += moves_between(layer, history.placement, new)
                history.placement = new

    def plan(self, lam_GE: Tensor, *, drop: float = 0.0, quota: Quota = "expert", layer: int = 0) -> Plan:
        """The plan by the placement in force. See :meth:`lrmoe.balance.policy.Policy.plan`."""
        lam_GE = self._loads(lam_GE)
        quota_E = planned_quotas(lam_GE, drop, quota)
        num_ranks, num_experts = lam_GE.shape
        slots_EG = slot_counts(self._layer(layer).placement, num_experts)
        rows_EG, route = self._route(lam_GE, slots_EG)
        first_E = home_ranks(num_experts, num_ranks) if self.ownership == "home" else None
        hosts = hosts_of(slots_EG, first_E)
        # Splitting the quotas of nothing dropped would give the rows, at some length.
        quota_EG = rows_EG if drop == 0 else split_quotas(quota_E, rows_EG, hosts)
        return Plan(hosts, rows_EG, quota_EG, lam_GE, route=route)

    def fingerprint(self) -> int:
        """A checksum of the steps and of each layer that is not as it began: equal where ranks decide alike, whatever
        layers one of them has only looked at."""
        layers = {
            layer: (history.placement, [loads.tolist() for loads in history.loads], history.observed)
            for layer, history in sorted(self._layers.items())
            if history.loads or self._sizes is None or history.placement != self._initial(*self._sizes)
        }
        return zlib.crc32(repr((self._steps, layers)).encode())

    def state_dict(self) -> dict[str, Any]:
        """Placements, loads and the number of steps, as JSON can hold it. Of one form at any time, as those need it
        that take states apart: ``layers`` is a list of (layer, placement, loads, observed)."""
        return {
            "sizes": None if self._sizes is None else list(self._sizes),
            "steps": self._steps,
            "layers": [
                [
                    layer,
                    [list(slots) for slots in history.placement],
                    [loads.tolist() for loads in history.loads],
                    history.observed,
                ]
                for layer, history in sorted(self._layers.items())
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave. Placements then are those of the state, and nothing has moved.

        Raises:
            ValueError: if it is no such state, or of another policy, number of slots, experts or ranks.
        """
        keys = ("sizes", "steps", "layers")
        if set(state) != set(keys):
            raise ValueError(
                f"the state of policy {self.name!r} has the entries {', '.join(keys)}, but {sorted(state)} is given: "
                "it belongs to another policy; resume with that one"
            )
        sizes = state["sizes"]
        if sizes is not None:
            if self._sizes is not None and tuple(sizes) != self._sizes:
                raise ValueError(
                    f"the state is of {sizes[0]} experts on {sizes[1]} ranks, policy {self.name!r} plans for "
                    f"{self._sizes[0]} on {self._sizes[1]}; resume with as many"
                )
            self._check(*sizes)
        layers = _restored(state["layers"])
        for layer, history in layers.items():
            expected = [len(slots) for slots in self._initial(*sizes)]
            found = [len(slots) for slots in history.placement]
            if found != expected:
                raise ValueError(
                    f"the state has {found} slots on the ranks in layer {layer}, policy {self.name!r} has {expected}; "
                    "resume with as many slots"
                )
            if {expert for slots in history.placement for expert in slots} != set(range(sizes[0])):
                raise ValueError(f"the state does not place every expert in layer {layer}: it is broken")
        self._sizes = self._sizes if sizes is None else (int(sizes[0]), int(sizes[1]))
        self._steps, self._layers, self._moves = int(state["steps"]), layers, []

    def _check(self, num_experts: int, num_ranks: int) -> None:
        """ValueError if the policy cannot run with these."""
        raise NotImplementedError

    def _initial(self, num_experts: int, num_ranks: int) -> Slots:
        """The placement before anything was observed."""
        raise NotImplementedError

    def _remember(self, history: LayerHistory, lam_GE: Tensor) -> None:
        """Puts the loads of one more microbatch into ``history.loads``; ``history.observed`` is not counted up yet."""
        raise NotImplementedError

    def _decide(self, history: LayerHistory) -> Slots | None:
        """The next placement, or None for the same."""
        raise NotImplementedError

    def _route(self, lam_GE: Tensor, slots_EG: Tensor) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """The rows (E, G) of each instance, and :attr:`Plan.route`."""
        return even_rows(lam_GE.sum(0), slots_EG), None

    def _loads(self, lam_GE: Tensor) -> Tensor:
        lam_GE = require_loads(lam_GE)
        self.prepare(lam_GE.shape[1], lam_GE.shape[0])
        return lam_GE

    def _layer(self, layer: int) -> LayerHistory:
        if layer not in self._layers:
            if self._sizes is None:
                raise ValueError(f"policy {self.name!r} does not know its sizes yet: call prepare(num_experts, ranks)")
            self._layers[layer] = LayerHistory(self._initial(*self._sizes))
        return self._layers[layer]


def require_slots(policy: str, slots: int, num_experts: int, num_ranks: int) -> None:
    """ValueError if the slots of all ranks are fewer than the experts, each of which needs one."""
    if slots * num_ranks < num_experts:
        raise ValueError(
            f"policy {policy!r} with slots={slots} on {num_ranks} ranks has {slots * num_ranks} slots for "
            f"{num_experts} experts, and every expert needs one: set slots to at least {-(-num_experts // num_ranks)}"
        )


def add_step_loads(history: LayerHistory, lam_GE: Tensor) -> None:
    """Keeps one vector (E,): the loads of all microbatches since the last step."""
    load_E = lam_GE.sum(0)
    history.loads = [load_E if history.observed == 0 else history.loads[0] + load_E]


def slot_counts(placement: Slots, num_experts: int) -> Tensor:
    """int64 (E, G): how many slots of each rank hold the expert."""
    num_ranks = len(placement)
    cells = [expert * num_ranks + rank for rank, slots in enumerate(placement) for expert in slots]
    counts = torch.bincount(torch.tensor(cells, dtype=torch.int64, device="cpu"), minlength=num_experts * num_ranks)
    return counts.view(num_experts, num_ranks)


def even_rows(load_E: Tensor, slots_EG: Tensor) -> Tensor:
    """int64 (E, G): the rows of each expert, the same share for each of its slots, merged on each rank.

    Slots in ascending rank order take rows up to the nearest whole number of their common share, so that a slot has the
    share rounded down or up, and a run of slots of the same rank is never more than half a row from its sum.
    """
    upto_EG = slots_EG.cumsum(1)
    total_E1 = upto_EG[:, -1:]
    ends_EG = (2 * load_E.unsqueeze(1) * upto_EG + total_E1) // (2 * total_E1)
    return ends_EG.diff(dim=1, prepend=torch.zeros(len(load_E), 1, dtype=torch.int64, device="cpu"))


def hosts_of(slots_EG: Tensor, first_E: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """The ranks that have a slot with the expert, ascending; behind ``first_E`` where given."""
    hosts: list[list[int]] = [[] for _ in range(len(slots_EG))] if first_E is None else [[rank] for rank in first_E]
    for expert, rank in slots_EG.nonzero().tolist():
        if first_E is None or rank != first_E[expert]:
            hosts[expert].append(rank)
    return tuple(map(tuple, hosts))


def moves_between(layer: int, old: Slots, new: Slots) -> list[Move]:
    """How to make ``new`` of ``old``: each changed slot reads from its own rank if it can, else from the lowest."""
    where: dict[int, dict[int, int]] = {}
    for rank, slots in enumerate(old):
        for slot, expert in enumerate(slots):
            where.setdefault(expert, {}).setdefault(rank, slot)
    moves = []
    for rank, (before, after) in enumerate(zip(old, new, strict=True)):
        for slot, (was, expert) in enumerate(zip(before, after, strict=True)):
            if was != expert:
                source = rank if rank in where[expert] else min(where[expert])
                moves.append(Move(layer, expert, source, where[expert][source], rank, slot))
    return moves


def _restored(layers: Any) -> dict[int, LayerHistory]:
    """The histories in a state; older states have them in dictionaries."""
    if isinstance(layers, Mapping):
        layers = [(layer, *(each[key] for key in ("placement", "loads", "observed"))) for layer, each in layers.items()]
    return {
        int(layer): LayerHistory(
            tuple(tuple(slots) for slots in placement),
            [torch.tensor(loads, dtype=torch.int64, device="cpu") for loads in many_loads],
            int(observed),
        )
        for layer, placement, many_loads, observed in layers
    }
