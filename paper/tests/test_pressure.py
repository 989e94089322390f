"""What completes under a budget: by hand, by the bytes it stands for, and by what cannot be otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lrmoe.balance import get
from lrmoe.balance.plan import Plan
from lrmoe.cluster import hardware, model, token_buffers
from lrmoe.studies.loads import skewed_loads
from lrmoe.studies.replay import Choice, Setting
from lrmoe.studies.routing import Routing
from lrmoe.studies.systems import Sizes
from paper.pressure import published
from paper.pressure.completes import Limits, completed, least_drop_plan, under_pressure
from paper.pressure.config import PressureConfig
from paper.pressure.pair_bytes import KeptRowBytes, OperatorBytes, slopes
from paper.pressure.published import Assumed, at_one, in_order, needed
from paper.pressure.run import pressure

QWEN = model("qwen3-30b-a3b")
# Home loads 500, 200, 100 and 200, every source with a quarter of each expert's pairs.
WORKED = torch.tensor([[100, 25, 25, 25, 12, 12, 25, 25], [100, 25, 25, 25, 13, 13, 25, 25]] * 2)


@dataclass(frozen=True)
class OneByte:
    """A byte a kept row."""

    describes: str = "one byte a kept row"

    def forward(self, tokens: int, rows: int) -> float:
        return 0.0

    def backward(self, tokens: int, rows: int, kept: int) -> float:
        return float(kept)


def rows_of(lam_GE: Tensor) -> Routing:
    return Routing(source="test", synthetic=True, lam=[lam_GE], step=[0], microbatch=[0], layer=[0], layers=["0"])


def test_fixed_ownership_completes_what_its_ranks_hold() -> None:
    plan = get("fixed").plan(WORKED)
    found = completed(plan, 200.0, OneByte(), 1)
    # 200 of 500, 200 of 200, 100 of 100, 200 of 200; the busiest rank holds two fifths of its rows.
    assert (found.completes, found.batch, found.backward, found.demand) == (0.7, 0.4, 0.7, 500.0)


def test_the_worked_example_of_a_budget_below_the_mean() -> None:
    even = completed(get("ultraep", slots=1, floor=1, tolerance=0.0).plan(WORKED), 200.0, OneByte(), 1)
    assert (even.completes, even.batch) == (0.8, 0.8)  # 250 on each rank, and every one is over
    plan = least_drop_plan(WORKED, 200.0, Limits(budget=0, pair=OneByte()), slots=1, top_k=1)
    assert plan.quota_EG.sum(0).tolist() == [200, 200, 200, 200]
    found = completed(plan, 200.0, OneByte(), 1)
    assert (found.completes, found.batch, found.backward) == (1.0, 1.0, 0.8)


def test_nothing_is_dropped_where_replicas_suffice() -> None:
    plan = least_drop_plan(WORKED, 260.0, Limits(budget=0, pair=OneByte()), slots=2, top_k=1)
    assert torch.equal(plan.quota_EG, plan.rows_EG)
    assert int(plan.rows_EG.sum(0).max()) <= 260


def test_beyond_the_least_kept_share_rows_do_not_complete() -> None:
    limits = Limits(budget=0, pair=OneByte(), min_keep=0.5)
    plan = least_drop_plan(WORKED, 100.0, limits, slots=2, top_k=1)
    found = completed(plan, 100.0, OneByte(), 1)
    assert int(plan.quota_EG.sum()) == 500
    # Half of a thousand rows are to be kept, and there is room for 400 of them.
    assert 0.7 < found.completes <= 0.8
    assert found.backward <= 0.4
    assert completed(plan, -1.0, OneByte(), 1).completes == 0.0


@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.parametrize("capacity", [0.55, 0.7, 0.85, 1.1])
def test_what_completes_fits_in_the_operators_buffers(save: str, capacity: float) -> None:
    lam_GE = skewed_loads(2.0, tokens=2048)
    pair = OperatorBytes(model=QWEN, save=save)  # type: ignore[arg-type]
    whole = pair.backward(2048, 16384, 16384)
    available = capacity * max(whole, pair.forward(2048, 16384))
    plan = least_drop_plan(lam_GE, available, Limits(budget=0, pair=pair), slots=2, top_k=8)
    plan.validate(slots=2)
    found = completed(plan, available, pair, 8)
    most = 0.0
    for rank in range(8):
        tokens, rows = int(lam_GE[rank].sum()) // 8, int(plan.rows_EG[:, rank].sum())
        buffers = token_buffers(QWEN, tokens=tokens, rows=rows, kept=int(plan.quota_EG[:, rank].sum()), save=save)  # type: ignore[arg-type]
        forward = token_buffers(QWEN, tokens=tokens, rows=rows, save=save).forward  # type: ignore[arg-type]
        most = max(most, buffers.saved_bytes + buffers.index + max(buffers.backward, forward))
    # A forward knows nothing of the drop, whose bookkeeping the other call has in its own.
    assert found.demand == pytest.approx(most, rel=0.01)
    assert (found.completes == 1.0) == (found.demand <= available)
    if capacity > 0.8:
        assert found.completes == 1.0


def test_slopes_are_the_bytes_near_the_mean() -> None:
    for pair in (KeptRowBytes(model=QWEN), OperatorBytes(model=QWEN)):
        near = slopes(pair, 4096, 32768)
        for rows, kept in ((32768, 24576), (33000, 25000)):
            expected = pair.backward(4096, rows, kept)
            assert near.own + near.row * rows + near.kept * kept == pytest.approx(expected, rel=0.01)
    assert KeptRowBytes(model=QWEN).each == 25600


def test_the_order_of_the_systems_at_a_skew_of_two() -> None:
    setting = Setting(sizes=Sizes(experts=128, ranks=8, layers=1), slots=2)
    names = ("lrmoe", "ultraep", "symi", "fixed")
    lam_GE = skewed_loads(2.0, tokens=4096)
    pair = KeptRowBytes(model=QWEN)
    limits = Limits(budget=20 * 0.8 * 4096 * 8 * pair.each + 2**29, pair=pair)
    found = under_pressure(
        [Choice(name=name) for name in names], rows_of(lam_GE), setting, limits, tokens=4096, top_k=8, pressures=[1, 20]
    )
    for name in names:
        assert found.of(name, 1)["completes"] == 1.0
        assert found.of(name, 1)["kept_least"] == 1.0
    for column in ("completes", "batch"):
        assert in_order([found.of(name, 20)[column] for name in names])
    mine, exact = found.of("lrmoe", 20), found.of("ultraep", 20)
    assert mine["completes"] == 1.0
    # What the figure does not say: the backward of hardly more rows is computed.
    assert mine["backward"] == pytest.approx(exact["backward"], abs=0.03)
    assert mine["kept_least"] >= 0.5 - 1e-3
    assert found.of("fixed", 20)["batch"] == pytest.approx(0.4, abs=0.02)


def test_even_loads_leave_no_order() -> None:
    lam_GE = torch.full((4, 16), 100)
    setting = Setting(sizes=Sizes(experts=16, ranks=4, layers=1), slots=1, floor=1)
    limits = Limits(budget=2**40, pair=OneByte())
    found = under_pressure(
        [Choice(name="ultraep"), Choice(name="fixed")],
        rows_of(lam_GE),
        setting,
        limits,
        tokens=800,
        top_k=2,
        pressures=[1],
    )
    assert not in_order([found.of(name, 1)["batch"] for name in ("ultraep", "fixed")])


def test_a_policy_that_cannot_run_says_why_and_options_without_effect_are_refused() -> None:
    setting = Setting(sizes=Sizes(experts=16, ranks=4, layers=1), slots=1)
    limits = Limits(budget=2**30, pair=OneByte())
    routing = rows_of(torch.full((4, 16), 100))
    arguments = {"tokens": 800, "top_k": 2, "pressures": [1.0]}
    found = under_pressure([Choice(name="symi", options={"slots": 2})], routing, setting, limits, **arguments)  # type: ignore[arg-type]
    assert "8 slots for 16 experts" in found.records[0]["reason"]
    assert found.records[0]["completes"] is None
    with pytest.raises(ValueError, match="target has no effect here"):
        under_pressure([Choice(name="lrmoe", options={"target": 1.1})], routing, setting, limits, **arguments)  # type: ignore[arg-type]


def test_the_published_memory_from_first_principles() -> None:
    assumed = Assumed(model=QWEN, hardware=hardware("h100"))
    record = at_one(2.0, assumed)
    assert record["base"] == 0.421875
    assert record["replicas"] == 2 * 27 / 1024
    assert record["fixed"]["buffers"]["kept"] == pytest.approx(12.5, rel=0.01)
    assert record["lrmoe"]["buffers"]["kept"] == pytest.approx(record["lrmoe"]["kept_of_mean_rows"] * 6.25, rel=1e-6)
    for how in ("plain", "fused"):
        assert record["lrmoe"]["backward_ms"][how] < record["fixed"]["backward_ms"][how]
        assert record["lrmoe"]["experts_ms"][how] < record["lrmoe"]["backward_ms"][how]
    assert record["fixed"]["backward_ms"]["fused"] < record["fixed"]["backward_ms"]["plain"]
    values = {one["figure"]: one["value"] for one in needed(assumed)}
    assert values["token buffers of Megatron-LM, 12.46 GiB"] == pytest.approx(12.46 * 2**30 / 25600 / 262144)
    assert values["44.9 % of SYMI at 20 x"] == pytest.approx(1.78, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "nothing"}, "model='nothing' is neither a preset"),
        ({"hardware": "nothing"}, "hardware=.nothing. is no preset"),
        ({"skew": 9.0}, "skew=9.0 must be between 1 and the number of ranks"),
        ({"skew": 2.0, "trace": "x"}, "trace=.x. and skew=2.0 exclude each other"),
        ({"pressures": "1,b"}, "pressures='1,b' is no list of numbers"),
        ({"pressures": "0"}, "each must be a finite number above 0"),
        ({"min_keep": 0.0}, "min_keep=0.0 must be above 0"),
        ({"budget_gib": -1.0}, "budget_gib=-1.0 must be a finite number"),
        ({"save": "all"}, "save='all' is not known"),
        ({"policies": "nobody"}, "policies='nobody': 'nobody' is not known"),
        ({"ep": 200}, "num_ranks=200"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pressure(PressureConfig(**options), tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_plans_with_fewer_rows_in_the_backward_need_fewer_bytes() -> None:
    lam_GE = skewed_loads(2.0, tokens=1024)
    plan = get("lrmoe", slots=1).plan(lam_GE, drop=0.2)
    dense = replace(plan, quota_EG=plan.rows_EG)
    assert isinstance(dense, Plan)
    pair = OperatorBytes(model=QWEN)
    assert completed(plan, 1e15, pair, 8).demand < completed(dense, 1e15, pair, 8).demand


def test_w4_the_published_figures_are_not_said_to_be_of_one_layer() -> None:
    assert 64.6 * 60e3 / 8440 / 48 < 29.64
    found = {one["figures"]: one for one in published.coherence(QWEN)}
    backward = next(one for name, one in found.items() if name.startswith("backward"))
    assert not backward["agree"]
    assert "9.6 ms" in backward["says"]
    assert "5.3 ms" in backward["says"]
    assert next(one for name, one in found.items() if name.startswith("base placement"))["agree"]
    throughput = next(one for name, one in found.items() if name.startswith("throughput"))
    assert "99.7 GiB" in throughput["says"]
    assert not throughput["agree"]
    assert "figures are of one MoE layer" not in (published.__doc__ or "")
    page = (Path(__file__).parents[1] / "pressure.md").read_text(encoding="utf-8")
    assert "9.6 ms a step and layer" in page
