"""Bytes from first principles against what the operators really keep, by autograd's own hooks."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from distributed.world import run_world
from torch import Tensor, nn

import lrmoe
import lrmoe.cluster
from lrmoe import LRMoEConfig
from lrmoe.balance.plan import Plan
from lrmoe.balance.ultraep import UltraEP
from lrmoe.cluster import ModelShape, token_buffers
from lrmoe.parallel import ExpertParallel
from lrmoe.training.memory import measure_saved_bytes

SHAPE = ModelShape(name="small", dim=48, expert_dim=32, num_experts=6, top_k=3, moe_layers=1)
SAVES: tuple[Literal["preactivation", "input"], ...] = ("preactivation", "input")
DTYPES = [torch.float32, torch.bfloat16]


def leaves(tokens: int, dtype: torch.dtype, seed: int, experts: int = SHAPE.num_experts) -> dict[str, Tensor]:
    """Half of the pairs go to expert 0 or 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    score_TE = torch.rand(tokens, SHAPE.num_experts, generator=generator)
    score_TE[:, :2] += 0.6
    return {
        "x_TD": normal(tokens, SHAPE.dim).requires_grad_(),
        "topk_ids_TK": score_TE.topk(SHAPE.top_k, dim=1).indices,
        "topk_weights_TK": torch.rand(tokens, SHAPE.top_k, generator=generator).requires_grad_(),
        "gate_up_proj": nn.Parameter(normal(experts, 2 * SHAPE.expert_dim, SHAPE.dim)),
        "down_proj": nn.Parameter(normal(experts, SHAPE.dim, SHAPE.expert_dim)),
    }


def saved_by(forward: Any, tensors: dict[str, Tensor]) -> int:
    weights = nn.ParameterList([tensors["gate_up_proj"], tensors["down_proj"]])
    with measure_saved_bytes(weights, []) as saved:
        out_TD = forward(**tensors)
    out_TD.float().sum().backward()
    return saved.model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("router_grad", ["sum_rule", "exact", "kept"])
def test_one_device_keeps_what_the_formulas_say(save: Any, dtype: torch.dtype, router_grad: Any) -> None:
    config = LRMoEConfig(drop=0.3, save=save, router_grad=router_grad)
    tensors = leaves(70, dtype, seed=1)
    found = saved_by(lambda **t: lrmoe.routed_experts(**t, config=config), tensors)
    expected = token_buffers(
        SHAPE, tokens=70, save=save, router_grad=router_grad, activation_bytes=dtype.itemsize, parallel=False
    ).saved_bytes
    # Not only within two per cent: every byte of the saved tensors has its formula.
    assert found == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_device_keeps_the_mean_operands_of_its_experts(dtype: torch.dtype) -> None:
    tensors, given = leaves(70, dtype, seed=1), {"tokens": 70, "activation_bytes": dtype.itemsize, "parallel": False}
    config = LRMoEConfig(drop=0.3, remainder="mean")
    found = saved_by(lambda **t: lrmoe.routed_experts(**t, config=config), tensors)
    plain, buffers = (token_buffers(SHAPE, remainder=kind, **given) for kind in ("none", "mean"))  # type: ignore[arg-type]
    assert found == buffers.saved_bytes == plain.saved_bytes + 4 * 6 * (48 + 3 * 32)


class Remembering(UltraEP):
    """Its own plans, the last one kept."""

    last: Plan

    def plan(self, *args: Any, **options: Any) -> Plan:
        self.last = super().plan(*args, **options)
        return self.last


def measure_rank(
    group: dist.ProcessGroup, save: Any, router_grad: Any, dtype: torch.dtype, remainder: Any = "none"
) -> tuple[int, int, int]:
    """(saved, by formula, rows) of this rank."""
    policy = Remembering(slots=1, floor=1)
    config = LRMoEConfig(drop=0.3, save=save, router_grad=router_grad, remainder=remainder)
    engine = ExpertParallel(group, num_experts=SHAPE.num_experts, policy=policy, config=config)
    tokens = 60 + 20 * group.rank()
    tensors = leaves(tokens, dtype, seed=group.rank(), experts=len(engine.local_experts))
    found = saved_by(engine.routed_experts, tensors)
    rows, kept = (int(table[:, group.rank()].sum()) for table in (policy.last.rows_EG, policy.last.quota_EG))
    buffers = token_buffers(
        SHAPE,
        tokens=tokens,
        rows=rows,
        kept=kept,
        save=save,
        router_grad=router_grad,
        remainder=remainder,
        instances=len(engine.local_experts) + len(policy.last.slots[group.rank()]),
        activation_bytes=dtype.itemsize,
    )
    assert policy.last.num_replicas
    return found, buffers.saved_bytes, rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("router_grad", ["sum_rule", "exact"])
def test_a_rank_with_replicas_keeps_what_the_formulas_say(save: Any, dtype: torch.dtype, router_grad: Any) -> None:
    ranks = run_world(2, measure_rank, save, router_grad, dtype)
    for found, expected, _ in ranks:
        assert found == expected
    assert ranks[0][0] != ranks[1][0]


def test_a_rank_keeps_the_mean_operands_of_its_instances() -> None:
    plain, found = (
        run_world(2, measure_rank, "input", "sum_rule", torch.bfloat16, remainder) for remainder in ("none", "mean")
    )
    assert all(measured == expected for measured, expected, _ in found)
    # Six experts and a replica, if not two.
    more = sum(with_means - without for (with_means, *_), (without, *_) in zip(found, plain, strict=True))
    assert more in (4 * 7 * (48 + 3 * 32), 4 * 8 * (48 + 3 * 32))


def test_a_pair_of_a_known_model_takes_what_its_parts_add_up_to() -> None:
    """Qwen3-30B-A3B in bf16: a row's input is 4096 bytes and its up projection 3072, with 4 bytes of norm; a pair of
    its token 4 and 8; a token's output 4096, which eight pairs share."""
    model = lrmoe.cluster.model("qwen3-30b-a3b")
    tokens = 32768
    full = token_buffers(model, tokens=tokens).saved_bytes
    assert (full - 8) / (tokens * 8) == 4096 + 3072 + 4 + 12 + 4096 / 8
    small = token_buffers(model, tokens=tokens, save="input").saved_bytes
    assert full - small == tokens * 8 * 3072
