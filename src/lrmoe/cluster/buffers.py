"""Token buffers of one MoE layer and microbatch on one rank, byte for byte as the operators keep and make them.

T tokens of the microbatch on the rank, K choices, N = T K pairs, R rows that the rank's experts compute, M of them kept
for the backward, D model width, F expert width, a bytes of a number.

The forward computes every pair, so what a drop makes smaller is the backward's buffers alone: x and, with
save="preactivation", the up projection of every row lie there until the gradient arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lrmoe.cluster.model import ModelShape
from lrmoe.config import Remainder, RouterGrad, Save, require_count

When = Literal["always", "forward", "backward"]
Elementwise = Literal["plain", "blocked", "fused"]
"""How the activation between the projections runs: ``plain``, in fp32 on all rows at once, as this library does on a
GPU; ``blocked``, on rows that fit a cache, as it does on a CPU; ``fused``, in one kernel that needs no temporaries."""

SELECT_SCALARS = 224
"""Bytes of a pair while it is scored and selected: keys, ranks and sums, in 8 bytes each; an upper bound. As much is
counted for each expert."""

_BLOCK = 1 << 17  # Elements that ``blocked`` works on at a time.


@dataclass(frozen=True, kw_only=True)
class Item:
    """``bytes`` on a rank by ``formula``; ``when`` they are there, buffers of one pass only while it runs."""

    name: str
    bytes: int
    formula: str
    when: When = "always"


@dataclass(frozen=True, kw_only=True)
class TokenBuffers:
    """Of one MoE layer and microbatch on a rank.

    Attributes:
        saved: what the operator keeps from its forward to its backward, as autograd's hooks see it.
        index: the order of the rows, which it keeps beside that; 0 on one device.
        forward, backward: the most that either pass holds at once beyond what is saved, the gradients of weights left
            out.
    """

    saved: tuple[Item, ...]
    index: int
    forward: int
    backward: int

    @property
    def saved_bytes(self) -> int:
        """All that autograd's hooks see."""
        return sum(item.bytes for item in self.saved)


def token_buffers(
    model: ModelShape,
    *,
    tokens: int,
    rows: int | None = None,
    kept: int | None = None,
    kept_sent: int | None = None,
    save: Save = "preactivation",
    router_grad: RouterGrad = "sum_rule",
    remainder: Remainder = "none",
    instances: int | None = None,
    activation_bytes: float = 2,
    parallel: bool = True,
    elementwise: Elementwise = "plain",
    weight_gradients: float = 0,
) -> TokenBuffers:
    """Buffers of one layer, from first principles.

    Args:
        model: D, F, K and E.
        tokens: T, on this rank.
        rows: R; None for N, as where ranks are balanced.
        kept: M; None for all of R.
        kept_sent: kept pairs among the rank's own N; None for the share M / R of them.
        save, router_grad, remainder: see :class:`lrmoe.LRMoEConfig`.
        instances: S, of experts on the rank, replicas among them; None for all experts of one device.
        activation_bytes: a.
        parallel: experts lie on several ranks; False for the operator of one device.
        elementwise: see :data:`Elementwise`.
        weight_gradients: bytes of the layer's weight gradients as the backward makes them, counted in its peak.

    Raises:
        ValueError: if a number is out of range.
    """
    T, D, F = require_count("tokens", tokens), model.dim, model.expert_dim
    N = T * model.top_k
    R = N if rows is None else require_count("rows", rows)
    M = R if kept is None else require_count("kept", kept)
    if not parallel and R != N:
        raise ValueError(f"rows={R} must be tokens * top_k = {N} on one device: it computes its own pairs")
    if M > R:
        raise ValueError(f"kept={M} is more than rows={R}: the backward keeps some of the forward's rows")
    sent = (N * M // R if R else 0) if kept_sent is None else require_count("kept_sent", kept_sent)
    for name, value, choices in (
        ("save", save, Save),
        ("router_grad", router_grad, RouterGrad),
        ("remainder", remainder, Remainder),
        ("elementwise", elementwise, Elementwise),
    ):
        if value not in get_args(choices):
            raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(get_args(choices))}")
    a, s = activation_bytes, max(4, activation_bytes)
    dropping = R > M or sent < N
    saved = [
        item_of("input rows", R * D * a, "R D a") if parallel else item_of("input", T * D * a, "T D a"),
        item_of("up projection", R * 2 * F * a if save == "preactivation" else 0, "R 2F a; 0 with save=input"),
        item_of("output", T * D * a if router_grad == "sum_rule" else 0, "T D a for the sum rule"),
        item_of("norms of phi", R * s, "4 R"),
        item_of("routing weights", N * s, "4 N"),
        item_of("pair numbers", N * 8, "8 N"),
    ]
    if remainder == "mean":
        S = model.num_experts if instances is None else require_count("instances", instances)
        saved.append(item_of("mean operands", S * (D + 3 * F) * s, "4 S (D + 3F)"))
    if parallel:
        # With the experts' outputs at home, the exact rule costs memory and no traffic.
        kept_out = router_grad == "exact" and dropping
        saved.append(item_of("expert outputs", N * D * a if kept_out else 0, "N D a for the exact rule where any drop"))
        saved.append(item_of("check", 8, "8"))
    else:
        saved.append(item_of("loads and keys", 20 * model.num_experts + 48, "20 E + 48"))
    # One device scores and orders its pairs also where it keeps them all.
    scored = (R + N if dropping else 0) if parallel else N
    scored += model.num_experts
    stages = _Stages(
        T=T,
        D=D,
        F=F,
        N=N,
        R=R,
        M=M,
        sent=sent,
        a=a,
        recomputed=save == "input",
        elementwise=elementwise,
        router_grad=router_grad,
    )
    forward = stages.forward_over_ranks() if parallel else stages.forward()
    backward = (stages.backward_over_ranks if parallel else stages.backward)(weight_gradients)
    return TokenBuffers(
        saved=tuple(saved),
        index=8 * R if parallel else 0,
        forward=whole(forward),
        backward=whole(backward) + SELECT_SCALARS * scored,
    )


@dataclass(frozen=True, kw_only=True)
class _Stages:
    """What lies there at once in each stage of a pass, beyond what is saved; the peak is the largest of them."""

    T: int
    D: int
    F: int
    N: int
    R: int
    M: int
    sent: int
    a: float
    recomputed: bool
    elementwise: Elementwise
    router_grad: RouterGrad

    def forward(self) -> float:
        """Up projection; activation; down projection; combine. What is saved of the up projection is not counted."""
        D, F, a = self.D, self.F, self.a
        h = 2 * F if self.recomputed else 0
        activation = self.N * (h + F) * a + self._activation(self.N, backward=False)
        return max(self.N * (D + h) * a, activation, self.N * (F + D) * a, self.N * D * a + self._sum())

    def forward_over_ranks(self) -> float:
        """Dispatch; the experts, whose rows in their order stay until the outputs are there; outputs put in the order
        in which they are sent; combine."""
        D, F, R, N, a = self.D, self.F, self.R, self.N, self.a
        h = 2 * F if self.recomputed else 0
        activation = R * (D + h + F) * a + self._activation(R, backward=False)
        experts = max(R * (D + h) * a, activation, R * (2 * D + F) * a)
        return max(N * D * a, experts, (2 * R + N) * D * a, N * D * a + self._sum())

    def backward(self, gradients: float) -> float:
        """Down projection and activation; its weights' gradient; that of the up projection; that of the rows; combine.
        Of the weights' gradients a third is there first."""
        M, D, F, a = self.M, self.D, self.F, self.a
        activation = M * (2 * D + 6 * F if self.recomputed else D + 4 * F) * a + self._activation(M, backward=True)
        down = M * (D + 3 * F) * a + gradients / 3
        up = M * (D + 2 * F) * a + gradients
        router = (M * D + self.T * D) * a + self._router(self.N - M, over_ranks=False) + gradients
        return max(activation, down, up, M * D * a + self._sum() + gradients, router)

    def backward_over_ranks(self, gradients: float) -> float:
        """Gradients gathered, sent, arrived and put in order; the experts, meanwhile the arrived ones stay; rows'
        gradients, put behind each other where there are replicas, in order, and sent; combine."""
        M, D, F, a, sent = self.M, self.D, self.F, self.a, self.sent
        activation = M * (2 * D + 6 * F if self.recomputed else D + 4 * F) * a + self._activation(M, backward=True)
        down = M * (D + 3 * F) * a + gradients / 3
        up = M * (2 * D + 2 * F) * a + gradients
        back = (3 * M + sent) * D * a + gradients
        combine = sent * D * a + self._sum() + gradients
        router = (M + sent + self.T) * D * a + self._router(self.N - sent, over_ranks=True) + gradients
        return max((sent + 2 * M) * D * a, activation, down, up, back, combine, router)

    def _activation(self, rows: int, *, backward: bool) -> float:
        """Temporaries in fp32 or better: four numbers (of F) a row in the forward, where its input has that precision
        two; in the backward eight and a copy of the up projection, or five and the copy."""
        if self.elementwise == "fused":
            return 0
        whole = self.a >= 4
        wide = max(4, self.a)
        each = (5 if whole else 8) * wide + 2 * self.a if backward else (2 if whole else 4) * wide
        return each * (min(rows * self.F, _BLOCK) if self.elementwise == "blocked" else rows * self.F)

    def _router(self, dropped: int, *, over_ranks: bool) -> float:
        """The routing weights' gradient of dropped pairs: products of gradients and outputs in fp32 or better, of all
        tokens or of the dropped pairs; on one device the latter's gradients go through the down projection."""
        if not dropped or self.router_grad == "kept":
            return 0
        D, F, a, wide = self.D, self.F, self.a, max(4, self.a)
        if self.router_grad == "sum_rule":
            return self.T * D * wide * (1 if a >= 4 else 3)
        if over_ranks:
            return dropped * D * (2 * wide + a)
        return dropped * (D + F + (D + 2 * F if self.recomputed else 0)) * a + self._activation(dropped, backward=True)

    def _sum(self) -> float:
        """Tokens' sums over their pairs: in half precision added up in fp32, a choice at a time."""
        return self.T * self.D * (self.a if self.a >= 4 else 8 + self.a)


def item_of(name: str, amount: float, formula: str, when: When = "always") -> Item:
    return Item(name=name, bytes=whole(amount), formula=formula, when=when)


def whole(amount: float) -> int:
    """Bytes; products of whole numbers stay exact, however large."""
    return amount if isinstance(amount, int) else int(-(-amount // 1))
