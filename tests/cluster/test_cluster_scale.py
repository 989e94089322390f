"""As ranks are added: metadata, planning, and numbers that 32 bits do not hold."""

from __future__ import annotations

import pytest
import torch

from lrmoe.balance import get
from lrmoe.cluster import ModelShape, measure_planning, memory, metadata, token_buffers
from lrmoe.cluster.scale import skewed_loads
from lrmoe.experts.compacted import Activations, Bank, Rows, router_dots
from lrmoe.experts.recipe import Recipe
from lrmoe.parallel.layout import lay_out


@pytest.mark.parametrize("ranks", [8, 32])
def test_metadata_is_what_a_plan_holds(ranks: int) -> None:
    lam_GE = skewed_loads(num_experts=64, ranks=ranks, pairs=4096, power=0.5, seed=0)
    assert lam_GE.sum(1).tolist() == [4096] * ranks
    plan = get("lrmoe", slots=1).plan(lam_GE, drop=0.2)
    found = metadata(num_experts=64, ranks=ranks, layers=1, pairs=4096)
    tables = (plan.lam_GE, plan.rows_EG, plan.quota_EG)
    assert found.plans == sum(table.numel() * table.element_size() for table in tables)
    assert found.alloc == plan.alloc.numel() * plan.alloc.element_size()
    assert found.gathered == plan.lam_GE.numel() * 8
    assert found.scores == 5 * 4096


def test_what_grows_with_the_ranks_and_where_it_stops() -> None:
    sizes = [metadata(num_experts=512, ranks=ranks, layers=48, pairs=65536) for ranks in (8, 64, 512)]
    assert [size.alloc // sizes[0].alloc for size in sizes] == [1, 64, 4096]
    assert [size.plans // sizes[0].plans for size in sizes] == [1, 8, 64]
    # The table of who sends what to whom: a GiB for one layer.
    assert sizes[-1].alloc == 2**30
    with pytest.raises(ValueError, match="num_ranks=256 must be between 1 and num_experts=128"):
        metadata(num_experts=128, ranks=256, layers=1, pairs=1)


def test_planning_is_timed() -> None:
    loads = [skewed_loads(num_experts=32, ranks=4, pairs=1024, power=0.8, seed=seed) for seed in range(3)]
    found = measure_planning(get("ultraep", slots=1, floor=1), loads)
    assert (found.ranks, found.experts) == (4, 32)
    assert 0 < found.plan_s < 10
    assert found.alloc_s > 0
    assert found.replicas > 0
    with pytest.raises(ValueError, match="lam_NGE is empty"):
        measure_planning(get("fixed"), [])


@pytest.mark.parametrize(("rows", "width"), [(131_073, 16384), (1_079_839, 2048), (525_312, 4096)])
def test_case_27_offsets_past_32_bits_in_the_plan(rows: int, width: int) -> None:
    assert rows * width > 2**31
    shape = ModelShape(name="m", dim=width, expert_dim=width, num_experts=512, top_k=1, moe_layers=61)
    buffers = token_buffers(shape, tokens=rows)
    by_name = {item.name: item.bytes for item in buffers.saved}
    assert by_name["input rows"] == rows * width * 2
    assert by_name["up projection"] == rows * 2 * width * 2
    whole = memory(shape, ranks=8, tokens=rows)
    assert whole["expert weights"] == 61 * 64 * 3 * width * width * 2


@pytest.mark.parametrize("policy", ["fixed", "ultraep", "lrmoe", "symi"])
def test_case_27_loads_past_32_bits(policy: str) -> None:
    """Loads whose sums, and products with the experts' number, pass 2^31 and 2^32: rows and quotas stay exact."""
    options = {"slots": 3} if policy == "symi" else {}
    lam_GE = torch.tensor([[2**31 + 7, 5, 11, 3], [2**33 + 1, 2**31, 0, 9]])
    plan = get(policy, **options).plan(lam_GE, drop=0.25)
    assert plan.rows_EG.sum(1).tolist() == lam_GE.sum(0).tolist()
    assert int(plan.quota_EG.sum()) == round(0.75 * int(lam_GE.sum()))
    alloc_GEG = plan.alloc
    assert torch.equal(alloc_GEG.sum(2), lam_GE)
    assert torch.equal(alloc_GEG.sum(0), plan.rows_EG)


def test_case_27_kept_rows_are_read_where_they_lie() -> None:
    """The last of 1,079,839 rows of 2048 numbers begins past 2^31; the backward reads its input by its place. Only the
    rows that are kept are touched: the rest of the buffer is never written."""
    rows, width, experts = 1_079_839, 2048, 3
    x_XD = torch.empty(rows, width, dtype=torch.float16)
    kept = torch.tensor([5, rows - 2, rows - 1])
    assert int(kept[-1]) * width > 2**31
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, width, generator=generator).to(torch.float16)
    x_XD[kept] = values
    bank = Bank(
        torch.randn(experts, 16, width, generator=generator).mul(width**-0.5).to(torch.float16),
        torch.randn(experts, width, 8, generator=generator).to(torch.float16),
        None,
        None,
    )
    grad_MD = torch.randn(3, width, generator=generator).to(torch.float16)
    recipe = Recipe(
        activation="silu",
        selector="topq",
        metric="lrm",
        quota="expert",
        router_grad="exact",
        save="input",
        remainder="none",
        error_budget=None,
    )
    offs_E = torch.tensor([1, 2, 3], dtype=torch.int32)

    def dots(buffer: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        saved = Activations(buffer, buffer.new_empty(0, 16))
        return router_dots(grad_MD, Rows(places, places, offs_E), saved, bank, recipe, dtype=torch.float32)

    assert torch.equal(dots(x_XD, kept), dots(values, torch.arange(3)))
    assert dots(values, torch.arange(3)).abs().min() > 0


def test_case_27_last_expert_of_a_large_bank() -> None:
    """Weights of more than 2^31 numbers: what the last expert computes is what it computes alone."""
    from lrmoe.ops.grouped_mm import grouped_mm

    experts, inner, outer = 520, 2048, 2048
    weights = torch.empty(experts, inner, outer, dtype=torch.float16)
    assert weights.numel() > 2**31
    generator = torch.Generator().manual_seed(0)
    last = torch.randn(inner, outer, generator=generator).mul(inner**-0.5).to(torch.float16)
    weights[-1] = last
    x = torch.randn(4, inner, generator=generator).to(torch.float16)
    offs_E = torch.zeros(experts, dtype=torch.int32)
    offs_E[-1] = 4
    assert torch.equal(grouped_mm(x, weights, offs_E), grouped_mm(x, last.unsqueeze(0), offs_E[-1:]))


def test_case_27_the_layout_counts_in_64_bits() -> None:
    lam_GE = torch.tensor([[3, 1], [2, 2]])
    plan = get("fixed").plan(lam_GE)
    layout = lay_out(plan, torch.tensor([0, 1, 2, 3]), None, torch.zeros_like(lam_GE), 0, [[0]], None)
    for table in (layout.pair_L, layout.load_S, layout.quota_S, layout.first_S):
        assert table.dtype == torch.int64
