"""Bytes on one rank, item by item, each with the formula it comes from.

T tokens of a microbatch on the rank, K choices, N = T K pairs, R rows that the rank's experts compute, M of them kept
for the backward, E experts, G ranks, L MoE layers, D model width, F expert width, P parameters of an expert;
w, g, o, a bytes of a weight, of its gradient, of its optimizer state and of a number of the activations.

Expert parallelism trades tokens, it removes none: of balanced loads R = N on every rank, whatever G is.

The forward computes every pair, so what a drop makes smaller is the backward's buffers alone: x and, with
save="preactivation", the up projection of every row lie there until the gradient arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lrmoe.cluster.model import ModelShape
from lrmoe.config import RouterGrad, Save, require_count, require_number

When = Literal["always", "forward", "backward"]

SELECT_SCALARS = 160
"""Bytes of a pair while it is scored and selected: keys, ranks and sums, in 8 bytes each; an upper bound."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of one number. The defaults are bf16 with fp32 gradients, and for the optimizer an fp32 master copy and
    Adam's two moments."""

    weight: float = 2
    gradient: float = 4
    optimizer: float = 12
    activation: float = 2

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= require_number(name, value) < float("inf"):
                raise ValueError(f"{name}={value!r} must be a finite number of bytes >= 0")


BF16 = Precision()
FP32 = Precision(weight=4, gradient=4, optimizer=8, activation=4)


@dataclass(frozen=True, kw_only=True)
class Item:
    """``bytes`` on a rank by ``formula``; ``when`` they are there, buffers of one pass only while it runs."""

    name: str
    bytes: int
    formula: str
    when: When = "always"


@dataclass(frozen=True)
class Memory:
    """What a rank holds."""

    items: tuple[Item, ...]

    @property
    def total(self) -> int:
        """At the fullest moment: what is always there, and the buffers of the larger pass."""
        return self.of("always") + max(self.of("forward"), self.of("backward"))

    def of(self, when: When) -> int:
        """All items of one time."""
        return sum(item.bytes for item in self.items if item.when == when)

    def __getitem__(self, name: str) -> int:
        """Bytes of the item of this name; KeyError if there is none."""
        for item in self.items:
            if item.name == name:
                return item.bytes
        raise KeyError(f"no item {name!r}; there are {', '.join(item.name for item in self.items)}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the total."""
        return {"total": self.total, "items": [asdict(item) for item in self.items]}


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
    activation_bytes: float = 2,
    parallel: bool = True,
) -> TokenBuffers:
    """Buffers of one layer, from first principles.

    Args:
        model: D, F, K and E.
        tokens: T, on this rank.
        rows: R; None for N, as where ranks are balanced.
        kept: M; None for all of R.
        kept_sent: kept pairs among the rank's own N; None for the share M / R of them.
        save, router_grad: see :class:`lrmoe.LRMoEConfig`.
        activation_bytes: a.
        parallel: experts lie on several ranks; False for the operator of one device.

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
    for name, value, choices in (("save", save, Save), ("router_grad", router_grad, RouterGrad)):
        if value not in get_args(choices):
            raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(get_args(choices))}")
    a, s = activation_bytes, max(4, activation_bytes)
    dropping = R > M or sent < N
    saved = [
        _item("input rows", R * D * a, "R D a") if parallel else _item("input", T * D * a, "T D a"),
        _item("up projection", R * 2 * F * a if save == "preactivation" else 0, "R 2F a; 0 with save=input"),
        _item("output", T * D * a if router_grad == "sum_rule" else 0, "T D a for the sum rule"),
        _item("norms of phi", R * s, "4 R"),
        _item("routing weights", N * s, "4 N"),
        _item("pair numbers", N * 8, "8 N"),
    ]
    if parallel:
        # With the experts' outputs at home, the exact rule costs memory and no traffic.
        kept_out = router_grad == "exact" and dropping
        saved.append(_item("expert outputs", N * D * a if kept_out else 0, "N D a for the exact rule where any drop"))
        saved.append(_item("check", 8, "8"))
    else:
        saved.append(_item("loads and keys", 20 * model.num_experts + 48, "20 E + 48"))
    summed = T * D * (4 if a >= 4 else 8 + 2 * a)
    select = SELECT_SCALARS * (R + N if parallel else N) if dropping else 0
    recomputed = save == "input"
    if parallel:
        # x in the experts' order stays until their outputs are there, these are put back in order, and sent.
        through = R * (D + F + (max(2 * F, D) if recomputed else D)) * a
        forward = max(N * D * a, through, (2 * R + N) * D * a, N * D * a + summed)
        experts = M * (2 * D + 6 * F if recomputed else max(D + 4 * F, 2 * D + 2 * F)) * a
        # Sent, arrived, and put in order; on the way back one copy more, where replicas' rows join the others.
        backward = max((sent + 2 * M) * D * a, experts, (3 * M + sent) * D * a, sent * D * a + summed)
    else:
        forward = max(N * (D + (2 * F if recomputed else F)) * a, N * D * a + summed)
        backward = max(M * (2 * D + 6 * F if recomputed else D + 4 * F) * a, M * D * a + summed)
    return TokenBuffers(
        saved=tuple(saved), index=8 * R if parallel else 0, forward=_whole(forward), backward=_whole(backward) + select
    )


def expert_state(model: ModelShape, *, experts: float = 1, precision: Precision = BF16) -> int:
    """Bytes of so many experts' weights and gradients in one layer: experts P (w + g)."""
    return _whole(experts * model.expert_params * (precision.weight + precision.gradient))


def memory(
    model: ModelShape,
    *,
    ranks: int,
    tokens: int,
    rows: int | Sequence[int] | None = None,
    kept: int | Sequence[int] | None = None,
    save: Save = "preactivation",
    router_grad: RouterGrad = "sum_rule",
    precision: Precision = BF16,
    home: int | None = None,
    slots: int = 0,
    slots_per_layer: bool = False,
    optimizer_shards: float = 1,
    layers: int | None = None,
    recompute: bool = False,
    dense: bool = False,
    dense_shards: float = 1,
) -> Memory:
    """What the fullest rank holds of the routed experts of a model, and on request of the rest.

    Args:
        ranks: G, over which the experts lie; 1 for one device.
        tokens: T, of one microbatch on this rank.
        rows, kept: R and M of this rank, one number for all layers or one a layer; None for balanced loads, and for
            nothing dropped.
        save, router_grad, precision: what is kept, and in how many bytes.
        home: experts that the rank owns in each layer; None for ceil(E / G).
        slots: replicas.
        slots_per_layer: every layer has slots of its own; otherwise all share them.
        optimizer_shards: parts that the experts' optimizer state is cut in, e.g. over data-parallel ranks.
        layers: MoE layers on this rank; None for all.
        recompute: a layer's forward runs again before its backward, and only its input is kept until then.
        dense: count everything else, too: embeddings, attention, dense layers, shared experts, and their activations.
        dense_shards: parts that the rest's weights, gradients and optimizer state are cut in.

    Raises:
        ValueError: naming the argument, its value and what it may be.
    """
    ranks = require_count("ranks", ranks, least=1)
    if ranks > model.num_experts:
        raise ValueError(
            f"ranks={ranks} is more than the {model.num_experts} experts of {model.name}: every rank owns one; use "
            "fewer ranks for the experts"
        )
    L = model.moe_layers if layers is None else require_count("layers", layers, least=1)
    m = -(-model.num_experts // ranks) if home is None else require_count("home", home)
    slots = require_count("slots", slots)
    for name, value in (("optimizer_shards", optimizer_shards), ("dense_shards", dense_shards)):
        if not 1 <= require_number(name, value) < float("inf"):
            raise ValueError(f"{name}={value!r} must be a number >= 1: 1 for a state that is not cut")
    per_layer = [
        token_buffers(
            model,
            tokens=tokens,
            rows=layer_rows,
            kept=layer_kept,
            save=save,
            router_grad=router_grad,
            activation_bytes=precision.activation,
            parallel=ranks > 1,
        )
        for layer_rows, layer_kept in zip(_each("rows", rows, L), _each("kept", kept, L), strict=True)
    ]
    P, a = model.expert_params, precision.activation
    copies, per = (slots * L, "L ") if slots_per_layer else (slots, "")
    inputs = L * tokens * model.dim * a if recompute else 0
    saved = [buffers.saved_bytes + buffers.index for buffers in per_layer]
    items = [
        _item("expert weights", L * m * P * precision.weight, "L m P w, m = ceil(E / G)"),
        _item("expert gradients", L * m * P * precision.gradient, "L m P g"),
        _item("expert optimizer", L * m * P * precision.optimizer / optimizer_shards, "L m P o / shards"),
        _item("replica weights", copies * P * precision.weight, f"{per}slots P w"),
        _item("replica gradients", copies * P * precision.gradient, f"{per}slots P g"),
        _item(
            "saved for backward",
            inputs + (max(saved) if recompute else sum(saved)),
            "L T D a, and the layer with most" if recompute else "sum over layers of what each saves",
        ),
        _item("forward buffers", max(b.forward for b in per_layer), "see token_buffers", "forward"),
        _item("backward buffers", max(b.backward for b in per_layer), "see token_buffers", "backward"),
        _item(
            "weight gradients in flight",
            (m + slots) * P * precision.weight,
            "(m + slots) P w, of one layer, before they are added to those held",
            "backward",
        ),
    ]
    if dense:
        items += _dense_items(model, tokens, precision, dense_shards, recompute)
    return Memory(tuple(items))


def _dense_items(model: ModelShape, tokens: int, precision: Precision, shards: float, recompute: bool) -> list[Item]:
    """Everything but the routed experts. Attention that never holds the scores is assumed."""
    dense, a = model.dense_params, precision.activation
    heads, head_dim = model.num_heads, model.head_dim
    # Two norms' inputs and outputs; query, key, value and the heads' outputs; their fp32 log-sum-exps.
    attention = (4 * model.dim + 2 * (heads + model.num_kv_heads) * head_dim) * a + 4 * heads
    wide = model.dense_layers * model.dense_dim + model.moe_layers * model.shared_expert_dim
    each = model.layers * model.dim * a if recompute else model.layers * attention + 3 * wide * a
    router = 4 * model.moe_layers * model.num_experts
    logits = model.vocab * (a + 4)
    return [
        _item("dense weights", dense * precision.weight / shards, "dense parameters w / shards"),
        _item("dense gradients", dense * precision.gradient / shards, "dense parameters g / shards"),
        _item("dense optimizer", dense * precision.optimizer / shards, "dense parameters o / shards"),
        _item(
            "dense activations",
            tokens * (each + (0 if recompute else router)),
            "T times layers D a"
            if recompute
            else "T times (layers ((4 D + 2 (heads + kv heads) head_dim) a + 4 heads) + 3 F a of dense layers and "
            "shared experts + 4 E a MoE layer)",
        ),
        _item("logits", tokens * logits, "T vocab (a + 4)"),
    ]


def _each(name: str, value: int | Sequence[int] | None, layers: int) -> list[int | None]:
    if value is None or not isinstance(value, Sequence):
        return [value] * layers
    if len(value) != layers:
        raise ValueError(f"{name} holds {len(value)} numbers for {layers} layers; give one, or one a layer")
    return list(value)


def _item(name: str, amount: float, formula: str, when: When = "always") -> Item:
    return Item(name=name, bytes=_whole(amount), formula=formula, when=when)


def _whole(amount: float) -> int:
    """Bytes; products of whole numbers stay exact, however large."""
    return amount if isinstance(amount, int) else int(-(-amount // 1))
