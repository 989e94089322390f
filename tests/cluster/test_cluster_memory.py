"""Memory of a rank on paper: published figures, what grows with what, and the operator's own peaks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.cluster import FP32, Memory, ModelShape, Precision, expert_state, memory, model, token_buffers

QWEN = model("qwen3-30b-a3b")
GIB, MIB = 2**30, 2**20


def test_base_placement_and_slot_of_one_qwen_layer_at_ep8() -> None:
    """16 experts of 3 x 2048 x 768 parameters on a rank, bf16 weights (2 bytes) and fp32 gradients (4 bytes): to the
    byte what is published, 0.42 GiB; a replica slot is a sixteenth of it."""
    parts = memory(QWEN, ranks=8, tokens=32768, layers=1, slots=2)
    base = parts["expert weights"] + parts["expert gradients"]
    assert base == 16 * 3 * 2048 * 768 * (2 + 4) == 452_984_832
    assert round(base / GIB, 4) == 0.4219
    assert parts["replica weights"] + parts["replica gradients"] == 2 * 27 * MIB
    assert expert_state(QWEN, experts=16) == base
    assert expert_state(QWEN) == 27 * MIB


def test_items_of_a_whole_model_by_hand() -> None:
    shape = ModelShape(name="m", dim=4, expert_dim=2, num_experts=6, top_k=2, moe_layers=3, vocab=10)
    precision = Precision(weight=2, gradient=4, optimizer=12, activation=2)
    parts = memory(shape, ranks=4, tokens=5, slots=1, optimizer_shards=2, precision=precision)
    # Two experts at home on the fullest rank, of 24 parameters each.
    assert parts["expert weights"] == 3 * 2 * 24 * 2
    assert parts["expert gradients"] == 3 * 2 * 24 * 4
    assert parts["expert optimizer"] == 3 * 2 * 24 * 12 / 2
    assert (parts["replica weights"], parts["replica gradients"]) == (24 * 2, 24 * 4)
    layered = memory(shape, ranks=4, tokens=5, slots=1, slots_per_layer=True, precision=precision)
    assert layered["replica weights"] == 3 * 24 * 2
    # Of each layer: x 10 x 4 x 2, h 10 x 4 x 2, the output 5 x 4 x 2, norms and weights 40 each, numbers 80, and 8
    # with the rows' order, 80.
    layer = 80 + 80 + 40 + 40 + 40 + 80 + 8 + 80
    assert parts["saved for backward"] == 3 * layer
    again = memory(shape, ranks=4, tokens=5, recompute=True, precision=precision)
    assert again["saved for backward"] == layer + 3 * 5 * 4 * 2
    assert parts.total == sum(item.bytes for item in parts.items) - min(
        parts["forward buffers"], parts["backward buffers"]
    )
    assert parts.to_dict()["total"] == parts.total
    with pytest.raises(KeyError, match="no item 'dense weights'"):
        parts["dense weights"]
    dense = memory(shape, ranks=4, tokens=5, dense=True, dense_shards=4, precision=precision)
    assert dense["dense weights"] == shape.dense_params * 2 / 4
    assert dense.total > parts.total


def test_case_62_expert_parallelism_removes_no_tokens() -> None:
    """The same global batch on the same eight ranks: whatever the experts are spread over, balanced ranks compute as
    many rows as their tokens have, and hold as much for them."""
    spread = [memory(QWEN, ranks=ranks, tokens=8192) for ranks in (2, 4, 8, 16, 128)]
    for name in ("saved for backward", "forward buffers"):
        assert len({parts[name] for parts in spread}) == 1
    for before, after in pairwise(spread):
        assert after["expert weights"] < before["expert weights"]
    # One device keeps each token once instead of each row, and no order of rows: of N = 8 T rows, what h, norms and
    # numbers take is the same.
    one = token_buffers(QWEN, tokens=8192, parallel=False)
    eight = token_buffers(QWEN, tokens=8192)
    D, T = QWEN.dim, 8192
    assert eight.saved_bytes - one.saved_bytes == 8 * T * D * 2 - T * D * 2 + 8 - (20 * 128 + 48)
    # Doubling the ranks at the same global batch halves a rank's tokens, and nothing else does.
    halved = memory(QWEN, ranks=8, tokens=4096)
    assert halved["forward buffers"] * 2 == spread[2]["forward buffers"]


def peak(run: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that lay there at once beyond those before, from the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = run()
    held = most = 0
    for event in trace.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most, result


@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_case_10_a_hot_experts_peaks_fit_the_plan(save: Any) -> None:
    """Nine pairs of ten go to one expert, and the backward keeps a quarter. What is planned is enough, and not much
    more; a drop makes the backward smaller, and leaves the forward as it is."""
    shape = ModelShape(name="m", dim=128, expert_dim=64, num_experts=16, top_k=2, moe_layers=1)
    tokens = 2048
    generator = torch.Generator().manual_seed(0)
    ids_TK = torch.stack([torch.zeros(tokens), torch.randint(1, 16, (tokens,), generator=generator)], 1).long()
    ids_TK[:, 1] = torch.where(torch.rand(tokens, generator=generator) < 0.8, ids_TK[:, 0], ids_TK[:, 1])
    assert (ids_TK == 0).float().mean() > 0.85
    x_TD = torch.randn(tokens, 128, generator=generator).requires_grad_()
    alpha_TK = torch.rand(tokens, 2, generator=generator).requires_grad_()
    gate_up = torch.randn(16, 128, 128, generator=generator).requires_grad_()
    down = torch.randn(16, 128, 64, generator=generator).requires_grad_()
    grad_TD = torch.randn(tokens, 128, generator=generator)
    forwards, backwards = [], []
    for drop in (0.0, 0.75):
        config = LRMoEConfig(drop=drop, save=save)
        found, out_TD = peak(lambda: lrmoe.routed_experts(x_TD, ids_TK, alpha_TK, gate_up, down, config=config))  # noqa: B023
        gradients, _ = peak(lambda: out_TD.backward(grad_TD, retain_graph=True))  # noqa: B023
        kept = round(tokens * 2 * (1 - drop))
        planned = token_buffers(
            shape,
            tokens=tokens,
            kept=kept,
            save=save,
            activation_bytes=4,
            parallel=False,
            elementwise="blocked",
            weight_gradients=4 * 16 * shape.expert_params,
        )
        # The input and the routing weights lay there before. What is saved of the output comes after the peak.
        new = planned.saved_bytes - 4 * x_TD.numel() - 4 * alpha_TK.numel()
        assert found <= planned.forward + new <= 1.3 * found
        assert gradients <= planned.backward <= 1.25 * gradients
        forwards.append(planned.forward + planned.saved_bytes)
        backwards.append(planned.backward)
        x_TD.grad = alpha_TK.grad = gate_up.grad = down.grad = None
    assert forwards[0] == forwards[1]
    assert backwards[1] < 0.6 * backwards[0]


def test_what_a_drop_saves_on_a_rank() -> None:
    kept = [memory(QWEN, ranks=8, tokens=8192, kept=int(8192 * 8 * share)) for share in (1, 0.8, 0.2)]
    assert len({parts["saved for backward"] for parts in kept}) == 1
    assert kept[0]["backward buffers"] > kept[1]["backward buffers"] > kept[2]["backward buffers"]
    less = memory(QWEN, ranks=8, tokens=8192, save="input")
    assert kept[0]["saved for backward"] - less["saved for backward"] == 48 * 8192 * 8 * 2 * 768 * 2


def test_rows_of_each_layer() -> None:
    def saved(rows: Any) -> Memory:
        return memory(QWEN, ranks=8, tokens=100, layers=3, rows=rows)

    each = saved([800, 1600, 400])
    assert 3 * saved([800] * 3)["saved for backward"] == 3 * saved(800)["saved for backward"]
    assert each["saved for backward"] == pytest.approx(
        sum(memory(QWEN, ranks=8, tokens=100, layers=1, rows=r)["saved for backward"] for r in (800, 1600, 400))
    )
    assert each["forward buffers"] == saved(1600)["forward buffers"]
    assert memory(QWEN, ranks=8, tokens=100, precision=FP32).total > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 129}, "ranks=129 is more than the 128 experts"),
        ({"ranks": 0}, "ranks=0 must be an integer >= 1"),
        ({"rows": 10, "kept": 11}, "kept=11 is more than rows=10"),
        ({"rows": [1, 2]}, "rows holds 2 numbers for 48 layers"),
        ({"optimizer_shards": 0}, "optimizer_shards=0 must be a number >= 1"),
        ({"save": "all"}, "save='all' is not known; choose one of preactivation, input"),
        ({"ranks": 1, "rows": 3}, r"rows=3 must be tokens \* top_k = 800 on one device"),
    ],
)
def test_wrong_numbers_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory(QWEN, **{"ranks": 8, "tokens": 100, **options})
