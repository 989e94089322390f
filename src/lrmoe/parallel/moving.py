"""The end of a step under a policy that places experts: they move, with all that optimizers keep for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from lrmoe.balance.ownership import HistoryPolicy
from lrmoe.parallel.agreement import Agreement
from lrmoe.parallel.dispatcher import Exchange
from lrmoe.parallel.expert_parameters import count_slots
from lrmoe.parallel.registered_layers import RegisteredLayers
from lrmoe.parallel.stores.placed import counted_slots, move


class MovingExperts:
    """The experts of one engine, in the slots of this rank.

    Args:
        policy: says which expert each slot holds, and what moves.
        rank: of this process.
        registered: the parameters, a row a slot.
        agreement: of the engine, which tells the ranks' mistakes to all of them.
    """

    def __init__(self, policy: HistoryPolicy, rank: int, registered: RegisteredLayers, agreement: Agreement) -> None:
        self._policy = policy
        self._rank = rank
        self._registered = registered
        self._agreement = agreement

    def step(self, optimizers: Sequence[torch.optim.Optimizer], exchange: Exchange) -> None:
        """Lets the policy decide, and moves experts as it says. Communicates.

        Raises:
            ValueError: if something cannot move along; then nothing has moved, and the policy is where it was.
            RuntimeError: if that is so on another rank, or the ranks would move different things; likewise.
        """
        before = self._policy.state_dict()
        self._policy.step()
        moves = {layer: list(of_layer) for layer, of_layer in groupby(self._policy.moves(), key=lambda one: one.layer)}
        tensors: dict[int, list[Tensor]] = {}
        refusal: ValueError | None = None
        try:
            tensors = {layer: self._registered.movable(layer, optimizers, self._policy.name) for layer in moves}
        except ValueError as error:
            refusal = error
        # Of a row: ranks may have different numbers of slots.
        kinds = {layer: [(tuple(one.shape[1:]), one.dtype) for one in of_layer] for layer, of_layer in tensors.items()}
        try:
            # Even where nothing moves here: the others would wait for this rank, if its policy were another.
            self._agreement.agree_on_moves(
                exchange, (moves, kinds), self._registered.device, refused=refusal is not None
            )
            if refusal is not None:
                raise refusal
        except BaseException:
            self._policy.load_state_dict(before)
            raise
        for layer in moves:
            move(exchange, self._rank, moves[layer], tensors[layer])
            self.count_slots(layer)

    def count_slots(self, layer: int) -> None:
        """Says, of a registered layer, which of its slots a norm has to count under the placement in force."""
        for weight in self._registered.weights(layer):
            count_slots(weight, counted_slots(self._policy.placement(layer), self._rank))
