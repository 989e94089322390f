"""Runs played to all policies: as the engine would, and whoever does worse than fixed ownership is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrmoe.balance import get
from lrmoe.balance.shapes import SHAPES
from lrmoe.cli import main
from lrmoe.cluster import Hardware, ModelShape
from lrmoe.studies.price import Price
from lrmoe.studies.replay import Choice, Setting, compare, parse_choices, replay
from lrmoe.studies.replay_config import ReplayConfig
from lrmoe.studies.replay_run import run_replay
from lrmoe.studies.routing import Routing, p95, recorded, synthetic
from lrmoe.studies.systems import SYSTEMS, Sizes
from lrmoe.training.files import read_records
from lrmoe.training.trace import TraceWriter

SIZES = {"ranks": 4, "experts": 16, "tokens": 512, "top_k": 2}
ALL = list(SYSTEMS)


def setting(bandwidth: float = 1e12, **options: Any) -> Setting:
    rates = {"flops": 1e12, "memory_bandwidth": 1e18, "intra_bytes_per_s": bandwidth, "inter_bytes_per_s": bandwidth}
    machine = Hardware(
        name="simple", memory_bytes=1.0, gemm_efficiency=1.0, link_efficiency=1.0, tile_rows=1, launch_s=0.0,
        latency_s=0.0, **rates,
    )  # fmt: skip
    model = ModelShape(name="small", dim=64, expert_dim=64, num_experts=16, top_k=2, moe_layers=1)
    price = Price(model=model, hardware=machine)
    return Setting(sizes=Sizes(experts=16, ranks=4, layers=1, expert=price.expert(4)), price=price, floor=1, **options)


def workload(name: str, steps: int = 12) -> Routing:
    return synthetic(name, steps=steps, **SIZES)


@pytest.mark.parametrize("name", SHAPES)
def test_all_nine_play_every_workload(name: str) -> None:
    outcomes = compare(parse_choices(None), workload(name), setting(), drop=0.2)
    assert [outcome.record["policy"] for outcome in outcomes] == ALL * 2
    for exact, dropped in zip(outcomes[:9], outcomes[9:], strict=True):
        assert exact.record["reason"] is None
        assert len(exact.lines) == len(dropped.lines) == 12
        assert (exact.record["kept_share"], dropped.record["kept_share"]) == (1.0, pytest.approx(0.8, abs=1e-3))
        for line, cut in zip(exact.lines, dropped.lines, strict=True):
            assert line["rows"] == line["kept"]
            assert sum(line["rows"]) == sum(cut["rows"])
            assert all(kept <= rows for kept, rows in zip(cut["kept"], cut["rows"], strict=True))
        if exact.record["system"] not in ("lrmoe",):  # Which alone plans for what is left after dropping.
            assert [line["rows"] for line in exact.lines] == [line["rows"] for line in dropped.lines]
        assert exact.record["forward_p95"] in [4 * max(line["rows"]) / sum(line["rows"]) for line in exact.lines]
        seconds = exact.record["time_ms"]
        parts = sum(seconds[part] for part in ("compute", "tokens", "copies", "step"))
        assert seconds["total"] == pytest.approx(parts)
        assert seconds["total"] - seconds["copies"] <= seconds["hidden"] <= seconds["total"]
    assert outcomes[0].record["against_fixed"] == outcomes[9].record["against_fixed"] == 1.0


def test_policies_plan_then_observe_then_step() -> None:
    """Two layers, two microbatches a step: SYMI's slots are those of the step before, each layer's its own."""
    lam = workload("rotating", 16).lam
    routing = Routing(
        source="made up",
        synthetic=True,
        lam=lam,
        step=[i // 4 for i in range(16)],
        microbatch=[i // 2 % 2 for i in range(16)],
        layer=[i % 2 for i in range(16)],
        layers=["a", "b"],
    )
    outcome = replay(Choice(name="symi"), routing, setting(slots=2))
    policy = get("symi", slots=6)
    policy.prepare(16, 4)  # type: ignore[attr-defined]
    expected = []
    for i, lam_GE in enumerate(lam):
        expected.append(policy.plan(lam_GE, layer=i % 2).rows_EG.sum(0).tolist())
        policy.observe(lam_GE, layer=i % 2)
        if i % 4 == 3:
            policy.step()
    assert [line["rows"] for line in outcome.lines] == expected
    # Of four steps: half an expert for each of 6 slots of 4 ranks and 2 layers, three quarters of it from others.
    assert outcome.record["bytes"]["weights"] == 2 * 4 * 6 * 0.75 * setting().sizes.expert.weights


def test_case_60_a_hot_spot_that_moves_every_step_is_told_and_its_traffic_counted() -> None:
    """A placement for the step before is of no help once the hot spot has moved on, and moving is paid every time.
    Policies that plan from exact loads are as good as ever."""
    choices = parse_choices("ultraep,lrmoe,symi,smartmoe:interval=1:history=1,flexmoe")
    slow = setting(bandwidth=2e9)
    stays, moves = (
        {outcome.record["system"]: outcome.record for outcome in compare(choices, workload(name), slow, drop=0.0)}
        for name in ("hot_rank", "rotating")
    )
    for name in ("ultraep", "lrmoe"):
        assert moves[name]["forward_mean"] == pytest.approx(stays[name]["forward_mean"], abs=0.05)
    for name in ("symi", "flexmoe", "smartmoe"):
        assert moves[name]["forward_mean"] > stays[name]["forward_mean"] + 0.3
    assert moves["flexmoe"]["bytes"]["optimizer"] > 5 * stays["flexmoe"]["bytes"]["optimizer"] > 0
    for name in ("symi", "smartmoe"):
        assert "slower than fixed" not in stays[name]["verdict"]
        assert moves[name]["time_ms"]["total"] > moves["fixed"]["time_ms"]["total"]
        assert "slower than fixed" in moves[name]["verdict"]
    assert moves["fixed"]["verdict"] == ""


def test_even_loads_make_balancers_a_loss_and_they_are_told_so() -> None:
    outcomes = compare(parse_choices(None), workload("balanced"), setting(bandwidth=1e10), drop=0.0)
    records = {outcome.record["system"]: outcome.record for outcome in outcomes}
    for name in ("ultraep", "symi", "laer", "flexmoe", "eplb"):
        assert "slower than fixed" in records[name]["verdict"], name
        assert records[name]["against_fixed"] > 1
    assert "less even than fixed" in records["symi"]["verdict"]
    assert (records["lrmoe"]["replicas"], records["lrmoe"]["against_fixed"]) == (0, 1.0)


def test_who_cannot_run_is_listed_with_the_reason() -> None:
    choices = parse_choices("symi:slots=3,laer:node_size=3,flexmoe:slots=3,lrmoe,ultraep,smartmoe")
    outcomes = compare(choices, workload("hot_rank"), setting(capacity=900.0), drop=0.2)
    by_name = {(o.record["system"], o.record["drop"]): o for o in outcomes}
    for name, reason in (
        ("symi", "slots=3 on 4 ranks has 12 slots for 16 experts"),
        ("laer", "4 ranks do not fill nodes of node_size=3"),
        ("flexmoe", "has 12 slots for 16 experts"),
        ("fixed", "'fixed' does not fit: rank 0 needs"),
        ("ultraep", "'ultraep' does not fit"),
        ("lrmoe", "'lrmoe' does not fit"),
    ):
        record = by_name[name, 0.0].record
        assert reason in record["reason"], name
        assert record["verdict"] == "cannot run"
        assert record["time_ms"] is record["forward_mean"] is None
        assert by_name[name, 0.0].lines == []
    # 1024 pairs a rank, of which a fifth may go: only with the drop does anything fit.
    assert by_name["lrmoe", 0.2].record["reason"] is None
    assert max(max(line["kept"]) for line in by_name["lrmoe", 0.2].lines) <= 900
    assert by_name["smartmoe", 0.0].record["reason"] is None
    assert by_name["smartmoe", 0.0].record["against_fixed"] is None, "there is nothing to hold it against"


def test_a_reason_in_the_middle_of_a_run_says_where() -> None:
    routing = workload("burst")
    most = max(int(lam_GE.sum(0).view(4, 4).sum(1).max()) for lam_GE in routing.lam[:3])
    record = replay(Choice(name="fixed"), routing, setting(capacity=float(most))).record
    assert record["reason"].endswith("(first at step 3, layer 0)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("best", "policies='best': 'best' is not known; choose of fixed, ultraep"),
        ("symi:slot=3", "policies='symi:slot=3': 'symi' has no option 'slot=3'; its options are slots"),
        ("symi:slots", "policies='symi:slots': 'symi' has no option 'slots'"),
        ("symi:slots=many", "policies='symi:slots=many': symi:slots=many is no number"),
        ("", "policies='': '' is not known"),
    ],
)
def test_policies_that_do_not_exist_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_choices(text)


def test_choices() -> None:
    assert [choice.label for choice in parse_choices("lrmoe, laer:node_size=4:recompute=true,lrmoe")] == [
        "fixed",
        "lrmoe",
        "laer:node_size=4:recompute=True",
    ]
    assert [choice.name for choice in parse_choices(None)] == ALL


def test_the_percentile_is_a_value_that_occurred() -> None:
    assert p95([1.0]) == 1.0
    assert p95([float(i) for i in range(1, 101)]) == 95.0
    assert np.isnan(p95([]))


def trace_of(folder: Path, ranks: int = 2, steps: int = 3) -> Path:
    writer = TraceWriter(folder / "trace", {"top_k": 2, "dim": 32, "expert_dim": 16, "layers": ["model.0", "model.1"]})
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for layer in range(2):
            writer.add(layer, step, 0, torch.randint(0, 40, (ranks, 16), generator=generator))
    writer.flush()
    return folder


def test_a_trace_brings_its_sizes(tmp_path: Path) -> None:
    result = run_replay(ReplayConfig(trace=str(trace_of(tmp_path)), steps=2))
    assert result.routing.shape == (4, 2, 16)
    assert (result.setting.sizes.expert.dim, result.setting.sizes.expert.expert_dim) == (32, 16)
    assert (result.setting.sizes.layers, result.setting.sizes.ranks) == (2, 2)
    assert result.routing.layers == ["model.0", "model.1"]
    assert not result.routing.synthetic
    wider = run_replay(ReplayConfig(trace=str(tmp_path), dim=64, layers=5, policies="lrmoe"))
    assert (wider.setting.sizes.expert.dim, wider.setting.sizes.layers) == (64, 5)


def test_a_trace_of_one_rank_is_dealt_out_and_says_so(tmp_path: Path) -> None:
    trace_of(tmp_path, ranks=1)
    with pytest.raises(
        ValueError, match="was recorded on one rank, where there is nothing to balance: say over how many"
    ):
        recorded(tmp_path)
    routing = recorded(tmp_path, ranks=4)
    assert routing.shape == (6, 4, 16)
    assert "(recorded on 1 rank; every expert's pairs are dealt out evenly over 4 sources" in routing.source
    with pytest.raises(ValueError, match="num_ranks=17 must be between 1 and num_experts=16"):
        recorded(tmp_path, ranks=17)


def test_the_command_writes_a_folder_that_report_writes_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    run, out = trace_of(tmp_path / "run"), tmp_path / "out"
    arguments = ["balance", "--trace", str(run), "--policies", "lrmoe,symi:slots=2,eplb:interval=1", "--out", str(out)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert f"loads: recorded, {run}" in said
    assert "symi:slots=2 cannot run: policy 'symi' with slots=2 on 2 ranks has 4 slots for 16 experts" in said
    summary = json.loads((out / "summary.json").read_text())
    assert [record["policy"] for record in summary["policies"]] == [
        "fixed",
        "lrmoe",
        "symi:slots=2",
        "eplb:interval=1",
    ] * 2
    assert all(note in said for note in summary["notes"])
    lines = read_records(out / "metrics.jsonl")
    assert len(lines) == 6 * 3 * 2
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert main(["report", str(out)]) == 0
    assert (out / "report.html").read_text() == page
    assert main(arguments) == 2
    assert main([*arguments, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nowhere"], "--trace nowhere is missing; give what lrmoe train --trace wrote"),
        (["--trace", "x", "--workload", "burst"], "--trace x and --workload burst exclude each other"),
        (["--trace", "x", "--tokens", "9"], "--tokens 9 is of workloads"),
        (["--workload", "burst", "--shape", "burst"], "--shape is for --loads, --shape or --skew alone"),
        (["--skew", "2", "--steps", "3"], "--steps is for --trace or --workload"),
        (["--workload", "burst", "--skew", "2"], "--skew 2.0 is of the workload 'zipf'"),
        (["--workload", "bursts"], "argument --workload: invalid choice: 'bursts'"),
        (["--workload", "zipf", "--skew", "99"], "--skew 99.0 must be between 1 and the number of ranks, 8"),
        (["--workload", "burst", "--policies", "best"], "--policies best: 'best' is not known"),
        (["--workload", "burst", "--drop", "1"], "--drop 1.0 must be in [0, 1)"),
        (["--workload", "burst", "--steps", "0"], "--steps 0 must be an integer >= 1"),
        (["--workload", "burst", "--dim", "0"], "--dim 0 must be an integer >= 1"),
        (["--workload", "burst", "--experts", "4"], "--ranks 8 must be between 1 and --experts 4"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert main(["balance", *arguments, "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert message in said.err
    assert not out.exists()
