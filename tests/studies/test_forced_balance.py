"""Forced-balance loads: those that look balanced and are not are shown for what they are."""

from __future__ import annotations

import pytest
import torch

from lrmoe.balance.shapes import WORKLOADS
from lrmoe.cli import main
from lrmoe.studies.routing import Routing, synthetic

RANKS, EXPERTS, TOKENS, TOP_K = 8, 128, 4, 8


def forced_from_the_start(tokens: int) -> torch.Tensor:
    """What benchmarks do that hand pair i of a rank to expert i, i + 1, ... from expert 0 on, on every rank."""
    ids = torch.arange(tokens * TOP_K) % EXPERTS
    return torch.bincount(ids, minlength=EXPERTS).expand(RANKS, -1).clone()


def routing_of(lam_GE: torch.Tensor) -> Routing:
    return Routing(source="forced", synthetic=True, lam=[lam_GE], step=[0], microbatch=[0], layer=[0], layers=["layer"])


def test_case_63_balanced_loads_use_every_rank_and_expert() -> None:
    """People force their router to be balanced to find the ideal speed. A generator that starts from the same expert on
    every rank sends all tokens of a small microbatch to the first experts: half of the ranks or more stand idle, the
    "ideal" is the worst case, and every balancer measured against it looks good. Here each rank draws on its own, and
    what was produced is said beside the label.
    """
    trap = routing_of(forced_from_the_start(TOKENS)).produced()
    assert (trap["experts_used"], trap["ranks_used"]) == (32, 2)
    assert trap["skew_mean"] == 4.0
    routing = synthetic("balanced", steps=4, ranks=RANKS, experts=EXPERTS, tokens=TOKENS, top_k=TOP_K)
    ours = routing.produced()
    assert ours["ranks_used"] == RANKS
    assert ours["sources_used"] == RANKS
    assert ours["skew_max"] < 1.2
    # 256 pairs over 128 experts: drawn apart, most experts have some; from a common start 32 had all.
    assert ours["experts_used"] > 90
    for lam_GE in routing.lam:
        assert len({tuple(row) for row in lam_GE.tolist()}) == RANKS, "no two ranks send the same"
        assert (lam_GE.sum(1) == TOKENS * TOP_K).all()
        assert int(lam_GE.max()) <= TOKENS
    # Only a large microbatch hides the difference.
    assert routing_of(forced_from_the_start(1024)).produced()["skew_mean"] == 1.0


@pytest.mark.parametrize("name", WORKLOADS)
def test_case_63_the_command_labels_synthetic_loads_and_says_what_came_out(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    sizes = ["--experts", "16", "--ranks", "4", "--tokens", "512", "--top-k", "2", "--seed", "3", "--steps", "4"]
    assert main(["balance", "--workload", name, *sizes, "--policies", "fixed"]) == 0
    said = capsys.readouterr().out
    routing = synthetic(name, steps=4, ranks=4, experts=16, tokens=512, top_k=2, seed=3)
    label = "Zipf's law at max/mean 2" if name == "zipf" else name
    assert f"loads: synthetic, {label}, 512 tokens a rank, 2 experts a token, seed 3" in said
    made = routing.produced()
    assert f"busiest over mean rank {made['skew_mean']:.3f} (95 %: {made['skew_p95']:.3f}" in said
    assert f"{made['experts_used']} experts and {made['ranks_used']} ranks have load" in said
    assert f"{made['sources_used']} ranks have tokens" in said
    if name == "empty":
        assert made["ranks_used"] == 3
    if name == "ragged":
        assert made["sources_used"] == 3
