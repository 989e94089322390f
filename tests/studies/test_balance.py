"""What policies make of loads: the records, and from where on replicas pay."""

from __future__ import annotations

import pytest
import torch

from lrmoe.balance import get
from lrmoe.cluster import Hardware
from lrmoe.studies.balance import contenders, measure
from lrmoe.studies.expert import Expert
from lrmoe.studies.loads import skewed_loads
from lrmoe.studies.price import FASTER, TOKENS, Contender, Price, advice, break_even

M1 = torch.tensor([[100, 25, 25, 25, 12, 12, 25, 25], [100, 25, 25, 25, 13, 13, 25, 25]] * 2)


def by_policy(records: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    return {str(record["policy"]): record for record in records}


def test_records_of_the_worked_example() -> None:
    records = by_policy([measure(one, [M1]) for one in contenders(capacity=250, floor=1)])
    fixed = records["fixed"]
    assert (fixed["forward_home"], fixed["backward_home"], fixed["fits"]) == (2.0, 2.0, False)
    assert "rank 0 needs 500 rows, the capacity is 250" in str(fixed["reason"])
    assert fixed["replicas"] is None
    ultraep = records["ultraep"]
    assert (ultraep["forward"], ultraep["replicas"], ultraep["moved_rows"]) == (1.0, 3, 250)
    mine = records["lrmoe, 20%"]
    # Every expert drops alike: the kept rows are as uneven as all rows, 400 of 800 on rank 0.
    assert (mine["backward_home"], mine["backward"]) == (2.0, 1.25)
    assert (mine["replicas"], mine["moved_kept_rows"], mine["extra_dropped"]) == (1, 150, 0)
    assert mine["kept_rows"] == 800


def test_records_of_several_matrices_are_means_and_sums() -> None:
    even = torch.full((4, 8), 25)
    record = measure(Contender(label="u", policy=get("ultraep", floor=1)), [M1, even])
    alone = measure(Contender(label="u", policy=get("ultraep", floor=1)), [M1])
    assert record["forward_home"] == (2.0 + 1.0) / 2
    assert (record["matrices"], record["replicas"]) == (2, alone["replicas"])


def test_replica_traffic() -> None:
    expert = Expert(dim=8, expert_dim=4, bandwidth=1e3, flops=1e6)
    plan = get("ultraep", floor=1, fast_path=False).plan(M1)
    # Three replicas of 96 weights: 2 bytes each out twice, 4 bytes each home.
    assert expert.replica_bytes(plan) == 3 * 96 * (2 + 2 + 4)
    assert expert.row_seconds == pytest.approx(6 * 32 / 1e6)
    with pytest.raises(ValueError, match="bandwidth=0 must be a finite number above 0"):
        Expert(bandwidth=0)


def simple(**changed: float) -> Hardware:
    """Rates without latencies or tiles, and a memory that is never waited for."""
    rates = {"flops": 4e14, "memory_bandwidth": 1e18, "intra_bytes_per_s": 4e11, "inter_bytes_per_s": 4e11}
    rates |= {"latency_s": 0.0, **changed}
    return Hardware(
        name="simple", memory_bytes=1.0, gemm_efficiency=1.0, link_efficiency=1.0, tile_rows=1, launch_s=0.0,
        **rates,
    )  # fmt: skip


def test_a_layers_time_by_hand() -> None:
    """Rows of 6 D F operations forward and 12 backward, and of replicas weights out twice and gradients home once."""
    price = Price(hardware=simple(intra_bytes_per_s=1e300, inter_bytes_per_s=1e300, memory_bandwidth=1e300))
    plan = get("ultraep", floor=1, fast_path=False).plan(M1)
    row_s = 18 * 2048 * 768 / 4e14
    assert price.time(plan).seconds == pytest.approx(250 * row_s)
    again = Price(hardware=price.hardware, recompute=True)
    assert again.time(plan).seconds == pytest.approx(250 * row_s * 24 / 18)
    slow = Price(hardware=simple(flops=1e300, memory_bandwidth=1e300))
    phases = {name: slow.time(plan)[name] for name in ("weights to replicas", "gradients of replicas home")}
    weights = 3 * 2048 * 768
    # The home of all three replicas sends them, before the forward and before the backward.
    assert phases["weights to replicas"] == pytest.approx(2 * 3 * 2 * weights / 4e11)
    assert phases["gradients of replicas home"] == pytest.approx(3 * 4 * weights / 4e11)


def test_break_even() -> None:
    lam_GE = skewed_loads(2.0)
    found = break_even(contenders()[-1], [lam_GE], prices=[Price(hardware=simple())], at=700)[0]
    sizes = {size["tokens"]: size for size in found["sizes"]}
    assert tuple(sizes) == tuple(sorted((*TOKENS, 700)))
    assert found["here"] == sizes[700]
    # What is saved grows with the tokens, what it costs does not.
    assert sizes[65536]["saved"] == pytest.approx(16 * sizes[4096]["saved"], rel=0.02)
    assert sizes[65536]["cost"] == pytest.approx(sizes[4096]["cost"], rel=0.5)
    for size in sizes.values():
        assert size["planned"] == pytest.approx(size["home"] - size["saved"] + size["cost"])
        assert size["pays"] == (size["planned"] <= FASTER * size["home"])
    crossover = found["tokens"]
    assert all(size["pays"] == (tokens > crossover) for tokens, size in sizes.items())
    assert f"replicas pay from about {crossover:,.0f} tokens a rank on" in advice(found)
    weights_slower = Price(hardware=simple(flops=4e15, memory_bandwidth=1e19))
    later = break_even(contenders()[-1], [lam_GE], prices=[weights_slower])[0]["tokens"]
    assert later > 2 * crossover


def test_break_even_where_replicas_never_or_always_pay() -> None:
    one = contenders()[-1]

    def of(skew: float, **rates: float) -> dict[str, object]:
        return break_even(one, [skewed_loads(skew)], prices=[Price(hardware=simple(**rates))])[0]

    even = of(1.0)
    assert even["tokens"] is None
    assert "plans no replica" in advice(even)
    # Three more exchanges, each of which takes longer than everything else together.
    never = of(2.0, latency_s=10.0)
    assert never["tokens"] is None
    assert "do not bring a layer to at most 97% of its time without at 65,536 tokens" in advice(never)
    always = of(2.0, intra_bytes_per_s=1e18, inter_bytes_per_s=1e18)
    assert always["tokens"] == 0.0
    assert "pay from 64 tokens a rank on" in advice(always)
