"""What each system sends for its replicas and moves, and what it holds on a rank, as its authors describe it.

W, Gr and O are the bytes of one expert's weights, gradients and optimizer state, m the experts at home on a rank,
E experts, G ranks, L layers. This prices the *systems*; what LRMoE's own engine sends under a policy is counted by
:meth:`lrmoe.parallel.ExpertParallel.metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lrmoe.balance import Plan, Policy
from lrmoe.balance.ownership import Move
from lrmoe.studies.costs import Transfer, all_reduce, broadcast, from_home, moves, reduce, regular, relayed, to_home
from lrmoe.studies.expert import Expert


@dataclass(kw_only=True)
class Peaks:
    """The most that was held at any time of a run.

    Args:
        replicas: of a rank in one microbatch, over all layers together.
        layer_replicas: of a rank in one layer and microbatch.
        incoming: experts that a rank gets from others in one layer at one step.
    """

    replicas: int = 0
    layer_replicas: int = 0
    incoming: int = 0


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on the fullest rank."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Experts, ranks, layers and how large an expert is."""

    experts: int
    ranks: int
    layers: int
    expert: Expert = field(default_factory=Expert)

    @property
    def home(self) -> int:
        """m, experts at home on the fullest rank."""
        return -(-self.experts // self.ranks)

    def held(self, *, weights: float = 0, gradients: float = 0, optimizer: float = 0) -> Held:
        """So many experts' weights, gradients and states, on top of those at home in every layer."""
        own, expert = self.layers * self.home, self.expert
        return Held(
            weights=(own + weights) * expert.weights,
            gradients=(own + gradients) * expert.gradients,
            optimizer=(own + optimizer) * expert.optimizer,
        )


class System:
    """Fixed ownership: nothing but rows travels, and a rank holds its own experts."""

    describes = "nothing but rows travels"

    def __init__(self, sizes: Sizes, policy: Policy) -> None:
        self.sizes = sizes
        self.slots = policy.slots

    def forward(self, plan: Plan) -> list[Transfer]:
        """Before the experts of a layer run."""
        return []

    def backward(self, plan: Plan) -> list[Transfer]:
        """Before and after their backward."""
        return []

    def step(self, plans: Mapping[int, Plan], moved: list[Move]) -> list[Transfer]:
        """Around an optimizer step.

        Args:
            plans: one of each layer that ran in the step.
            moved: what the policy then moves.
        """
        return []

    def memory(self, peaks: Peaks) -> Held:
        """What the fullest rank holds."""
        return self.sizes.held()


class SharedSlots(System):
    """LRMoE, and with relays UltraEP: replicas for the length of a layer, in slots that all layers share."""

    describes = "a replica and microbatch: W before the forward, W again before the backward, Gr home; slots are shared"

    def forward(self, plan: Plan) -> list[Transfer]:
        return [from_home(plan.hosts, self.sizes.ranks, self.sizes.expert.weights, "weights")]

    def backward(self, plan: Plan) -> list[Transfer]:
        gradients = to_home(plan.hosts, self.sizes.ranks, self.sizes.expert.gradients, "gradients")
        return [*self.forward(plan), gradients]

    def memory(self, peaks: Peaks) -> Held:
        return self.sizes.held(weights=self.slots, gradients=self.slots)


class UltraEP(SharedSlots):
    """Weights of many copies go by relays on more than 8 ranks."""

    describes = f"{SharedSlots.describes}; many copies' W by relays on more than 8 ranks"

    def forward(self, plan: Plan) -> list[Transfer]:
        if self.sizes.ranks <= 8:
            return super().forward(plan)
        return [relayed(plan.hosts, self.sizes.ranks, self.sizes.expert.weights, "weights")]


class SYMI(System):
    """Slots in every layer; optimizer state in G parts."""

    describes = "a step and layer: Gr all-reduced over an expert's ranks and fetched by its G owners, W to every slot"

    def step(self, plans: Mapping[int, Plan], moved: list[Move]) -> list[Transfer]:
        ranks, expert = self.sizes.ranks, self.sizes.expert
        sent = []
        for plan in plans.values():
            fetched = regular(ranks, 0, "gradients")
            for hosts in plan.hosts:
                at = sorted(hosts)
                for owner in set(range(ranks)) - set(at):
                    fetched.sent_G[at[owner % len(at)]] += expert.gradients / ranks
                    fetched.received_G[owner] += expert.gradients / ranks
            sent += [
                all_reduce(plan.hosts, ranks, expert.gradients, "gradients"),
                fetched,
                regular(ranks, self.slots * expert.weights * (ranks - 1) / ranks, "weights"),
            ]
        return sent

    def memory(self, peaks: Peaks) -> Held:
        sizes, expert = self.sizes, self.sizes.expert
        return Held(
            weights=sizes.layers * self.slots * expert.weights,
            gradients=sizes.layers * self.slots * expert.gradients,
            optimizer=sizes.layers * sizes.experts * expert.optimizer / sizes.ranks,
        )


class LAER(System):
    """Everything in G parts; slots are filled around each layer."""

    describes = (
        "a layer and microbatch: W of every slot gathered in the forward and again in the backward, Gr sent back"
    )

    def forward(self, plan: Plan) -> list[Transfer]:
        return [regular(self.sizes.ranks, self._part * self.sizes.expert.weights, "weights")]

    def backward(self, plan: Plan) -> list[Transfer]:
        gradients = regular(self.sizes.ranks, self._part * self.sizes.expert.gradients, "gradients")
        return [*self.forward(plan), gradients]

    def memory(self, peaks: Peaks) -> Held:
        sizes, expert = self.sizes, self.sizes.expert
        owned = sizes.layers * sizes.experts / sizes.ranks
        # The next layer's weights are fetched while this one's are in use.
        return Held(
            weights=(owned + 2 * self.slots) * expert.weights,
            gradients=(owned + self.slots) * expert.gradients,
            optimizer=owned * expert.optimizer,
        )

    @property
    def _part(self) -> float:
        """Experts that come from other ranks, for all slots of a rank together."""
        return self.slots * (self.sizes.ranks - 1) / self.sizes.ranks


class FlexMoE(System):
    """Slots in every layer, with optimizer state."""

    describes = "a step and layer: Gr all-reduced over an expert's ranks; a slot that moves: W and O"

    def step(self, plans: Mapping[int, Plan], moved: list[Move]) -> list[Transfer]:
        ranks, size = self.sizes.ranks, self.sizes.expert.gradients
        return [all_reduce(plan.hosts, ranks, size, "gradients") for plan in plans.values()] + _moved(self.sizes, moved)

    def memory(self, peaks: Peaks) -> Held:
        sizes, expert = self.sizes, self.sizes.expert
        slots = sizes.layers * self.slots
        # Old and new state of the slots that move are there at once.
        return Held(
            weights=(slots + peaks.incoming) * expert.weights,
            gradients=slots * expert.gradients,
            optimizer=(slots + peaks.incoming) * expert.optimizer,
        )


class SmartMoE(System):
    """A permutation: an expert that moves takes everything along."""

    describes = "an expert that moves: W and O"

    def step(self, plans: Mapping[int, Plan], moved: list[Move]) -> list[Transfer]:
        return _moved(self.sizes, moved)

    def memory(self, peaks: Peaks) -> Held:
        return self.sizes.held(weights=peaks.incoming, optimizer=peaks.incoming)


class FasterMoE(System):
    """Shadows on all ranks, held from a layer's forward to its backward."""

    describes = "a shadow and microbatch: W broadcast to all ranks, Gr reduced home"

    def forward(self, plan: Plan) -> list[Transfer]:
        return [broadcast(plan.hosts, self.sizes.ranks, self.sizes.expert.weights, "weights")]

    def backward(self, plan: Plan) -> list[Transfer]:
        return [reduce(plan.hosts, self.sizes.ranks, self.sizes.expert.gradients, "gradients")]

    def memory(self, peaks: Peaks) -> Held:
        return self.sizes.held(weights=peaks.replicas, gradients=peaks.layer_replicas)


class EPLB(System):
    """Copies in every layer until the next placement, beside the experts at home."""

    describes = (
        "a copy and step: W, as the weights change (serving sends them for a new placement alone), and Gr home; copies "
        "are held in every layer"
    )

    def step(self, plans: Mapping[int, Plan], moved: list[Move]) -> list[Transfer]:
        ranks, expert = self.sizes.ranks, self.sizes.expert
        sent = []
        for plan in plans.values():
            sent.append(from_home(plan.hosts, ranks, expert.weights, "weights"))
            sent.append(to_home(plan.hosts, ranks, expert.gradients, "gradients"))
        return sent

    def memory(self, peaks: Peaks) -> Held:
        copies = self.sizes.layers * self.slots
        return self.sizes.held(weights=copies, gradients=copies)


SYSTEMS: dict[str, type[System]] = {
    "fixed": System,
    "ultraep": UltraEP,
    "lrmoe": SharedSlots,
    "symi": SYMI,
    "laer": LAER,
    "flexmoe": FlexMoE,
    "smartmoe": SmartMoE,
    "fastermoe": FasterMoE,
    "eplb": EPLB,
}
"""By the names that :func:`lrmoe.balance.get` knows, in the order of the table."""


def _moved(sizes: Sizes, moved: list[Move]) -> list[Transfer]:
    return [
        moves(moved, sizes.ranks, sizes.expert.weights, "weights"),
        moves(moved, sizes.ranks, sizes.expert.optimizer, "optimizer"),
    ]
