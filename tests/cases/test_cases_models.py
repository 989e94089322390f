"""Layers that are found or refused by name, experts that learn, weights that keep their names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases.fixtures import DIM, layer, standard
from tiny_transformers import ARCHITECTURES, build
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.experts import operator


class _ForeignMoE(nn.Module):
    """A mixture of experts of a layout nobody has told the library about."""

    def __init__(self) -> None:
        super().__init__()
        self.w_gate_and_up = nn.Parameter(torch.randn(4, 16, 8))
        self.w_out = nn.Parameter(torch.randn(4, 8, 8))


def test_case_33_a_model_in_which_nothing_is_found_is_refused() -> None:
    """A foreign layout, a dense model, a list of separate experts: an error that lists what there is, and nothing is
    changed. There is no pattern of names that could be mistyped."""
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    listed = nn.Module()
    listed.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    for model, mentioned in (
        (nn.Sequential(_ForeignMoE(), nn.LayerNorm(8)), ("_ForeignMoE", "LayerNorm")),
        (dense, ("LlamaForCausalLM", "LlamaMLP")),
        (listed, ("Lists of separate experts, which cannot be recalibrated: experts", "ModuleList")),
    ):
        hooks = len(model._forward_pre_hooks)
        with pytest.raises(ValueError, match="no MoE layer that LRMoE knows was found") as raised:
            lrmoe.attach(model)
        assert all(name in str(raised.value) for name in mentioned)
        assert len(model._forward_pre_hooks) == hooks


def test_case_33_what_was_attached_is_told_by_name() -> None:
    """Every layer that was found is listed, in model order, so that a missing one shows."""
    model = nn.ModuleDict({"first": layer(), "dense": nn.Linear(4, 4), "second": layer()})
    assert list(lrmoe.attach(model).layers) == ["first", "second"]


@pytest.mark.parametrize("wrong", [8, 100, -2, 2**40])
def test_case_33_expert_ids_out_of_range_raise(wrong: int) -> None:
    """In the forward, whatever the backend: never clipped, wrapped or ignored."""
    problem = standard()
    ids_TK = problem.ids_TK.clone()
    ids_TK[7, 1] = wrong
    for train in (True, False):
        with (
            torch.set_grad_enabled(train),
            pytest.raises(ValueError, match=f"holds id {wrong}, but there are 8 experts"),
        ):
            lrmoe.routed_experts(topk_ids_TK=ids_TK, **problem.leaves())


WAYS = ["plain", "compiled", "autocast", "checkpointed", "reentrant"]


@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("starving")
def test_case_34_every_expert_that_kept_a_pair_moves(way: str, save: Any) -> None:
    """One step moves exactly the experts with a kept pair, both projections, compiled or not, under autocast or not,
    checkpointed either way or not. ``lrmoe doctor`` does the same to a user's model (tests/test_doctor.py)."""
    moe = layer(LRMoEConfig(drop=0.95, quota="level", save=save))
    before = copy.deepcopy(moe.state_dict())
    x = torch.randn(40, DIM, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        if way == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return moe(x)
        if way in ("checkpointed", "reentrant"):
            return checkpoint(moe, x, use_reentrant=way == "reentrant")  # type: ignore[no-any-return]
        if way == "compiled":
            torch._dynamo.reset()
            return torch.compile(moe, fullgraph=True, backend="aot_eager")(x)  # type: ignore[no-any-return]
        return moe(x)

    with lrmoe.recording() as calls:
        forward(x).float().square().sum().backward()
    torch.optim.SGD(moe.parameters(), lr=1.0).step()
    kept_E = calls[0].quota_E > 0
    assert 0 < kept_E.sum() < 8
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        moved_E = (moe.state_dict()[name] != before[name]).flatten(1).any(1)
        assert torch.equal(moved_E, kept_E), name
    assert (moe.router.weight != before["router.weight"]).any()


def test_case_34_a_forward_only_kernel_does_not_pass_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: experts whose operator gives no gradient stay where they were."""
    moe = layer(LRMoEConfig(drop=0.5))
    original = operator.controlled_experts

    def forward_only(*args: Any, **options: Any) -> Tensor:
        return original(*(a.detach() if isinstance(a, Tensor) else a for a in args), **options)

    monkeypatch.setattr("lrmoe.layer.parts.controlled_experts", forward_only)
    before = moe.experts.down_proj.detach().clone()
    out = moe(torch.randn(40, DIM))
    assert not out.requires_grad
    assert torch.equal(moe.experts.down_proj, before)


def number_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Expert e is filled with e + 1, so that a lost or exchanged one shows."""
    numbered = {}
    for name, tensor in state.items():
        is_stacked = "experts." in name and tensor.dim() >= 2 and "shared" not in name
        shape = (-1,) + (1,) * (tensor.dim() - 1)
        numbered[name] = (
            (torch.arange(tensor.shape[0]) + 1.0).view(shape).expand(tensor.shape).clone() if is_stacked else tensor
        )
    return numbered


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_case_68_attaching_keeps_every_expert_under_its_name(architecture: str) -> None:
    """State dict of a Transformers model, before attach, attached, loaded, detached: the same keys and the same bits,
    expert by expert; a missing or an additional key raises."""
    model = build(architecture)
    numbered = number_experts(model.state_dict())
    assert any("experts." in name for name in numbered)
    recal = lrmoe.attach(model, LRMoEConfig())
    assert list(model.state_dict()) == list(numbered)
    model.load_state_dict(numbered)
    for state in (model.state_dict(), recal.detach() or model.state_dict()):
        assert list(state) == list(numbered)
        assert all(torch.equal(state[name], tensor) for name, tensor in numbered.items())
    stock = build(architecture)
    stock.load_state_dict(numbered)
    lrmoe.attach(model, LRMoEConfig())
    key = next(name for name in numbered if name.endswith("down_proj") and "experts" in name)
    with pytest.raises(RuntimeError, match=rf"Missing key.*{key}"):
        model.load_state_dict({name: tensor for name, tensor in numbered.items() if name != key})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*experts\.9\.down_proj"):
        model.load_state_dict({**numbered, "experts.9.down_proj": torch.zeros(1)})


def test_case_68_a_transformers_block_and_an_lrmoe_layer_share_their_experts_layout() -> None:
    """Experts go from a Transformers block to an lrmoe.MoE and back by load_state_dict alone, bit for bit, and both
    compute the same; one key too many or too few raises."""
    block = build("qwen3_moe").model.layers[0].mlp
    moe = layer(dim=32, expert_dim=24, num_experts=6)
    state = block.experts.state_dict()
    moe.experts.load_state_dict(state)
    assert moe.experts.state_dict().keys() == state.keys()
    with torch.no_grad():
        moe.router.weight.copy_(block.gate.weight)
    x = torch.randn(1, 20, 32)
    block.gate.norm_topk_prob = True
    assert torch.allclose(block(x), moe(x), rtol=1e-4, atol=1e-5)
    numbered = number_experts({f"experts.{name}": tensor for name, tensor in state.items()})
    numbered = {name.removeprefix("experts."): tensor for name, tensor in numbered.items()}
    moe.experts.load_state_dict(numbered)
    back = copy.deepcopy(block.experts)
    back.load_state_dict(moe.experts.state_dict())
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, numbered[name])
        assert [float(expert.min()) for expert in tensor] == [float(expert.max()) for expert in tensor]
        assert [float(expert.max()) for expert in tensor] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    with pytest.raises(RuntimeError, match=r"Missing key.*down_proj"):
        moe.experts.load_state_dict({"gate_up_proj": numbered["gate_up_proj"]})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*up_proj_bias"):
        moe.experts.load_state_dict({**numbered, "up_proj_bias": torch.zeros(1)})
