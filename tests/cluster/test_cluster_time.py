"""Time on paper: by hand, over two-level networks, calibrated, and the published and recorded results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lrmoe.balance import get
from lrmoe.cluster import FP32, Hardware, ModelShape, calibrate, hardware, layer_time, model
from lrmoe.cluster.time import exchange_seconds, grouped_gemm_seconds, grouped_wgrad_seconds
from lrmoe.training.trace import read_trace

PLAIN = Hardware(
    name="plain",
    flops=1e9,
    memory_bytes=1e9,
    memory_bandwidth=1e12,
    intra_bytes_per_s=100.0,
    inter_bytes_per_s=10.0,
    ranks_per_node=2,
    gemm_efficiency=1.0,
    link_efficiency=1.0,
    tile_rows=4,
    launch_s=0.0,
    latency_s=0.0,
)
SHAPE = ModelShape(name="m", dim=8, expert_dim=4, num_experts=4, top_k=2, moe_layers=1)


def test_products_work_on_whole_tiles() -> None:
    # 5 rows take two tiles of 4, and none takes none; 10 columns take three tiles.
    assert grouped_gemm_seconds([5, 0, 4], 16, 10, PLAIN) == pytest.approx(2 * 12 * 16 * 12 / 1e9)
    assert grouped_gemm_seconds([0, 0], 16, 10, PLAIN) == 0
    # 33 rows are walked through in steps of 32.
    assert grouped_wgrad_seconds([33], 8, 8, PLAIN) == pytest.approx(2 * 64 * 8 * 8 / 1e9)
    # Few rows of many weights: memory decides.
    slow = replace(PLAIN, memory_bandwidth=1e3, tile_rows=1)
    assert grouped_gemm_seconds([1, 1], 16, 10, slow) == pytest.approx(2 * (2 * 26 + 2 * 160) / 1e3)
    costly = replace(PLAIN, group_s=3.0, launch_s=0.5)
    assert grouped_gemm_seconds([4, 0, 4], 4, 4, costly) == pytest.approx(6.5, abs=1e-5)


def test_two_levels_of_a_network() -> None:
    """Ranks 0, 1 are a node, 2, 3 another. Rank 0 sends 50 bytes to its neighbour, 0.5 s, and 20 out, 2 s, at once;
    rank 2 receives the 20."""
    bytes_GG = torch.zeros(4, 4)
    bytes_GG[0, 1], bytes_GG[0, 2], bytes_GG[3, 3] = 50, 20, 1e6
    assert exchange_seconds(bytes_GG, PLAIN).tolist() == [2.0, 0.5, 2.0, 0.0]
    assert exchange_seconds(bytes_GG, replace(PLAIN, ranks_per_node=4)).max() == pytest.approx(0.7)
    assert exchange_seconds(bytes_GG, replace(PLAIN, latency_s=1.0)).tolist() == [3.0, 1.5, 3.0, 1.0]
    # To oneself nothing travels, and nothing is waited for.
    assert exchange_seconds(torch.eye(4), replace(PLAIN, latency_s=1.0)).tolist() == [0.0] * 4


def test_a_step_is_the_sum_over_phases_of_the_slowest_rank() -> None:
    lam_GE = torch.tensor([[6, 2, 0, 0], [0, 0, 4, 4]])
    found = layer_time(get("fixed").plan(lam_GE), SHAPE, replace(PLAIN, tile_rows=1), elementwise="fused")
    assert found.seconds == pytest.approx(sum(float(phase.seconds_G.max()) for phase in found.phases))
    assert found.seconds == pytest.approx(found.of("forward") + found.of("backward"))
    assert found.seconds == pytest.approx(found.of("compute") + found.of("network"))
    assert found.to_dict()["seconds"] == found.seconds
    # All rows are at home: only the counts travel, 4 numbers to the other rank.
    assert found.of("network") == found["loads of all ranks"] == pytest.approx(32 / 100)
    assert found.balanced <= found.seconds
    # Everything of rank 1 for experts of rank 0: eight rows of 8 numbers of 2 bytes, there and back.
    away = layer_time(get("fixed").plan(torch.tensor([[8, 0, 0, 0], [8, 0, 0, 0]])), SHAPE, PLAIN)
    assert away["tokens to experts"] == away["outputs to tokens"] == pytest.approx(8 * 8 * 2 / 100)
    with pytest.raises(KeyError, match="no phase 'select'"):
        away["select"]


def test_every_exchange_costs_what_it_sends() -> None:
    """Eight rows of 8 numbers of 2 bytes go away from rank 1, and rank 0 keeps six of them for the backward."""
    plan = get("fixed").plan(torch.tensor([[0, 0, 0, 0], [8, 0, 0, 0]]), drop=0.25)
    found = layer_time(plan, SHAPE, PLAIN)
    rows, kept, numbers = 8, 6, 8 * 2
    assert {phase.name: float(phase.seconds_G.max()) for phase in found.phases if phase.kind == "network"} == {
        "loads of all ranks": pytest.approx(32 / 100),
        "weights to replicas": 0,
        "tokens to experts": pytest.approx(rows * numbers / 100),
        "outputs to tokens": pytest.approx(rows * numbers / 100),
        "scores to experts": pytest.approx(rows * 4 / 100),
        "kept flags to tokens": pytest.approx(rows / 100),
        "gradients to experts": pytest.approx(kept * numbers / 100),
        "routing weights to experts": pytest.approx(kept * 4 / 100),
        "gradients to tokens": pytest.approx(kept * numbers / 100),
        "routing weight gradients to tokens": pytest.approx(kept * 4 / 100),
        "gradients of replicas home": 0,
    }


def test_dropping_shortens_the_backward_alone() -> None:
    qwen, h100 = model("qwen3-30b-a3b"), hardware("h100")
    lam_GE = torch.full((8, 128), 2048)
    times = [layer_time(get("fixed").plan(lam_GE, drop=drop), qwen, h100) for drop in (0.0, 0.3, 0.6)]
    assert len({layer.of("forward") for layer in times}) == 1
    assert times[0].of("backward") > times[1].of("backward") > times[2].of("backward")
    again = layer_time(get("fixed").plan(lam_GE, drop=0.3), qwen, h100, save="input")
    assert again["backward experts"] > times[1]["backward experts"]
    fused = layer_time(get("fixed").plan(lam_GE), qwen, h100, elementwise="fused")
    assert fused["forward experts"] < times[0]["forward experts"]


def test_replicas_cost_their_weights_and_save_the_busiest_rank() -> None:
    qwen, h100 = model("qwen3-30b-a3b"), hardware("h100")
    lam_GE = torch.full((8, 128), 1024)
    lam_GE[:, 0] = 32768
    fixed, moved = (
        layer_time(get(name, **options).plan(lam_GE), qwen, h100)
        for name, options in (("fixed", {}), ("lrmoe", {"slots": 2}))
    )
    assert fixed["weights to replicas"] == 0
    assert moved["weights to replicas"] > 0
    assert moved["forward experts"] < fixed["forward experts"]
    once = layer_time(get("lrmoe", slots=2).plan(lam_GE), qwen, h100, resend=False)
    assert once["weights to replicas"] == pytest.approx(moved["weights to replicas"] / 2)
    planned = layer_time(get("fixed").plan(lam_GE), qwen, h100, plan_s=0.25)
    assert planned.seconds == pytest.approx(fixed.seconds + 0.25)


def test_more_nodes_pay_the_slower_link() -> None:
    qwen, h100 = model("qwen3-30b-a3b"), hardware("h100")
    shares = []
    for ranks in (8, 16, 64):
        lam_GE = torch.full((ranks, 128), 2048)
        layer = layer_time(get("fixed").plan(lam_GE), qwen, h100)
        shares.append(layer.of("network") / layer.seconds)
    assert shares == sorted(shares)
    assert shares[1] > 1.5 * shares[0]


def test_calibration_finds_the_line_of_the_measurements() -> None:
    """2e9 operations a second and a millisecond a group, as measured on 2, 4 and 8 groups' worth of rows."""
    gemms = [([rows] * 4, 10, 20, 2 * 4 * rows * 10 * 20 / 2e9 + 4e-3) for rows in (100, 200, 800)]
    found = calibrate(replace(PLAIN, tile_rows=1), gemms=gemms, index_bytes_per_s=5.0, select=[(10, 1.0), (30, 2.0)])
    assert found.flops == pytest.approx(2e9)
    assert found.group_s == pytest.approx(1e-3)
    assert (found.index_rate, found.glu_rate) == (5.0, PLAIN.memory_bandwidth)
    assert (found.select_rate, found.select_start) == (20.0, 0.5)
    for rows_S, inner, outer, seconds in gemms:
        assert grouped_gemm_seconds(rows_S, inner, outer, found) == pytest.approx(seconds)
    with pytest.raises(ValueError, match="gemms holds 2 measurements; at least two of different sizes"):
        calibrate(PLAIN, gemms=gemms[:1] * 2)
    with pytest.raises(ValueError, match="took no longer"):
        calibrate(PLAIN, gemms=[([4], 4, 4, 2.0), ([8], 4, 4, 1.0)])


def test_committed_comparison_with_a_machine() -> None:
    """What docs/results says of this model: saved bytes exact, times within a third, policies in the clock's order, and
    the predictions for the recorded trace are those that its constants still give."""
    folder = Path(__file__).parents[2] / "docs" / "results"
    found: dict[str, Any] = json.loads((folder / "cluster_model.json").read_text())
    assert len(found["settings"]) == 6
    assert all(row["saved_predicted"] == row["saved_bytes"] for row in found["settings"])
    assert all(abs(row["time_error"]) < 1 / 3 for row in found["settings"])
    rows = found["policies"]
    by_clock, by_model = (sorted(rows, key=lambda row: row[key]) for key in ("critical_s", "predicted_s"))
    assert [row["name"] for row in by_clock] == [row["name"] for row in by_model]
    options = found["trace_options"]
    trace = read_trace(folder / "router_trace", ranks=options["ranks"])
    shape = ModelShape(
        name="trace",
        dim=options["dim"],
        expert_dim=options["expert_dim"],
        num_experts=trace.lam_NGE.shape[2],
        top_k=trace.about["top_k"],
        moe_layers=1,
    )
    machine = Hardware(**found["hardware"])
    records = range(0, len(trace), max(1, len(trace) // options["records"]))
    for row in rows:
        policy = get(row["name"].partition(",")[0])
        seconds = 0.0
        for record in records:
            plan = policy.plan(torch.from_numpy(trace.lam_NGE[record]).long(), drop=row["drop"])
            layer = layer_time(plan, shape, machine, precision=FP32, elementwise="blocked", resend=False)
            seconds += layer.seconds - layer["sort"] - layer["loads of all ranks"]
        # Planning was timed then.
        assert 0.9 * row["predicted_s"] < seconds <= row["predicted_s"]
