"""Activation checkpointing: a recompute that routes otherwise, counts that must not double, memory that must go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from cases.fixtures import NoisyOnReplay, layer, standard
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.experts import compacted


def through(module: Any, x: Tensor, **options: Any) -> Tensor:
    out: Tensor = checkpoint(module, x, **options)
    return out


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("save", ["preactivation", "input"])
def test_case_04_a_recompute_that_routes_otherwise_raises(save: Any, attached: bool) -> None:
    """A gate that is noisy on its second call: the backward would pair one routing's gradients with another's
    activations, so it raises and says what to do. No shape differs, so torch's own check sees nothing."""
    moe = layer(LRMoEConfig(save=save))
    if attached:
        lrmoe.attach(moe, LRMoEConfig(save=save))
    moe.router = NoisyOnReplay(moe.router)  # type: ignore[assignment]
    x = torch.randn(64, 16, requires_grad=True)
    out = through(moe, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"recomputed another routing.*preserve_rng_state=True"):
        out.sum().backward()


def test_case_04_a_router_outside_the_checkpoint_is_the_cure() -> None:
    """The experts alone are recomputed, the routing is kept: allowed, and equal to no checkpoint bit for bit."""
    problem = standard()

    def experts(x: Tensor, alpha: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return lrmoe.routed_experts(x, problem.ids_TK, alpha, gate_up, down, config=LRMoEConfig(drop=0.5))

    results = []
    for way in (None, False, True):
        leaves = problem.leaves()
        arguments = list(leaves.values())
        out = experts(*arguments) if way is None else checkpoint(experts, *arguments, use_reentrant=way)
        out.backward(problem.grad_TD)
        results.append([leaf.grad for leaf in arguments])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_case_04_a_reentrant_checkpoint_trains_on_the_routing_of_its_recompute() -> None:
    """Reentrant checkpointing runs the first forward without autograd and keeps nothing of it, so there is nothing to
    compare with: the gradient is, consistently, that of the recomputed forward. Pinned, because the loss that was
    printed then belongs to another routing; torch's default keeps the generator's state, which avoids it."""
    moe = layer(LRMoEConfig(drop=0.0))
    clean = moe.router
    moe.router = noisy = NoisyOnReplay(clean)  # type: ignore[assignment]
    x = torch.randn(64, 16, requires_grad=True)
    out = through(moe, x, use_reentrant=True)
    out.sum().backward()
    assert noisy.calls == 2
    found = x.grad
    x.grad = None
    noisy.calls = 1  # The next call is noisy as the recompute was.
    again = moe(x)
    again.sum().backward()
    assert torch.equal(found, x.grad)
    assert not torch.equal(out, again)


class Jittered(nn.Module):
    """Multiplies what the router sees by noise from torch's generator, as Switch-style routers do."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None) -> Any:
        return self.router(x_TD * torch.empty_like(x_TD).uniform_(0.5, 1.5), mask_T)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_case_49_router_jitter_with_a_kept_generator_state_is_repeated(use_reentrant: bool) -> None:
    """Noise drawn from torch's generator is the same in the recompute where checkpointing restores its state."""
    results = []
    for checkpointed in (False, True):
        moe = layer()
        moe.router = Jittered(moe.router)  # type: ignore[assignment]
        torch.manual_seed(1)
        x = torch.randn(64, 16, requires_grad=True)
        out = through(moe, x, use_reentrant=use_reentrant) if checkpointed else moe(x)
        torch.rand(7)  # Something else draws before the backward.
        out.square().sum().backward()
        results.append([x.grad, *(p.grad for p in moe.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_case_49_router_jitter_without_it_raises() -> None:
    """With preserve_rng_state=False the noise is drawn anew; the non-reentrant kind is caught. The reentrant kind
    cannot be: see case 4."""
    moe = layer()
    moe.router = Jittered(moe.router)  # type: ignore[assignment]
    x = torch.randn(64, 16, requires_grad=True)
    out = through(moe, x, use_reentrant=False, preserve_rng_state=False)
    torch.rand(7)
    with pytest.raises(RuntimeError, match="recomputed another routing"):
        out.square().sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_case_17_recomputes_are_not_counted(use_reentrant: bool) -> None:
    """Loads, kept pairs, importance, number of backwards, microbatch and selection bias after two steps of two
    microbatches are the same with checkpointing as without."""
    results = []
    for checkpointed in (False, True):
        moe = layer(selection_bias=True, balance_loss_weight=0.01)
        model = nn.Sequential(moe)
        run = moe.forward

        def forward(x: Tensor, run: Any = run, checkpointed: bool = checkpointed) -> Tensor:
            return through(run, x, use_reentrant=use_reentrant) if checkpointed else run(x)

        moe.forward = forward  # type: ignore[method-assign]
        recal = lrmoe.attach(model, LRMoEConfig(drop=0.5))
        generator = torch.Generator().manual_seed(2)
        with lrmoe.recording() as calls:
            for _ in range(2):
                for _ in range(2):
                    x = torch.randn(64, 16, generator=generator).requires_grad_()
                    model(x).square().sum().backward()
                recal.step()
        read = recal.metrics()["layers"]["0"]
        assert read["backwards"] == len(calls) == 4
        assert [(c.step, c.microbatch) for c in calls] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert sum(read["load"]) == 4 * 64 * 2
        timeless = {k: v for k, v in read.items() if "seconds" not in k}
        kept = torch.stack([c.kept_TK for c in calls])
        results.append((timeless, kept, moe.router.selection_bias, [p.grad for p in moe.parameters()]))
    plain, replayed = results
    assert plain[0] == replayed[0]
    assert torch.equal(plain[1], replayed[1])
    assert torch.equal(plain[2], replayed[2])
    assert plain[2].abs().max() > 0
    assert all(torch.equal(a, b) for a, b in zip(plain[3], replayed[3], strict=True))


@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_case_32_checkpointing_frees_what_it_recomputes(
    save: Any, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """phi is gone as soon as the forward is done, and with checkpointing the pre-activations too: nothing large hangs
    on the autograd context, where checkpointing cannot see it."""
    kept: dict[str, list[Any]] = {"h": [], "phi": []}
    original = compacted.glu_forward

    def spy(h_N2F: Tensor, *args: Any, **options: Any) -> Any:
        phi_NF, phi_root_N = original(h_N2F, *args, **options)
        kept["h"].append(weakref.ref(h_N2F))
        kept["phi"].append(weakref.ref(phi_NF))
        return phi_NF, phi_root_N

    monkeypatch.setattr(compacted, "glu_forward", spy)
    moe = layer(LRMoEConfig(save=save))
    x = torch.randn(64, 16, requires_grad=True)
    out = through(moe, x, use_reentrant=False) if checkpointed else moe(x)
    gc.collect()
    alive = {name: [ref() is not None for ref in refs] for name, refs in kept.items()}
    assert alive == {"h": [save == "preactivation" and not checkpointed], "phi": [False]}
    out.sum().backward()
    assert len(kept["phi"]) == 1 + checkpointed
    del out
    gc.collect()
    assert not any(ref() is not None for refs in kept.values() for ref in refs)


def test_case_32_hooks_on_saved_tensors_see_everything_large() -> None:
    """Whoever moves saved tensors elsewhere (CPU offload) gets them all: after packing, none of them is alive, and the
    gradients from the unpacked copies are the same to the bit."""
    problem = standard()
    results = []
    packed: list[Any] = []
    for offload in (False, True):
        leaves = problem.leaves()

        def pack(tensor: Tensor) -> Any:
            packed.append((weakref.ref(tensor), tensor.numel()))
            return tensor.detach().clone().numpy()

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy)
        if offload:
            with hooks:
                out = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=LRMoEConfig(drop=0.5), **leaves)
            gc.collect()
            own = {id(leaf) for leaf in leaves.values()}
            large = [ref for ref, numel in packed if numel >= 64 * 16 and id(ref()) not in own]
            assert any(numel == 128 * 2 * 32 for _, numel in packed)
            assert all(ref() is None for ref in large)
        else:
            out = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=LRMoEConfig(drop=0.5), **leaves)
        out.backward(problem.grad_TD)
        results.append([leaf.grad for leaf in leaves.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
