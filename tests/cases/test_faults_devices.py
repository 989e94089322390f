"""L5: another default device, or dtype, than the model's. The meta device stands for it: whatever is made there by
mistake has no numbers, and fails where it meets those of the CPU."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from experts.problem import make
from tiny_transformers import ARCHITECTURES, batch, build
from torch import Tensor, nn

import lrmoe
from lrmoe import LRMoEConfig

# What torch makes on the default device where nobody says which, and generators, which may have to fit it.
FACTORIES = {
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_permuted",
    "empty_quantized", "empty_strided", "eye", "full", "hamming_window", "hann_window", "kaiser_window",
    "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor",
    "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor",
    "sparse_csc_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "Generator",
}  # fmt: skip


def without_device(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each call ``torch.<factory>(...)`` that names no device."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FACTORIES
            and "device" not in {keyword.arg for keyword in node.keywords}
        ):
            yield node.lineno, ast.unparse(node)


def imported_factories(source: str) -> set[str]:
    """Factories under names of their own, which :func:`without_device` would not see."""
    return {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for alias in node.names
        if alias.name in FACTORIES
    }


def test_l5_the_reader_of_the_source_sees_a_call_without_a_device() -> None:
    source = 'torch.zeros(3)\ntorch.ones(2, device="cpu")\nx.new_zeros(3)\nf(torch.tensor([1], dtype=torch.int64))\n'
    assert [line for line, _ in without_device(source)] == [1, 4]
    assert imported_factories("from torch import Tensor, zeros") == {"zeros"}


def test_l5_every_tensor_that_is_made_says_where() -> None:
    package = Path(lrmoe.__file__).parent
    root = package.parents[1]
    studies = (path for path in (root / "paper").rglob("*.py") if "tests" not in path.parts)
    found = []
    for path in sorted([*package.rglob("*.py"), *studies]):
        source = path.read_text()
        found += [f"{path.relative_to(root)}:{line}: {text}" for line, text in without_device(source)]
        found += [f"{path.relative_to(root)}: from torch import {name}" for name in imported_factories(source)]
    assert not found, "these take whatever the default device is; name the device:\n" + "\n".join(found)


def elsewhere() -> torch.device:
    """``with elsewhere():`` the default device is another one."""
    return torch.device("meta")


def trained(
    model: nn.Module, run: Callable[[], Tensor], config: LRMoEConfig, default: AbstractContextManager[Any]
) -> dict[str, Any]:
    """Everything that comes of attaching and of twelve steps, which is more than a window of the guard."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with default:
        recal = lrmoe.attach(model, config)
        for _ in range(12):
            optimizer.zero_grad()
            loss = run()
            loss.backward()
            optimizer.step()
            recal.step()
        metrics = recal.metrics()
        state = recal.state_dict()
        recal.load_state_dict(state)
        recal.detach()
    found = {name: metrics[name] for name in ("kept_share", "variance_share", "load_max_over_mean", "guarded_layers")}
    return {**found, "loss": float(loss.detach()), "state": state, "weights": [p.detach() for p in model.parameters()]}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in wanted:
        if name == "weights":
            assert all(torch.equal(a, b) for a, b in zip(found[name], wanted[name], strict=True))
        else:
            assert found[name] == wanted[name], name


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "level": {"quota": "level", "selector": "auto", "save": "input"},
    "mean": {"remainder": "mean", "router_grad": "sum_rule", "warmup_steps": 2, "ramp_steps": 2},
    "guarded": {"guard_variance": 1e-9},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_l5_own_layers(name: str) -> None:
    config = LRMoEConfig(drop=0.4, **OPTIONS[name])

    def once(default: AbstractContextManager[Any]) -> dict[str, Any]:
        torch.manual_seed(0)
        options: dict[str, Any] = {"balance_loss_weight": 0.01, "z_loss_weight": 0.01, "selection_bias": True}
        layer = lrmoe.MoE(dim=8, expert_dim=6, num_experts=4, top_k=2, bias=True, shared_expert_dim=4, **options)
        x_TD = torch.randn(24, 8)
        mask_T = torch.arange(24) < 20
        return trained(layer, lambda: layer(x_TD, mask_T).square().sum(), config, default)

    wanted = once(nullcontext())
    assert 0.5 < wanted["kept_share"] < 1.0 or wanted["guarded_layers"]
    assert_same(once(elsewhere()), wanted)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_l5_transformers_models_are_attached_to(architecture: str) -> None:
    """Their own forward makes tensors without a device, so that attaching and the experts alone run elsewhere."""
    model = build(architecture)
    data = batch()
    with elsewhere():
        recal = lrmoe.attach(model, LRMoEConfig(drop=0.4))
    loss = model(**data).loss
    with elsewhere():
        loss.backward()
        recal.step()
        assert recal.metrics()["kept_share"] < 1.0


def test_l5_transformers_experts() -> None:
    torch.manual_seed(0)
    hidden_TD, ids_TK = torch.randn(20, 32), torch.randint(0, 6, (20, 2))
    weights_TK = torch.rand(20, 2)

    def once(default: AbstractContextManager[Any]) -> dict[str, Any]:
        model = build("qwen3_moe")
        experts = model.model.layers[0].mlp.experts
        config = LRMoEConfig(drop=0.4)
        return trained(experts, lambda: experts(hidden_TD, ids_TK, weights_TK).square().sum(), config, default)

    assert_same(once(elsewhere()), once(nullcontext()))


def test_l5_the_operator_and_its_fakes() -> None:
    problem = make(bias=True, dtype=torch.float32)
    leaves = problem.leaves()

    def run() -> list[Tensor]:
        out_TD = lrmoe.routed_experts(topk_ids_TK=problem.ids_TK, config=LRMoEConfig(drop=0.4), **leaves)
        return [out_TD, *torch.autograd.grad(out_TD, list(leaves.values()), problem.grad_TD)]

    wanted = run()
    fresh = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    with elsewhere():
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode, elsewhere():
        fakes = {name: mode.from_tensor(leaf) for name, leaf in fresh.items()}
        fake_ids_TK, fake_grad_TD = mode.from_tensor(problem.ids_TK), mode.from_tensor(problem.grad_TD)
        out_TD = lrmoe.routed_experts(topk_ids_TK=fake_ids_TK, config=LRMoEConfig(drop=0.4), **fakes)
        grads = torch.autograd.grad(out_TD, list(fakes.values()), fake_grad_TD)
        assert {str(tensor.device) for tensor in (out_TD, *grads)} == {"cpu"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_l5_another_default_dtype(dtype: torch.dtype) -> None:
    """A sibling: what is compared with closed forms when attaching is in fp32, whatever the default is."""
    models = {name: build(name) for name in ("qwen3_moe", "gpt_oss")}
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for model in models.values():
            recal = lrmoe.attach(model, LRMoEConfig(drop=0.4))
            loss = model(**batch()).loss
            loss.backward()
            recal.step()
            assert recal.metrics()["kept_share"] < 1.0
            assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    finally:
        torch.set_default_dtype(default)
