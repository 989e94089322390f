"""The guard over ranks: all that share a layer, or train copies of it together, stop in the same layers at once."""

from __future__ import annotations

import json
import logging
from typing import Any, Literal

import torch
import torch.distributed as dist
from distributed.world import run_world
from torch import nn

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.parallel import ExpertParallel, global_metrics, parallelize
from lrmoe.recalibration.guard import WINDOW

DIM, TOKENS = 8, 24
# Between what the tokens of the two ranks cost alone and together.
CONFIG = LRMoEConfig(drop=0.4, guard_variance=0.1)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(group: dist.ProcessGroup, how: Literal["experts", "copies", "alone"]) -> dict[str, Any]:
    """Two layers; the first gets tokens on rank 1 that are all missed if dropped, the second on no rank."""
    torch.manual_seed(0)
    model = nn.ModuleList(lrmoe.MoE(dim=DIM, expert_dim=8, num_experts=4, top_k=2) for _ in range(2))
    if how == "experts":
        parallelize(model, ExpertParallel(group, num_experts=4, policy="fixed"))
    recal = lrmoe.attach(model, CONFIG, load_group=group if how == "copies" else None)
    handler = Lines()
    logging.getLogger("lrmoe").addHandler(handler)
    drops, states = [], []
    uneven = torch.exp(-0.5 * torch.arange(TOKENS)).unsqueeze(1)
    for step in range(WINDOW + 2):
        generator = torch.Generator().manual_seed(step)
        x = 1.0 + 0.1 * torch.randn(TOKENS, DIM, generator=generator)
        # Experts that both ranks feed would drop the small tokens of the one in place of the other's.
        mine = (x if group.rank() == 1 else (x * uneven)[: 6 if how == "experts" else TOKENS], x * uneven)
        for layer, tokens in zip(model, mine, strict=True):
            layer(tokens).square().sum().backward()
        recal.step()
        drops.append([float(control.drop) for control in recal.layers.values()])
        states.append(json.dumps(recal.state_dict()))
    logging.getLogger("lrmoe").removeHandler(handler)
    told = global_metrics(recal)
    return {"drops": drops, "states": states, "lines": handler.lines, "metrics": told}


def test_ranks_that_share_experts_decide_together_and_one_of_them_says_so() -> None:
    first, second = run_world(2, train, "experts")
    assert first["drops"] == second["drops"] == [[0.4, 0.4]] * (WINDOW - 1) + [[0.0, 0.4]] * 3
    # At every step the same, so that the state that one rank saves is that of all.
    assert first["states"] == second["states"]
    (line,) = first["lines"]
    assert "rank 0, step 10: dropping costs too much in 1 of 2 MoE layers" in line
    assert second["lines"] == []
    assert first["metrics"]["guarded_layers"] == second["metrics"]["guarded_layers"] == 1
    assert first["metrics"]["layers"]["0"]["guarded"]


def test_copies_with_a_load_group_decide_together_and_others_each_for_itself() -> None:
    first, second = run_world(2, train, "copies")
    assert first["drops"] == second["drops"] == [[0.4, 0.4]] * (WINDOW - 1) + [[0.0, 0.4]] * 3
    assert first["states"] == second["states"]
    assert len(first["lines"]) == 1
    assert second["lines"] == []
    first, second = run_world(2, train, "alone")
    assert first["drops"] == [[0.4, 0.4]] * (WINDOW + 2)
    assert second["drops"] == [[0.4, 0.4]] * (WINDOW - 1) + [[0.0, 0.4]] * 3
    assert second["lines"][0].startswith("rank 1, step 10:")
