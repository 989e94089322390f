"""Bytes that the rows of one layer take on the rank that computes them: two ways to count them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from lrmoe.cluster import Elementwise, ModelShape, TokenBuffers, token_buffers
from lrmoe.config import Remainder, RouterGrad, Save

Accounting = Literal["operator", "kept"]


class PairBytes(Protocol):
    """Bytes of a rank that has ``tokens`` tokens of its own and computes ``rows`` rows, ``kept`` of them backward.

    Both grow in proportion where all three do.
    """

    @property
    def describes(self) -> str:
        """What is counted, in a sentence for a reader."""

    def forward(self, tokens: int, rows: int) -> float:
        """At the most in the forward."""

    def backward(self, tokens: int, rows: int, kept: int) -> float:
        """At the most from the forward's end to the backward's."""


@dataclass(frozen=True, kw_only=True)
class OperatorBytes:
    """What LRMoE's operator holds, see :func:`lrmoe.cluster.token_buffers`: the forward's share for every row."""

    model: ModelShape
    save: Save = "preactivation"
    router_grad: RouterGrad = "sum_rule"
    remainder: Remainder = "none"
    elementwise: Elementwise = "plain"

    @property
    def describes(self) -> str:
        fused = " and fused activations" if self.elementwise == "fused" else ""
        return (
            f"What the operator holds with save={self.save}{fused}: what it saves lies there for every row until the "
            "gradient arrives; buffers of the backward for kept rows alone."
        )

    def forward(self, tokens: int, rows: int) -> float:
        buffers = self._buffers(tokens, rows, rows)
        return buffers.saved_bytes + buffers.index + buffers.forward

    def backward(self, tokens: int, rows: int, kept: int) -> float:
        buffers = self._buffers(tokens, rows, kept)
        return buffers.saved_bytes + buffers.index + buffers.backward

    def _buffers(self, tokens: int, rows: int, kept: int) -> TokenBuffers:
        return token_buffers(
            self.model,
            tokens=tokens,
            rows=rows,
            kept=kept,
            save=self.save,
            router_grad=self.router_grad,
            remainder=self.remainder,
            elementwise=self.elementwise,
        )


@dataclass(frozen=True, kw_only=True)
class KeptRowBytes:
    """Every number of an expert and its gradient, of kept rows alone: the forward's share is not counted for others.

    x and y of D numbers, the up projection of 2 F, phi of F, and a gradient of each: 2 (2 D + 3 F) numbers of 2 bytes.
    No operator whose forward computes every row can hold this little: a row's x has to lie somewhere until it is known
    whether the row is kept.
    """

    model: ModelShape

    @property
    def each(self) -> int:
        """Bytes of a kept row: 8 D + 12 F."""
        return 8 * self.model.dim + 12 * self.model.expert_dim

    @property
    def describes(self) -> str:
        return (
            f"{self.each:,} bytes a kept row (every activation of an expert and its gradient, two bytes a number), and "
            "nothing for rows that the backward leaves out."
        )

    def forward(self, tokens: int, rows: int) -> float:
        return 0.0

    def backward(self, tokens: int, rows: int, kept: int) -> float:
        return float(self.each * kept)


@dataclass(frozen=True, kw_only=True)
class Slopes:
    """Bytes near a rank with the mean rows of which the backward keeps three quarters, as a planner needs them.

    Args:
        own, own_forward: whatever the rows are.
        row, kept: of a row, and of one that is kept, in the backward.
        forward: of a row in the forward.
    """

    own: float
    row: float
    kept: float
    own_forward: float
    forward: float


def slopes(pair: PairBytes, tokens: int, rows: int) -> Slopes:
    """Taken from differences: the largest of several buffers counts, and which it is depends on the sizes."""
    rows = max(rows, 8)
    kept, step = 3 * rows // 4, max(rows // 1000, 1)
    here = pair.backward(tokens, rows, kept)
    of_kept = (pair.backward(tokens, rows, kept + step) - here) / step
    of_row = (pair.backward(tokens, rows + step, kept) - here) / step
    forward = pair.forward(tokens, rows)
    of_forward = (pair.forward(tokens, rows + step) - forward) / step
    return Slopes(
        own=here - of_row * rows - of_kept * kept,
        row=max(of_row, 0.0),
        kept=max(of_kept, 0.0),
        own_forward=forward - of_forward * rows,
        forward=of_forward,
    )


def accounting(
    which: Accounting, model: ModelShape, *, save: Save = "preactivation", elementwise: Elementwise = "plain"
) -> PairBytes:
    """By name."""
    if which == "kept":
        return KeptRowBytes(model=model)
    return OperatorBytes(model=model, save=save, elementwise=elementwise)
