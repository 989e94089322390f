"""Faults that only several ranks can show: what goes wrong is told as what it is, on every rank, and nobody hangs."""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.world import run_world
from torch import Tensor, nn

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.experts.meter import BY_SEQUENCE
from lrmoe.parallel import ExpertParallel, checkpoint, clip_grad_norm_, global_metrics, parallelize
from lrmoe.parallel.meeting import barrier


def engine_step(group: dist.ProcessGroup, default: AbstractContextManager[Any]) -> list[Any]:
    """The engine of each kind through two steps, with what is asked of it around them."""
    told: list[Any] = []
    policies: list[tuple[Any, dict[str, Any]]] = [
        *((name, {}) for name in ("lrmoe", "ultraep", "symi", "laer", "eplb")),
        ("eplb", {"storage": "home"}),
    ]
    for policy, options in policies:
        config = LRMoEConfig(drop=0.4, remainder="mean")
        torch.manual_seed(0)
        model = lrmoe.MoE(dim=8, expert_dim=6, num_experts=4, top_k=2, selection_bias=True)
        x_TD = torch.randn(20 + group.rank(), 8) + 1.0
        mask_T = torch.arange(20 + group.rank()) < 18
        with default:
            ep = ExpertParallel(group, num_experts=4, policy=policy, config=config, gradient_divisor=2, **options)
            parallelize(model, ep)
            recal = lrmoe.attach(model, config)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
            for _ in range(2):
                optimizer.zero_grad()
                model(x_TD, mask_T).square().mean().backward()
                for parameter in model.router.parameters():
                    parameter.grad = ep.add_up(parameter.grad, what="router")
                norm = clip_grad_norm_(model, 1.0, group=group)
                optimizer.step()
                recal.step()
                ep.step(optimizer)
            metrics = global_metrics(recal, group)
            ep.load_state_dict(ep.state_dict())
            balance = ep.metrics()
            # The first meeting of two engines of a group is longer where there was one before.
            del balance["sent_bytes"]["engines"]
        told.append([float(norm), metrics["kept_share"], balance, *(p.detach() for p in model.parameters())])
    return told


def engine_in_both(group: dist.ProcessGroup) -> None:
    wanted = engine_step(group, nullcontext())
    found = engine_step(group, torch.device("meta"))
    for before, after in zip(wanted, found, strict=True):
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_l5_the_engine_over_ranks() -> None:
    run_world(2, engine_in_both)


class Trained:
    """Two layers of four experts over the ranks, attached, and what a step of training does to them."""

    def __init__(self, group: dist.ProcessGroup, policy: str = "lrmoe", **options: Any) -> None:
        torch.manual_seed(0)
        config = LRMoEConfig(drop=0.4)
        layers = [lrmoe.MoE(dim=6, expert_dim=4, num_experts=4, top_k=2, config=config) for _ in range(2)]
        self.model = nn.Sequential(*layers)
        self.group = group
        self.ep = ExpertParallel(group, num_experts=4, policy=policy, config=config, **options)
        parallelize(self.model, self.ep)
        self.recal = lrmoe.attach(self.model, config)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x_TD = torch.randn(12, 6)

    def forward(self) -> Tensor:
        loss: Tensor = self.model(self.x_TD).square().mean()
        return loss

    def train(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.recal.step()
        self.ep.step(self.optimizer)

    def evaluate(self) -> None:
        self.model.eval()
        try:
            with torch.no_grad():
                self.model(self.x_TD)
        finally:
            self.model.train()

    def evaluate_with_gradients(self) -> None:
        self.model.eval()
        try:
            self.model(self.x_TD)
        finally:
            self.model.train()

    def without_gradients(self) -> None:
        with torch.no_grad():
            self.model(self.x_TD)

    def second_layer(self) -> None:
        self.model[1](self.x_TD)

    def second_microbatch(self) -> None:
        self.recal.clock.move_to(step=self.recal.clock.step, microbatch=5)
        self.forward()

    def refused(self) -> None:
        self.ep.routed_experts(None, None, None, None, None)  # type: ignore[arg-type]

    def metrics(self) -> None:
        global_metrics(self.recal, self.group)

    def clip(self) -> None:
        clip_grad_norm_(self.model, 1.0, group=self.group)

    def guard(self) -> None:
        self.ep.add_up(torch.zeros(2, 3), what="guard")

    def save(self) -> None:
        folder = Path("never-written")
        checkpoint.save(folder, step=0, model=self.model, group=self.group)

    def wait(self) -> None:
        barrier(self.group, what="the end")


TRAINS = "trains on layer 0 (step 1, microbatch 0)"
METRICS = "asks for global metrics (global_metrics)"
NORM = "takes the norm of all gradients (clip_grad_norm_, total_norm)"
# What rank 0 does while the others do something else, and what every rank is told of both.
ASTRAY: list[tuple[str, str, str, str]] = [
    ("forward", "evaluate", TRAINS, "evaluates layer 0"),
    (
        "forward",
        "evaluate_with_gradients",
        TRAINS,
        "evaluates layer 0 with gradients, in evaluation mode or without lrmoe.attach",
    ),
    ("forward", "without_gradients", TRAINS, "runs layer 0 without gradients (step 1, "),
    ("forward", "second_layer", TRAINS, "trains on layer 1 (step 1, "),
    ("forward", "second_microbatch", TRAINS, "trains on layer 0 (step 1, microbatch"),
    ("forward", "metrics", TRAINS, METRICS),
    ("forward", "clip", TRAINS, NORM),
    ("forward", "guard", TRAINS, "ends its step (Recalibrator.step)"),
    ("forward", "save", TRAINS, "saves a checkpoint"),
    ("forward", "wait", TRAINS, "is in 'the end'"),
    ("evaluate", "metrics", "evaluates layer 0", METRICS),
    ("metrics", "clip", METRICS, NORM),
    ("clip", "guard", NORM, "ends its step (Recalibrator.step)"),
    ("save", "metrics", "saves a checkpoint", METRICS),
    ("metrics", "refused", METRICS, "was given arguments that had to be refused, see the error there"),
]


def go_astray(group: dist.ProcessGroup, before: int) -> list[tuple[str, str, float]]:
    """Each pair of different things, after ``before`` steps of training together; then they can train on."""
    told = []
    for here, there, *_ in ASTRAY:
        run = Trained(group)
        for _ in range(before):
            run.train()
        start = time.monotonic()
        try:
            getattr(run, here if group.rank() == 0 else there)()
        except (RuntimeError, ValueError) as error:
            told.append((type(error).__name__, str(error), time.monotonic() - start))
        else:
            told.append(("", "", 0.0))
        run.recal.set_step(before)
        run.train()
    return told


def assert_told(told: list[list[tuple[str, str, float]]], ranks: int) -> None:
    others = f"ranks {', '.join(map(str, range(1, ranks)))}"
    for place, (here, there, first, second) in enumerate(ASTRAY):
        for rank, answers in enumerate(told):
            kind, text, seconds = answers[place]
            if there == "refused" and rank:
                assert kind == "ValueError", (here, there, text)
                continue
            assert kind in ("RuntimeError", "CheckpointError"), (here, there, rank, kind, text)
            assert f"rank 0 {first}" in text, (here, there, rank, text)
            verb, _, rest = second.partition(" ")
            several = f"{others} { {'is': 'are', 'was': 'were'}.get(verb, verb.removesuffix('s')) } {rest}"
            assert (f"rank 1 {second}" if ranks == 2 else several) in text, (here, there, rank, text)
            assert seconds < 10


@pytest.mark.parametrize("ranks", [2, 3])
def test_l7_ranks_in_different_calls_are_told_who_is_where(ranks: int) -> None:
    assert_told(run_world(ranks, go_astray, 1), ranks)


def differentiate_oddly(group: dist.ProcessGroup) -> list[str]:
    """What each way says, of the loss alone and of a loss whose gradient has a graph of its own."""
    run = Trained(group)
    weights = list(run.model.parameters())
    told = []
    for wanted_from in (weights, [run.x_TD.requires_grad_()]):
        gradients = torch.autograd.grad(run.forward(), weights, create_graph=True)
        try:
            torch.autograd.grad(sum(one.square().sum() for one in gradients), wanted_from, allow_unused=True)
        except RuntimeError as error:
            told.append(str(error))
    run.x_TD.requires_grad_(False)
    # create_graph alone changes no gradient.
    run.recal.set_step(1)
    wanted = torch.autograd.grad(run.forward(), weights)
    run.recal.set_step(1)
    found = torch.autograd.grad(run.forward(), weights, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    parameters = {name: one.detach() for name, one in run.model.named_parameters()}

    def loss(own: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(run.model, own, (run.x_TD,)).sum()
        return out

    for attempt in (
        lambda: torch.func.grad(loss)(parameters),
        lambda: torch.func.jvp(loss, (parameters,), (parameters,)),
        lambda: torch.func.grad(
            lambda x_TD: run.ep.routed_experts(
                x_TD, torch.zeros(12, 2, dtype=torch.int64), torch.ones(12, 2), *list(run.model[0].experts.parameters())
            ).sum()
        )(run.x_TD),
    ):
        try:
            attempt()
        except RuntimeError as error:
            told.append(str(error))
    run.train()
    return told


def test_l6_a_second_derivative_over_ranks_is_refused_as_on_one_process() -> None:
    once = "routed_experts can be differentiated once"
    transformed = "layer 0 cannot run under torch.func"
    for told in run_world(2, differentiate_oddly):
        assert [text.split(":")[0].split(" (")[0] for text in told] == [
            once,
            once,
            transformed,
            transformed,
            "ExpertParallel.routed_experts cannot run under torch.func",
        ]


class OfSequences(nn.Module):
    """Takes what a language model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.moe = lrmoe.MoE(dim=8, expert_dim=6, num_experts=4, top_k=2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.moe(self.embed(input_ids))
        return out


def sequences_of_ranks(group: dist.ProcessGroup, drop: float) -> None:
    """Each rank tells what its own sequences keep; together they are means over the ranks."""
    torch.manual_seed(0)
    config = LRMoEConfig(drop=drop)
    model = OfSequences()
    parallelize(model, ExpertParallel(group, num_experts=4, config=config))
    recal = lrmoe.attach(model, config)
    # Of the second rank's batch one sequence is empty.
    lengths = torch.tensor([[7, 3, 12], [12, 0, 5], [1, 1, 1]][group.rank()])
    mask = torch.arange(12) < lengths[:, None]
    ids = torch.randint(0, 16, (3, 12), generator=torch.Generator().manual_seed(group.rank()))
    with lrmoe.recording() as calls:
        model(ids, mask).square().sum().backward()
    kept_BS = calls[0].kept_TK.sum(1).view(3, 12)
    shares = [int(kept) / int(2 * length) for kept, length in zip(kept_BS.sum(1), lengths, strict=True) if length]
    wanted = [min(shares), statistics.median(shares), max(shares)]
    own = recal.metrics(reset=False)
    assert [own[key] for key in BY_SEQUENCE] == pytest.approx(wanted)
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, wanted, group=group)
    told = global_metrics(recal, group)
    assert [told[key] for key in BY_SEQUENCE] == pytest.approx(torch.tensor(of_ranks).mean(0).tolist())
    assert drop == 0.0 or wanted[0] < wanted[-1] or group.rank() == 2


@pytest.mark.parametrize(("world", "drop"), [(1, 0.4), (2, 0.4), (3, 0.4), (2, 0.0)])
def test_s9_sequences_of_several_ranks(world: int, drop: float) -> None:
    run_world(world, sequences_of_ranks, drop)


def move_uneven(group: dist.ProcessGroup) -> tuple[int, list[list[int]], Tensor]:
    """How many experts moved in two steps, the slots that each rank then has, and what an evaluation gives."""
    torch.manual_seed(0)
    model = lrmoe.MoE(dim=8, expert_dim=6, num_experts=5, top_k=2)
    policy = lrmoe.balance.get("smartmoe", interval=1)
    config = LRMoEConfig(drop=0.0)
    ep = ExpertParallel(group, num_experts=5, policy=policy, config=config, gradient_divisor=group.size())
    parallelize(model, ep)
    recal = lrmoe.attach(model, config)
    optimizer = torch.optim.SGD(model.experts.parameters(), lr=1e-2, momentum=0.9)
    x_TD, moved = torch.randn(24, 8) + 1.0, 0
    hot_K = torch.tensor([0, 1])
    for _ in range(2):
        # Both on the first rank, so that one of them goes to the other.
        routing = model.router.register_forward_hook(
            lambda router, args, routing: routing._replace(topk_ids_TK=hot_K.expand(24, 2))
        )
        optimizer.zero_grad()
        model(x_TD).square().mean().backward()
        routing.remove()
        optimizer.step()
        recal.step()
        ep.step(optimizer)
        moved += len(policy.moves())
    with torch.no_grad():
        out_TD = model.eval()(x_TD)
    return moved, [list(slots) for slots in policy.placement(0)], out_TD


def test_experts_move_between_ranks_that_hold_different_numbers_of_them() -> None:
    (whole,) = run_world(1, move_uneven)
    assert whole[0] == 0
    for moved, slots, out_TD in run_world(2, move_uneven):
        assert moved > 0
        assert sorted(map(len, slots)) == [2, 3]
        assert sum(0 in own or 1 in own for own in slots) == 2
        torch.testing.assert_close(out_TD, whole[2])
