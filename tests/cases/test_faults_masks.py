"""A padding mask speaks of the tokens of the call that brought it, in the layout it came in, and of no others; and each
forward owns its position. Every model here is compared with one whose experts are the loop, handed the right mask."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.experts.reference import reference_experts

EXACT = LRMoEConfig(drop=0.0)
VOCAB, DIM = 16, 8


def layer() -> lrmoe.MoE:
    return lrmoe.MoE(dim=DIM, expert_dim=6, num_experts=4, top_k=2, balance_loss_weight=0.1, dtype=torch.float64)


class Loop(nn.Module):
    """The layer's experts as a loop; masked tokens have no gradient through them and count in no auxiliary loss."""

    def __init__(self, moe: lrmoe.MoE) -> None:
        super().__init__()
        self.router, self.experts = moe.router, moe.experts
        self.aux_loss = torch.zeros(())

    def forward(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        x_TD = x.reshape(-1, DIM)
        mask_T = torch.ones(len(x_TD), dtype=torch.bool) if token_mask is None else token_mask.reshape(-1)
        routing = self.router(x_TD, mask_T)
        self.aux_loss = self.aux_loss + routing.aux_loss
        live_TK = mask_T[:, None].expand_as(routing.topk_ids_TK)
        out_TD = reference_experts(
            x_TD,
            routing.topk_ids_TK,
            routing.topk_weights_TK,
            self.experts.gate_up_proj,
            self.experts.down_proj,
            pair_weight_TK=live_TK.to(x.dtype),
            live_TK=live_TK,
            router_grad="kept",
        )
        return out_TD.reshape(x.shape)


class Block(nn.Module):
    """A mixing layer, so that positions depend on each other, and experts. ``told``: hands the experts their mask."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.moe: Any = layer()
        self.told = False
        self.use_reentrant: bool | None = None

    def forward(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        if self.use_reentrant is None:
            return self.run(x, token_mask)
        out: Tensor = checkpoint(self.run, x, token_mask, use_reentrant=self.use_reentrant)
        return out

    def run(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        x = self.mix(x + x.mean(dim=0, keepdim=True))
        return x + (self.moe(x, token_mask) if self.told else self.moe(x))


class Model(nn.Module):
    """Takes what a language model takes; batch first."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.run(self.embed(input_ids), None if attention_mask is None else attention_mask.bool())

    def run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


class Unmasked(Model):
    """Makes nothing of its mask."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)


class SequenceFirst(Model):
    def run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        turned = super().run(x.transpose(0, 1), None if mask is None else mask.t())
        return turned.transpose(0, 1)


class Packed(Model):
    """Several documents in a row, told apart by their positions."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Any = None) -> Tensor:
        return super().forward(input_ids, attention_mask)


class EncoderDecoder(nn.Module):
    """Encoder and decoder, each called with its own tokens and mask."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Model(1), Model(1)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        memory = self.encoder(input_ids, attention_mask)
        return self.decoder(decoder_input_ids, decoder_attention_mask) + memory.mean(dim=1, keepdim=True)


class OneForAll(nn.Module):
    """Encoder and decoder whose parts are handed features alone: whose the mask is cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, dtype=torch.float64)
        self.encoder, self.decoder = Block(), Block()

    def forward(self, source: Tensor, target: Tensor, attention_mask: Tensor) -> Tensor:
        memory = self.encoder(self.embed(source), None).mean(dim=1, keepdim=True)
        return self.decoder(self.embed(target) + memory, None)


class Towers(nn.Module):
    """Two passes through one tower in one call, the second without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Model(1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, others: Tensor) -> Tensor:
        return self.tower(input_ids, attention_mask) + self.tower(others)


def ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def mask(lengths: list[int], width: int, *, left: bool = False) -> Tensor:
    place = torch.arange(width)
    rows = [(place >= width - n) if left else (place < n) for n in lengths]
    return torch.stack(rows).long()


PADDED = mask([6, 2, 4], 6)
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "batch first": (Model, {"input_ids": ids(3, 6), "attention_mask": PADDED}),
    "left-padded": (Model, {"input_ids": ids(3, 6), "attention_mask": mask([6, 2, 4], 6, left=True)}),
    "sequence first": (SequenceFirst, {"input_ids": ids(3, 6), "attention_mask": PADDED}),
    "one sequence": (SequenceFirst, {"input_ids": ids(1, 6), "attention_mask": mask([4], 6)}),
    "packed": (
        Packed,
        {
            "input_ids": ids(1, 9),
            "attention_mask": mask([9], 9),
            "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]]),
        },
    ),
    # Equal lengths: by their number alone the encoder's mask would fit the decoder's rows.
    "encoder-decoder": (
        EncoderDecoder,
        {
            "input_ids": ids(3, 6),
            "attention_mask": PADDED,
            "decoder_input_ids": ids(3, 6, seed=2),
            "decoder_attention_mask": mask([3, 6, 1], 6),
        },
    ),
    "encoder-decoder, decoder without padding": (
        EncoderDecoder,
        {"input_ids": ids(3, 6), "attention_mask": PADDED, "decoder_input_ids": ids(3, 6, seed=2)},
    ),
    "nested": (Towers, {"input_ids": ids(3, 6), "attention_mask": PADDED, "others": ids(3, 6, seed=2)}),
}


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    total = loss(model)
    for part in model.modules():
        if isinstance(part, Loop):
            total = total + part.aux_loss
            part.aux_loss = torch.zeros(())
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def build(make: Callable[[], nn.Module], use_reentrant: bool | None = None) -> tuple[nn.Module, nn.Module]:
    """A model with attached layers, and its twin in loops that are told their masks."""
    torch.manual_seed(0)
    model = make()
    loops = copy.deepcopy(model)
    for block in loops.modules():
        if isinstance(block, Block):
            block.moe, block.told = Loop(block.moe), True
    for block in model.modules():
        if isinstance(block, Block):
            block.use_reentrant = use_reentrant
    return model, loops


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("name", MODELS)
def test_s2_gradients_without_a_drop_are_the_loops(name: str, use_reentrant: bool | None) -> None:
    make, data = MODELS[name]
    model, loops = build(make, use_reentrant)
    lrmoe.attach(model, EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradients(model, lambda m: m(**data).square().sum())
    assert_same(found, gradients(loops, lambda m: m(**data).square().sum()))


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("name", MODELS)
def test_s2_a_mask_of_nothing_but_real_tokens_changes_nothing(name: str, use_reentrant: bool | None) -> None:
    make, data = MODELS[name]
    full = {key: torch.ones_like(value) if "mask" in key else value for key, value in data.items()}
    without = {key: value for key, value in data.items() if "mask" not in key or name == "nested"}
    model, loops = build(make, use_reentrant)
    plain = copy.deepcopy(model)
    for each in (model, plain):
        lrmoe.attach(each, EXACT)
    found = gradients(model, lambda m: m(**full).square().sum())
    if name == "nested":
        without["attention_mask"] = full["attention_mask"]
    assert_same(found, gradients(plain, lambda m: m(**without).square().sum()))
    assert_same(found, gradients(loops, lambda m: m(**full).square().sum()))


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_s2_a_mask_ends_with_its_call(use_reentrant: bool | None) -> None:
    """One step calls the whole model with padding, then a part of it with other padding of the same shape, and a third
    time without any; then one backward."""
    model, loops = build(lambda: nn.ModuleDict({"inner": Model()}), use_reentrant)

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.model = inner

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.model(input_ids, attention_mask)

    outer, outer_loops = Outer(model["inner"]), Outer(loops["inner"])

    def loss(m: Any) -> Tensor:
        first = m(ids(3, 6), PADDED)
        second = m.model(ids(3, 6, seed=2), mask([1, 5, 6], 6, left=True))
        third = m.model(ids(3, 6, seed=3))
        return first.square().sum() + 2 * second.square().sum() + 3 * third.square().sum()

    lrmoe.attach(outer, EXACT)
    assert_same(gradients(outer, loss), gradients(outer_loops, loss))


def test_s2_a_stopped_call_leaves_no_mask_behind() -> None:
    """A forward that raises half way, or is stopped by another hook, has ended; the next call is counted as ever."""
    model, loops = build(Model)
    recal = lrmoe.attach(model, EXACT)
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids(3, 6), PADDED)
    handle.remove()
    handle = model.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
    with pytest.raises(ZeroDivisionError):
        model(ids(3, 6), PADDED)
    handle.remove()
    found = gradients(model, lambda m: m(ids(3, 6)).square().sum())
    assert_same(found, gradients(loops, lambda m: m(ids(3, 6)).square().sum()))
    assert recal.clock.microbatch == 1
    assert recal.clock.calls == []


@pytest.mark.parametrize(
    ("model", "data", "reason"),
    [
        (Model, {"input_ids": ids(4, 4), "attention_mask": mask([4, 2, 3, 1], 4)}, "batch and sequence look the same"),
        (OneForAll, {"source": ids(3, 6), "target": ids(3, 6), "attention_mask": PADDED}, "several streams of tokens"),
        (
            Unmasked,
            {"input_ids": ids(3, 6), "attention_mask": PADDED[:, 1:]},
            r"it is \(3, 5\), and the tokens are \(3, 6\)",
        ),
    ],
)
def test_s2_a_mask_nobody_can_place_is_left_alone_and_said_once(
    model: Callable[[], nn.Module], data: dict[str, Tensor], reason: str
) -> None:
    made, _ = build(model)
    lrmoe.attach(made, LRMoEConfig(drop=0.5))
    with (
        pytest.warns(UserWarning, match=f"does not use the attention_mask.*{reason}.*token_mask=") as said,
        lrmoe.recording() as calls,
    ):
        (made(**data) + made(**data)).square().sum().backward()
    assert len(said) == 1
    rows = next(iter(data.values())).numel()
    assert {int(call.load_E.sum()) for call in calls} == {2 * rows}


def test_s2_rows_that_come_flattened_are_told_to_bring_their_mask() -> None:
    class Flat(Model):
        def run(self, x: Tensor, mask: Tensor | None) -> Tensor:
            flat = x.reshape(-1, DIM)
            for block in self.blocks:
                flat = block(flat, mask)
            return flat.reshape(x.shape)

    model, _ = build(Flat)
    lrmoe.attach(model, EXACT)
    with pytest.warns(UserWarning, match=r"layer blocks\.0\.moe does not use.*flattened"):
        model(ids(3, 6), PADDED)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("how", ["summed", "last first"])
def test_s2_recomputes_have_the_mask_and_the_draws_of_their_forward(how: str, use_reentrant: bool) -> None:
    """Two forwards before their backwards, under checkpoints of the user's own: kept pairs and gradients are those
    without checkpoints, bit for bit."""
    results = []
    for checkpointed in (None, use_reentrant):
        model, _ = build(Model, checkpointed)
        lrmoe.attach(model, LRMoEConfig(drop=0.5))
        with lrmoe.recording() as calls:
            first = model(ids(3, 6), PADDED).square().sum()
            second = model(ids(3, 6, seed=2), mask([1, 5, 6], 6)).square().sum()
            if how == "summed":
                (first + second).backward()
            else:
                second.backward()
                first.backward()
        results.append(([(c.microbatch, c.layer, c.kept_TK) for c in calls], [p.grad for p in model.parameters()]))
    (plain, plain_grads), (replayed, grads) = results
    assert [(m, n) for m, n, _ in plain] == [(m, n) for m, n, _ in replayed]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(plain, replayed, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain_grads, grads, strict=True))


def test_s2_backwards_in_the_order_of_their_forwards() -> None:
    """The same where the first forward's backward comes first: only the kind that does not reenter can tell."""
    results = []
    for checkpointed in (None, False):
        model, _ = build(Model, checkpointed)
        lrmoe.attach(model, LRMoEConfig(drop=0.5))
        first = model(ids(3, 6), PADDED).square().sum()
        second = model(ids(3, 6, seed=2), mask([1, 5, 6], 6)).square().sum()
        first.backward()
        second.backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_s2_two_forwards_under_reentrant_checkpoints_without_masks_or_drop() -> None:
    """One backward of both: the loop's gradients."""
    model, loops = build(Model, True)
    lrmoe.attach(model, EXACT)

    def loss(m: nn.Module) -> Tensor:
        first, second = m(ids(3, 6)).square().sum(), m(ids(3, 6, seed=2)).square().sum()
        return first + second

    assert_same(gradients(model, loss), gradients(loops, loss))


@pytest.mark.parametrize("remainder", ["none", "mean"])
@pytest.mark.parametrize("own", [False, True])
def test_l1_compiled_and_checkpointed_with_two_forwards_before_one_backward(own: bool, remainder: Any) -> None:
    """The recompute of the first forward does not read what the second has moved; nothing is changed in place."""
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, _ = build(Model, False if compiled else None)
        lrmoe.attach(model, LRMoEConfig(drop=0.5, remainder=remainder))
        if compiled and own:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        called = torch.compile(model, backend="aot_eager") if compiled and not own else model
        with warnings.catch_warnings():
            # The first compilation of a region says what torch has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            first = called(ids(3, 6), PADDED).square().sum()
            second = called(ids(3, 6, seed=2), mask([1, 5, 6], 6)).square().sum()
            (first + second).backward()
        results.append([p.grad for p in model.parameters()])
    for plain, found in zip(*results, strict=True):
        assert torch.allclose(found, plain, rtol=1e-9, atol=1e-12)
