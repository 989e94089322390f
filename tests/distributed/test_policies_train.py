"""Every policy trains, with an Adam step between its plans: against one process on all tokens, over ranks that keep
weights and optimizer state where the policy has them, and at home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.world import run_world
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lrmoe
from lrmoe import LRMoEConfig, Routing
from lrmoe.balance import get
from lrmoe.parallel import ExpertParallel, checkpoint, clip_grad_norm_, global_metrics, parallelize

RANKS, EXPERTS, TOKENS, STEPS = 4, 8, 32, 5

POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "ultraep": {"slots": 1, "floor": 1},
    "lrmoe": {"slots": 1},
    "symi": {"slots": 3},
    "laer": {"slots": 3, "node_size": 2},
    "flexmoe": {"slots": 3, "threshold": 1.05, "sync_cost": 0.0},
    "smartmoe": {"interval": 1},
    "fastermoe": {"dim": 8, "ratio": 2.0, "flops": 1e12, "bandwidth": 1e12},
    "eplb": {"slots": 3},
}


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [lrmoe.MoE(dim=8, expert_dim=12, num_experts=EXPERTS, top_k=2, bias=True) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 4)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(TOKENS, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def move_hot_spot(model: nn.Module) -> Callable[[int], None]:
    """Sends most tokens to one pair of experts, another one each step; returns what sets the step."""
    now = [0]

    def reroute(router: nn.Module, args: Any, routing: Routing) -> Routing:
        hot_K = torch.tensor([2 * now[0] % EXPERTS, (2 * now[0] + 1) % EXPERTS])
        is_hot_T1 = routing.topk_ids_TK.sum(1, keepdim=True) % 3 > 0
        return routing._replace(topk_ids_TK=torch.where(is_hot_T1, hot_K, routing.topk_ids_TK))

    for layer in model.modules():
        if isinstance(layer, lrmoe.MoE):
            layer.router.register_forward_hook(reroute)

    def set_step(step: int) -> None:
        now[0] = step

    return set_step


def train(
    model: nn.Module,
    config: LRMoEConfig,
    mine: slice,
    clip: Callable[[nn.Module], Tensor],
    ep: ExpertParallel | None,
    leave_moments: bool = False,
) -> tuple[list[float], list[float], Any, list[int]]:
    recal = lrmoe.attach(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    set_step = move_hot_spot(model)
    losses, norms, moves = [], [], []
    for step in range(STEPS):
        set_step(step)
        x_TD, y_TD = batch(step)
        loss = nn.functional.mse_loss(model(x_TD[mine]), y_TD[mine])
        optimizer.zero_grad()
        loss.backward()
        norms.append(clip(model).item())
        optimizer.step()
        recal.step()
        if ep is not None:
            ep.step(_WithoutState(optimizer) if leave_moments else optimizer)  # type: ignore[arg-type]
            moves.append(len(ep.policy.moves()) if hasattr(ep.policy, "moves") else 0)
        losses.append(loss.item())
    return losses, norms, recal, moves


class _WithoutState:
    """An optimizer that hides its moments."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.state: dict[Tensor, dict[str, Any]] = {}
        self.param_groups = optimizer.param_groups


def one_process(config: LRMoEConfig) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = make_model()
    losses, norms, *_ = train(
        model, config, slice(None), lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=False), None
    )
    return losses, norms, model.state_dict()


def one_rank(
    group: dist.ProcessGroup, name: str, config: LRMoEConfig, storage: Any, leave_moments: bool
) -> dict[str, Any]:
    policy = get(name, **POLICIES[name])
    ep = ExpertParallel(group, num_experts=EXPERTS, policy=policy, storage=storage, gradient_divisor=RANKS)
    model = parallelize(make_model(), ep)
    wrapped = DistributedDataParallel(model)
    share = TOKENS // RANKS
    mine = slice(group.rank() * share, (group.rank() + 1) * share)
    losses, norms, recal, moves = train(
        wrapped, config, mine, lambda m: clip_grad_norm_(m, 1.0, group=group), ep, leave_moments
    )
    return {
        "losses": losses,
        "norms": norms,
        "moves": moves,
        "state": model.state_dict(),
        "experts": [whole_experts(layer, ep, number) for number, layer in enumerate(list(model)[1:3])],
        "kept_share": global_metrics(recal, group)["kept_share"],
        "ownership": ep.ownership,
    }


def whole_experts(layer: Any, ep: ExpertParallel, number: int) -> dict[str, tuple[Any, Tensor]]:
    """This rank's parameters, and what of the whole they are."""
    held = range(0)
    if ep.ownership == "home":
        held = ep.local_experts
    elif ep.ownership == "placed":
        held = ep.policy.placement(number)[ep.rank]  # type: ignore[attr-defined]
    return {name: (list(held), weight.detach()) for name, weight in layer.experts.named_parameters()}


def put_together(told: list[dict[str, Any]], layer: int, name: str) -> Tensor:
    parts = [rank["experts"][layer][name] for rank in told]
    if told[0]["ownership"] == "sharded":
        return torch.cat([part for _, part in parts], dim=1)
    whole: dict[int, Tensor] = {}
    for held, part in parts:
        for expert, row in zip(held, part, strict=True):
            # All slots of an expert hold the same, bit for bit.
            assert torch.equal(whole.setdefault(expert, row), row)
    return torch.stack([whole[expert] for expert in range(EXPERTS)])


@pytest.mark.parametrize("storage", ["policy", "home"])
@pytest.mark.parametrize("name", POLICIES)
def test_parameters_after_five_steps_equal_one_process(name: str, storage: str) -> None:
    config = LRMoEConfig(drop=0.0)
    losses, norms, weights = one_process(config)
    told = run_world(RANKS, one_rank, name, config, storage, False)
    mean = [sum(step) / RANKS for step in zip(*(rank["losses"] for rank in told), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-12)
    for rank in told:
        assert rank["norms"] == pytest.approx(norms, rel=1e-9)
    for layer in (0, 1):
        for key in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"):
            wanted = weights[f"{layer + 1}.experts.{key}"]
            torch.testing.assert_close(put_together(told, layer, key), wanted, rtol=1e-12, atol=1e-12)
    for key, weight in weights.items():
        if ".experts." not in key:
            assert all(torch.equal(told[0]["state"][key], rank["state"][key]) for rank in told), key
            torch.testing.assert_close(told[0]["state"][key], weight, rtol=1e-12, atol=1e-12)
    if name in ("flexmoe", "smartmoe") and storage == "policy":
        assert sum(told[0]["moves"]) > 0, "the moving hot spot must make experts move"


@pytest.mark.parametrize("name", ["flexmoe", "smartmoe"])
def test_moments_left_behind_would_show(name: str) -> None:
    config = LRMoEConfig(drop=0.0)
    _, _, weights = one_process(config)
    told = run_world(RANKS, one_rank, name, config, "policy", True)
    parts = dict(zip(*(told[0]["experts"][1]["down_proj"]), strict=True))
    off = [(row - weights["2.experts.down_proj"][expert]).abs().max().item() for expert, row in parts.items()]
    assert max(off) > 1e-4


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_composes_with_a_drop(name: str) -> None:
    for rank in run_world(RANKS, one_rank, name, LRMoEConfig(drop=0.25), "policy", False):
        assert rank["kept_share"] == pytest.approx(0.75, abs=0.05)
        assert all(torch.isfinite(torch.tensor(rank["losses"])))


def sent_weights(group: dist.ProcessGroup, name: str) -> list[int]:
    """Bytes of weights that this rank sends for each of: two microbatches, an evaluation, a change past autograd."""
    policy = get(name, **POLICIES[name])
    ep = ExpertParallel(group, num_experts=EXPERTS, policy=policy)
    model = parallelize(make_model(), ep)
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.2))
    x_TD, y_TD = batch(group.rank())
    found = []

    def run(train: bool) -> Tensor:
        with torch.set_grad_enabled(train):
            out_TD = model(x_TD)
        if train:
            nn.functional.mse_loss(out_TD, y_TD).backward()
        found.append(ep.metrics()["sent_bytes"].get("weights from owners", 0))
        return out_TD.detach()

    run(train=True)
    run(train=True)
    before = run(train=False)
    for layer in list(model)[1:3]:
        for weight in layer.experts.parameters():  # type: ignore[union-attr]
            weight.data.mul_(1.5)
    after = run(train=False)
    assert not torch.allclose(before, after)
    assert recal.clock.step == 0
    return found


def test_symi_gathers_weights_once_a_step_and_laer_around_each_layer() -> None:
    for symi, laer in zip(run_world(RANKS, sent_weights, "symi"), run_world(RANKS, sent_weights, "laer"), strict=True):
        once = symi[0]
        assert symi == [once, 0, 0, once], "changed weights are seen even where autograd does not see the change"
        # Of two layers, the backward has the last one's weights still; an evaluation gathers each once.
        assert laer[0] == laer[1] == laer[2] * 3 // 2 == laer[3] * 3 // 2 > 0


def saved(group: dist.ProcessGroup, folder: str, name: str, storage: Any) -> str:
    ep = ExpertParallel(group, num_experts=EXPERTS, policy=get(name, **POLICIES[name]), storage=storage)
    model = parallelize(make_model(), ep)
    try:
        checkpoint.save(folder, step=1, model=model, policy=ep.policy, group=group)
    except ValueError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("name", ["smartmoe", "symi"])
def test_checkpoints_refuse_experts_that_are_not_at_home(name: str, tmp_path: Path) -> None:
    for answer in run_world(RANKS, saved, str(tmp_path / "refused"), name, "policy"):
        assert 'storage="home"' in answer
    assert not list(tmp_path.glob("refused/*"))
    assert run_world(RANKS, saved, str(tmp_path / "home"), name, "home") == ["saved"] * RANKS
