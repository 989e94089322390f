"""FasterMoE: the worked examples with their latencies, and where shadowed rows go."""

from __future__ import annotations

import pytest
import torch
from balance.problem import loads

from lrmoe.balance.baselines.fastermoe import FasterMoE, shadows

K1 = torch.tensor([[4096, 512, 256, 128]] * 4)
K2 = torch.tensor([[750, 700, 650, 600]] * 4)


@pytest.mark.parametrize(
    ("lam_GE", "milliseconds", "chosen"),
    [(K1, [68.07, 22.84, 25.08], [0]), (K2, [12.46, 18.64], [])],
)
def test_k1_k2(lam_GE: torch.Tensor, milliseconds: list[float], chosen: list[int]) -> None:
    policy = FasterMoE(dim=1024, ratio=2, flops=11.5e12, bandwidth=6.25e9, bytes=4)
    found, latencies = shadows(lam_GE, policy.machine)
    assert found == chosen
    assert [round(1e3 * latency, 2) for latency in latencies] == milliseconds
    assert bool(policy.plan(lam_GE).num_replicas) == bool(chosen)


def test_the_rows_of_a_shadow_stay_on_their_source() -> None:
    plan = FasterMoE(ratio=2).plan(K1).validate(slots=1)
    assert plan.hosts == ((0, 1, 2, 3), (1,), (2,), (3,))
    assert torch.equal(plan.alloc[:, 0], 4096 * torch.eye(4, dtype=torch.int64))
    assert plan.rows_EG.sum(0).tolist() == [4096, 4096 + 2048, 4096 + 1024, 4096 + 512]
    assert FasterMoE(ratio=2).plan(K2).num_replicas == 0


def test_a_fast_network_shadows_nothing_and_a_slow_machine_everything_hot() -> None:
    skewed = loads([4000, 100, 100, 100, 100, 100, 100, 100])
    assert FasterMoE(dim=4096, flops=1e16, bandwidth=1e9).plan(skewed).num_replicas == 0
    plan = FasterMoE(dim=64, flops=1e9, bandwidth=1e12).plan(skewed).validate()
    assert plan.num_replicas >= 3
    assert plan.rows_EG.sum(0).max() < 0.5 * 4100


def test_sources_without_rows_hold_the_shadow_all_the_same() -> None:
    lam_GE = torch.tensor([[0, 0, 0], [9000, 0, 0], [0, 0, 0]])
    plan = FasterMoE(dim=64).plan(lam_GE).validate()
    assert plan.hosts[0] == (0, 1, 2)
    assert plan.rows_EG[0].tolist() == [0, 9000, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim=0 must be an integer >= 1"),
        ({"ratio": 0}, "ratio=0 must be positive and finite"),
        ({"flops": float("inf")}, "flops=inf must be positive"),
        ({"bandwidth": "fast"}, "bandwidth='fast' must be a number"),
        ({"bytes": 2.5}, "bytes=2.5 must be an integer"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FasterMoE(**options)  # type: ignore[arg-type]
