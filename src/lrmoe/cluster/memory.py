"""Bytes on one rank, item by item, each with the formula it comes from.

T tokens of a microbatch on the rank, K choices, N = T K pairs, R rows that the rank's experts compute, M of them kept
for the backward, E experts, G ranks, L MoE layers, D model width, F expert width, P parameters of an expert;
w, g, o, a bytes of a weight, of its gradient, of its optimizer state and of a number of the activations.

Expert parallelism trades tokens, it removes none: of balanced loads R = N on every rank, whatever G is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lrmoe.cluster.buffers import Elementwise, Item, When, item_of, token_buffers, whole
from lrmoe.cluster.model import ModelShape
from lrmoe.config import Remainder, RouterGrad, Save, require_count, require_number


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


def expert_state(model: ModelShape, *, experts: float = 1, precision: Precision = BF16) -> int:
    """Bytes of so many experts' weights and gradients in one layer: experts P (w + g)."""
    return whole(experts * model.expert_params * (precision.weight + precision.gradient))


def memory(
    model: ModelShape,
    *,
    ranks: int,
    tokens: int,
    rows: int | Sequence[int] | None = None,
    kept: int | Sequence[int] | None = None,
    save: Save = "preactivation",
    router_grad: RouterGrad = "sum_rule",
    remainder: Remainder = "none",
    precision: Precision = BF16,
    home: int | None = None,
    slots: int = 0,
    slots_per_layer: bool = False,
    optimizer_shards: float = 1,
    layers: int | None = None,
    recompute: bool = False,
    elementwise: Elementwise = "plain",
    dense: bool = False,
    dense_shards: float = 1,
) -> Memory:
    """What the fullest rank holds of the routed experts of a model, and on request of the rest.

    Args:
        ranks: G, over which the experts lie; 1 for one device.
        tokens: T, of one microbatch on this rank.
        rows, kept: R and M of this rank, one number for all layers or one a layer; None for balanced loads, and for
            nothing dropped.
        save, router_grad, remainder, precision: what is kept, and in how many bytes.
        home: experts that the rank owns in each layer; None for ceil(E / G).
        slots: replicas.
        slots_per_layer: every layer has slots of its own; otherwise all share them.
        optimizer_shards: parts that the experts' optimizer state is cut in, e.g. over data-parallel ranks.
        layers: MoE layers on this rank; None for all.
        recompute: a layer's forward runs again before its backward, and only its input is kept until then.
        elementwise: see :data:`Elementwise`.
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
            remainder=remainder,
            instances=m + slots if ranks > 1 else None,
            activation_bytes=precision.activation,
            parallel=ranks > 1,
            elementwise=elementwise,
            weight_gradients=(m + slots) * model.expert_params * precision.weight,
        )
        for layer_rows, layer_kept in zip(_each("rows", rows, L), _each("kept", kept, L), strict=True)
    ]
    P, a = model.expert_params, precision.activation
    copies, per = (slots * L, "L ") if slots_per_layer else (slots, "")
    inputs = L * tokens * model.dim * a if recompute else 0
    saved = [buffers.saved_bytes + buffers.index for buffers in per_layer]
    items = [
        item_of("expert weights", L * m * P * precision.weight, "L m P w, m = ceil(E / G)"),
        item_of("expert gradients", L * m * P * precision.gradient, "L m P g"),
        item_of("expert optimizer", L * m * P * precision.optimizer / optimizer_shards, "L m P o / shards"),
        item_of("replica weights", copies * P * precision.weight, f"{per}slots P w"),
        item_of("replica gradients", copies * P * precision.gradient, f"{per}slots P g"),
        item_of(
            "saved for backward",
            inputs + (max(saved) if recompute else sum(saved)),
            "L T D a, and the layer with most" if recompute else "sum over layers of what each saves",
        ),
        item_of("forward buffers", max(b.forward for b in per_layer), "see token_buffers", "forward"),
        item_of(
            "backward buffers",
            max(b.backward for b in per_layer),
            "see token_buffers; among them the (m + slots) P w of one layer's new weight gradients",
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
        item_of("dense weights", dense * precision.weight / shards, "dense parameters w / shards"),
        item_of("dense gradients", dense * precision.gradient / shards, "dense parameters g / shards"),
        item_of("dense optimizer", dense * precision.optimizer / shards, "dense parameters o / shards"),
        item_of(
            "dense activations",
            tokens * (each + (0 if recompute else router)),
            "T times layers D a"
            if recompute
            else "T times (layers ((4 D + 2 (heads + kv heads) head_dim) a + 4 heads) + 3 F a of dense layers and "
            "shared experts + 4 E a MoE layer)",
        ),
        item_of("logits", tokens * logits, "T vocab (a + 4)"),
    ]


def _each(name: str, value: int | Sequence[int] | None, layers: int) -> list[int | None]:
    if value is None or not isinstance(value, Sequence):
        return [value] * layers
    if len(value) != layers:
        raise ValueError(f"{name} holds {len(value)} numbers for {layers} layers; give one, or one a layer")
    return list(value)
