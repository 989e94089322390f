"""The gradient norm of a model whose experts lie on different ranks, against sums worked by hand and torch's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.tiny_run import TinyRun
from distributed.world import run_world
from torch import Tensor, nn

from lrmoe.parallel.collectives import all_reduce
from lrmoe.parallel.expert_parameters import is_expert, mark_experts
from lrmoe.parallel.gradients import clip_grad_norm_, total_norm

DENSE = [[3.0, 1.0], [2.0, 2.0]]  # squares: 18


def parameter(gradient: Any, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    gradient = torch.as_tensor(gradient, dtype=dtype)
    result = nn.Parameter(torch.zeros_like(gradient))
    result.grad = gradient.clone()
    return result


def case_15(group: dist.ProcessGroup, marked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Squared norms of the experts' gradients: 20 on rank 0, 100 on rank 1."""
    expert = parameter([[2.0, 4.0]] if group.rank() == 0 else [[6.0, 8.0]])
    dense = parameter(DENSE)
    if marked:
        mark_experts(expert)
        assert is_expert(expert)
        assert not is_expert(dense)
    norm = clip_grad_norm_([dense, expert], 1.0, group=group, experts=None if marked else [expert])
    assert dense.grad is not None
    assert expert.grad is not None
    return norm, total_norm([dense, expert], experts=[expert]), dense.grad, expert.grad


@pytest.mark.parametrize("marked", [True, False])
def test_case_15_every_expert_counts_once(marked: bool) -> None:
    first, second = run_world(2, case_15, marked)
    expected = math.sqrt(20 + 100 + 18)
    for norm, after, dense, _ in (first, second):
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(expected, rel=1e-6)
        assert after.item() == pytest.approx(1.0, rel=1e-5)
        torch.testing.assert_close(dense, torch.tensor(DENSE) / expected)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])
    torch.testing.assert_close(first[3], torch.tensor([[2.0, 4.0]]) / expected)
    torch.testing.assert_close(second[3], torch.tensor([[6.0, 8.0]]) / expected)


class Model(nn.Module):
    """A dense parameter, experts of uneven ranges, and one parameter that nobody trains."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        gradients = [torch.randn(5, 3, generator=generator), torch.randn(7, 4, 2, generator=generator)]
        self.dense = parameter(gradients[0])
        self.experts = parameter(gradients[1][first:last])
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        mark_experts(self.experts)


def norm_of_model(group: dist.ProcessGroup, bounds: Sequence[int], max_norm: float) -> tuple[Tensor, Tensor, Tensor]:
    model = Model(*bounds[group.rank() : group.rank() + 2])
    norm = clip_grad_norm_(model, max_norm, group=group)
    assert model.dense.grad is not None
    assert model.experts.grad is not None
    return norm, model.dense.grad, model.experts.grad


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("bounds", [(0, 7), (0, 4, 7), (0, 2, 4, 6, 7)])
def test_clipping_is_what_torch_does_in_one_process(bounds: tuple[int, ...], max_norm: float) -> None:
    whole = Model(0, 7)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
    assert whole.dense.grad is not None
    assert whole.experts.grad is not None
    results = run_world(len(bounds) - 1, norm_of_model, bounds, max_norm)
    for norm, dense, _ in results:
        torch.testing.assert_close(norm, expected)
        assert torch.equal(norm, results[0][0])
        torch.testing.assert_close(dense, whole.dense.grad)
        assert torch.equal(dense, results[0][1])
    torch.testing.assert_close(torch.cat([experts for *_, experts in results]), whole.experts.grad)


def test_without_torch_distributed_it_is_torchs_norm() -> None:
    model, twin = Model(0, 7), Model(0, 7)
    torch.testing.assert_close(clip_grad_norm_(model, 0.5), nn.utils.clip_grad_norm_(twin.parameters(), 0.5))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert total_norm([]).item() == 0.0
    assert total_norm(parameter([3.0, 4.0], torch.float64)).dtype == torch.float64
    # Squares beyond fp32's range, and low-precision gradients, summed in fp32.
    assert total_norm([parameter([1e30]), parameter([1e30])]).item() == pytest.approx(math.sqrt(2) * 1e30)
    assert total_norm(parameter(torch.full((70000,), 0.01), torch.bfloat16)).item() == pytest.approx(
        torch.tensor(0.01).bfloat16().item() * math.sqrt(70000), rel=1e-5
    )


def special(group: dist.ProcessGroup) -> dict[str, Any]:
    rank = group.rank()
    found: dict[str, Any] = {}
    # Only rank 1 has a gradient: the other enters the collectives all the same.
    expert = nn.Parameter(torch.zeros(1, 2)) if rank == 0 else parameter([[3.0, 4.0]])
    found["one sided"] = total_norm([expert], experts=[expert], group=group).item()
    for name, value in (("inf", math.inf), ("nan", math.nan)):
        expert = parameter([1.0, value if rank == 1 else 1.0])
        dense = parameter([2.0])
        mark_experts(expert)
        with pytest.raises(RuntimeError, match=f"norm of the gradients is {name}"):
            clip_grad_norm_([expert, dense], 1.0, group=group, error_if_nonfinite=True)
        assert dense.grad is not None
        assert dense.grad.item() == 2.0
        clip_grad_norm_([expert, dense], 1.0, group=group)
        found[name] = dense.grad.item()
    with pytest.raises(ValueError, match=r"differ between the ranks \(norms 1, 2 on ranks \[0, 1\]\)"):
        total_norm([parameter([1.0 + rank])], group=group)
    with pytest.raises(ValueError, match="1 of the tensors in experts"):
        total_norm([dense], experts=[expert], group=group)
    mark_experts(expert, group=dist.new_group([rank], use_local_synchronization=True))
    with pytest.raises(ValueError, match=r"but group has the ranks \[0, 1\]"):
        total_norm([expert], group=group)
    # NaN in what the ranks share is no difference between them.
    found["shared nan"] = total_norm([parameter([math.nan])], group=group).item()
    return found


def test_missing_infinite_and_unequal_gradients() -> None:
    for found in run_world(2, special):
        assert found["one sided"] == 5.0
        # As torch.nn.utils.clip_grad_norm_: an infinite norm makes finite gradients zero, NaN makes all NaN.
        assert found["inf"] == 0.0
        assert math.isnan(found["nan"])
        assert math.isnan(found["shared nan"])


def fsdp(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Two expert-parallel groups [0, 1] and [2, 3]; experts sharded over [0, 2] and [1, 3], dense over all four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "ep"))
    world = init_device_mesh("cpu", (4,))
    ep = mesh.get_group("ep")
    weights = torch.arange(4 * 3 * 2, dtype=torch.float32).view(4, 3, 2) / 10
    dense, experts = nn.Linear(3, 5, bias=False), nn.Module()
    with torch.no_grad():
        dense.weight.copy_(torch.arange(15).view(5, 3) / 7)
    start = 2 * ep.rank()
    experts.weight = nn.Parameter(weights[start : start + 2].clone())
    experts.forward = lambda x: torch.einsum("td,edf->tf", x, experts.weight).square().sum()  # type: ignore[assignment]
    fully_shard(dense, mesh=world)
    fully_shard(experts, mesh=mesh["replica"])
    x = torch.ones(2, 3)
    dense(x).square().sum().backward()
    experts(x).backward()
    with pytest.raises(ValueError, match="mark the parameters that are experts"):
        total_norm([*dense.parameters(), *experts.parameters()], group=ep)
    mark_experts(experts.weight)
    norm = clip_grad_norm_([*dense.parameters(), *experts.parameters()], 1.0, group=ep)
    after = total_norm([*dense.parameters(), *experts.parameters()], group=ep)
    # The same from whole tensors.
    square = torch.zeros(())
    for p in (dense.weight, experts.weight):
        assert p.grad is not None
        part = p.grad.full_tensor().square().sum()  # type: ignore[attr-defined]
        square += all_reduce(part, ep, what="check") if p is experts.weight else part
    return {"norm": norm, "after": after, "recomputed": square.sqrt()}


def test_gradients_sharded_by_fsdp() -> None:
    results = run_world(4, fsdp)
    for found in results:
        assert torch.equal(found["norm"], results[0]["norm"])
        assert found["norm"] > 1
        assert found["after"].item() == pytest.approx(1.0, rel=1e-5)
        torch.testing.assert_close(found["recomputed"], found["after"])


def on_mesh(group: dist.ProcessGroup) -> list[float]:
    """One DTensor over all experts, as Transformers keeps them, marked or not, and one that is copied."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    norms = []
    for placement in (Shard(0), Replicate()):
        weight = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [placement]))
        weight.grad = distribute_tensor(torch.full((3, 2), 2.0), mesh, [placement])
        norms.append(total_norm([weight], group=group).item())
    mark_experts(sharded := nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])))
    sharded.grad = distribute_tensor(torch.full((3, 2), 2.0), mesh, [Shard(0)])
    return [*norms, total_norm([sharded], group=group).item()]


def test_a_dtensor_counts_by_its_own_mesh() -> None:
    for norms in run_world(2, on_mesh):
        assert norms == [pytest.approx(math.sqrt(24))] * 3


def with_policy(group: dist.ProcessGroup, policy: str) -> tuple[float, int, float, float]:
    run = TinyRun(group, policy=policy, drop=0.0)
    run.backward()
    norm = total_norm(run.model, group=group)
    square = torch.zeros((), dtype=torch.float64)
    for p in run.model.parameters():
        assert p.grad is not None
        part = p.grad.double().square().sum()
        square += all_reduce(part, group, what="check") if is_expert(p) else part
    return norm.item(), sum(p.numel() for p in run.model.parameters()), run.ep.metrics()["replicas"], square.item()


@pytest.mark.parametrize("size", [2, 4])
def test_case_15_replicas_change_neither_norm_nor_parameters(size: int) -> None:
    fixed, replicated = run_world(size, with_policy, "fixed"), run_world(size, with_policy, "ultraep")
    for (norm, count, replicas, square), (other, other_count, other_replicas, _) in zip(fixed, replicated, strict=True):
        assert replicas == 0
        assert other_replicas > 0
        assert count == other_count
        assert norm == pytest.approx(math.sqrt(square), rel=1e-6)
        assert other == pytest.approx(norm, rel=1e-5)
