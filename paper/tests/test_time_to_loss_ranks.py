"""The study of time to loss over ranks: balancers without a drop compute one and the same training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from distributed.world import run_world

from lrmoe.training.world import World
from paper.time_to_loss.config import TimeToLossConfig
from paper.time_to_loss.run import CellPlan, run_cell

CONFIG = TimeToLossConfig(
    steps=6, eval_every=3, dim=16, expert_dim=16, num_experts=4, heads=2, batch=4, seq=16, drops=(0.5,), recommended=0.5
)


def _work(group: dist.ProcessGroup, plan: CellPlan, path: str) -> None:
    run_cell(World(rank=group.rank(), size=group.size()), plan, Path(path), lambda done: None)


@pytest.mark.slow
def test_balancers_train_alike_and_are_timed(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"line {n}: {n * n}\n" for n in range(400)), encoding="utf-8")
    config = replace(CONFIG, text=str(tmp_path / "text"))
    found = {}
    for ranks, setting in ((1, config.settings()[0]), (2, config.settings()[1])):
        plan = CellPlan(
            setting=setting.name, seed=0, balance_loss_weight=0.0, contenders=setting.contenders, sizes=config.sizes
        )
        path = tmp_path / f"{ranks}.json"
        run_world(ranks, _work, plan, str(path), timeout=120.0)
        found[ranks] = {one["name"]: one for one in json.loads(path.read_text(encoding="utf-8"))["contenders"]}
    alone = found[1]["no drop"]
    for name in ("fixed", "SYMI", "UltraEP"):
        one = found[2][name]
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert [steps for steps, _ in one["validation"]] == [0, 3, 6]
        assert [loss for _, loss in one["validation"]] == pytest.approx([loss for _, loss in alone["validation"]], 1e-5)
    for one in found[2].values():
        for compute, level in zip(one["compute_s"], one["balanced_s"], strict=True):
            assert compute >= level > 0
        assert min(one["transfer_s"]) > 0
        assert one["load_max_over_mean"] >= 1
    assert found[2]["LRMoE 50%"]["kept_share"] < 0.75
