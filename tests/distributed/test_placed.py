"""Experts that a policy places: which parameters go with a move, however layers are numbered, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.test_policies_train import EXPERTS, POLICIES, TOKENS, batch, make_model, move_hot_spot, whole_experts
from distributed.world import run_world
from torch import Tensor, nn

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.balance import get
from lrmoe.parallel import ExpertParallel, is_expert, parallelize, total_norm

RANKS = 2
STEPS = 4


def models() -> list[nn.Module]:
    """Two of two layers each, without a drop and without a recalibrator, so that all layers have the number 0."""
    found: list[nn.Module] = []
    for _ in range(2):
        model = make_model()
        for layer in model:
            if isinstance(layer, lrmoe.MoE):
                layer.control.clock.config = LRMoEConfig(drop=0.0)
                layer.control.clock.move_to(step=0)
        found.append(model)
    with torch.no_grad():
        found[1][3].weight.mul_(2.0)  # type: ignore[index]
    return found


def train(pair: list[nn.Module], mine: slice, ep: ExpertParallel | None) -> None:
    # The experts' optimizer is another than that of the rest.
    experts = [weight for model in pair for name, weight in model.named_parameters() if ".experts." in name]
    others = [weight for model in pair for name, weight in model.named_parameters() if ".experts." not in name]
    optimizers = [torch.optim.AdamW(experts, lr=1e-2, amsgrad=True), torch.optim.SGD(others, lr=1e-2)]
    set_steps = [move_hot_spot(model) for model in pair]
    for step in range(STEPS):
        for number, (model, set_step) in enumerate(zip(pair, set_steps, strict=True)):
            set_step(step + 2 * number)
            x_TD, y_TD = batch(step)
            nn.functional.mse_loss(model(x_TD[mine]), y_TD[mine]).backward()
        for weight in others if ep is not None else []:
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
            weight.grad /= RANKS
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if ep is not None:
            ep.step(*optimizers)


def one_rank(group: dist.ProcessGroup, name: str) -> tuple[list[dict[str, tuple[Any, Tensor]]], int]:
    policy = get(name, **{**POLICIES[name], **({"slots": 5} if name == "flexmoe" else {})})
    ep = ExpertParallel(group, num_experts=EXPERTS, policy=policy, gradient_divisor=RANKS)
    pair = [parallelize(model, ep) for model in models()]
    before = [policy.placement(number) for number in range(4)]  # type: ignore[attr-defined]
    share = TOKENS // RANKS
    train(pair, slice(group.rank() * share, (group.rank() + 1) * share), ep)
    layers = [layer for model in pair for layer in model.modules() if isinstance(layer, lrmoe.MoE)]
    moved = [policy.placement(number) != before[number] for number in range(4)]  # type: ignore[attr-defined]
    return [whole_experts(layer, ep, number) for number, layer in enumerate(layers)], sum(moved)


@pytest.mark.parametrize("name", ["flexmoe", "smartmoe"])
def test_layers_of_several_models_without_a_recalibrator_move_each_on_its_own(name: str) -> None:
    pair = models()
    train(pair, slice(None), None)
    wanted = [layer.experts for model in pair for layer in model.modules() if isinstance(layer, lrmoe.MoE)]
    for layers, moved in run_world(RANKS, one_rank, name):
        assert moved >= 3
        for layer, experts in zip(layers, wanted, strict=True):
            for key, (held, part) in layer.items():
                weight = getattr(experts, key).detach()
                torch.testing.assert_close(part, weight[torch.tensor(held)], rtol=1e-10, atol=1e-12)


def refused(group: dist.ProcessGroup, how: str) -> tuple[str, bool, int]:
    """(the error, whether nothing has changed, how many experts move when all is mended)."""
    ep = ExpertParallel(group, num_experts=EXPERTS, policy=get("smartmoe", interval=1), gradient_divisor=RANKS)
    model = parallelize(make_model(), ep)
    x_TD, y_TD = batch(group.rank())
    if how == "copy":
        # The copy's experts would stay where they are, while the policy's move.
        try:
            copy.deepcopy(model)(x_TD)
        except ValueError as error:
            return str(error), True, 1
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters)
    other: list[torch.optim.Optimizer] = []
    if how == "not all":
        other = [torch.optim.SGD([weight for weight in parameters if not is_expert(weight)])]
    elif how == "factors":
        other = [torch.optim.Adafactor(parameters)]
    set_step = move_hot_spot(model)
    set_step(1)
    nn.functional.mse_loss(model(x_TD), y_TD).backward()
    for one in other or [optimizer]:
        one.step()
    before = [weight.detach().clone() for weight in parameters], [ep.policy.placement(n) for n in (0, 1)]  # type: ignore[attr-defined]
    try:
        ep.step(*other)
    except ValueError as error:
        same = all(map(torch.equal, before[0], parameters))
        same = same and before[1] == [ep.policy.placement(n) for n in (0, 1)]  # type: ignore[attr-defined]
        ep.step(optimizer)
        return str(error), same, len(ep.policy.moves())  # type: ignore[attr-defined]
    return "", False, 0


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("none", "call step(optimizer)"),
        ("not all", "in no optimizer given to ExpertParallel.step"),
        ("factors", "Adafactor keeps 'col_var' of shape (1, 24)"),
        ("copy", "is not registered"),
    ],
)
def test_what_cannot_move_along_is_refused_before_anything_moves(how: str, text: str) -> None:
    for message, unchanged, moves in run_world(RANKS, refused, how):
        assert text in message
        assert unchanged
        assert moves > 0


def one_rank_alone(group: dist.ProcessGroup) -> dict[str, list[tuple[str, str]]]:
    """(class of the error, its message) of each attempt in which rank 1 does otherwise than rank 0, and whether nothing
    has moved then; at last all do the same."""
    ep = ExpertParallel(group, num_experts=EXPERTS, policy=get("smartmoe", interval=1), timeout_s=10.0)
    model = parallelize(make_model(), ep)
    first = copy.deepcopy(ep.state_dict())
    adam, sgd = torch.optim.Adam(model.parameters(), lr=0.0), torch.optim.SGD(model.parameters())
    move_hot_spot(model)(1)
    x_TD, y_TD = batch(group.rank())
    told: dict[str, list[tuple[str, str]]] = {}

    def forward() -> None:
        nn.functional.mse_loss(model(x_TD), y_TD).backward()

    def attempt(name: str, own: Callable[[], Any], of_rank_1: Callable[[], Any]) -> None:
        before = [ep.policy.placement(number) for number in (0, 1)]  # type: ignore[attr-defined]
        try:
            (of_rank_1 if ep.rank == 1 else own)()
        except (RuntimeError, ValueError) as error:
            told.setdefault(name, []).append((type(error).__name__, str(error)))
        assert before == [ep.policy.placement(number) for number in (0, 1)] or name in ("all", "loads")  # type: ignore[attr-defined]

    forward()
    adam.step()
    attempt("no optimizer", lambda: ep.step(adam), ep.step)
    attempt("another optimizer", lambda: ep.step(adam), lambda: ep.step(sgd))
    attempt("a forward", lambda: ep.step(adam), forward)
    attempt("all", lambda: ep.step(adam), lambda: ep.step(adam))
    assert ep.policy.moves()  # type: ignore[attr-defined]
    state = copy.deepcopy(ep.state_dict())
    attempt("loads", lambda: None, lambda: ep.load_state_dict(first))
    attempt("loaded", forward, forward)
    attempt("loads", lambda: None, lambda: ep.load_state_dict(state))
    attempt("all", forward, forward)
    return told


def test_what_one_rank_alone_does_is_told_on_all() -> None:
    own, other = run_world(RANKS, one_rank_alone)
    assert other.pop("no optimizer")[0][0] == "ValueError"
    ((kind, text),) = own.pop("no optimizer")
    assert kind == "RuntimeError"
    assert "cannot move on rank 1" in text
    for name, message in (
        ("another optimizer", "optimizers that keep different things"),
        ("a forward", "rank 0 ends its step (ExpertParallel.step), while rank 1 trains on layer 0"),
        ("loaded", "the state of the policy is not the same on all ranks"),
    ):
        for told in (own, other):
            ((kind, text),) = told.pop(name)
            assert kind == "RuntimeError", (name, text)
            assert message in text, (name, text)
    assert own == other == {}


def same_loads_again(group: dist.ProcessGroup) -> tuple[list[Tensor], list[int]]:
    """The outputs of one batch before and after its experts have moved, and after the first placement is loaded again,
    at a position that nobody moves on; and the plans that the policy was told of until then."""
    ep = ExpertParallel(group, num_experts=4, policy=get("smartmoe", interval=1), config=LRMoEConfig(drop=0.0))
    first = copy.deepcopy(ep.state_dict())
    generator = torch.Generator().manual_seed(0)
    every = [torch.randn(*shape, generator=generator) for shape in ((4, 8, 4), (4, 4, 4))]
    owned = [nn.Parameter(ep.local(weight).clone()) for weight in every]
    ep.register(0, *owned)
    x_TD, alpha_TK = torch.randn(8, 4, generator=generator), torch.ones(8, 1)
    ids_TK = torch.tensor([0, 0, 0, 1, 1, 1, 2, 3]).unsqueeze(1)
    outputs, plans = [], []
    for turn in range(3):
        out_TD = ep.routed_experts(x_TD, ids_TK, alpha_TK, *owned)
        out_TD.sum().backward()
        outputs.append(out_TD.detach())
        plans.append(ep.metrics()["plans"])
        if turn == 0:
            ep.step(torch.optim.SGD(owned, lr=0.0))
            assert ep.policy.moves()  # type: ignore[attr-defined]
        elif turn == 1:
            ep.load_state_dict(first)
            with torch.no_grad():
                for weight, whole in zip(owned, every, strict=True):
                    weight.copy_(ep.local(whole))
    return outputs, plans


def test_the_same_loads_after_a_move_are_planned_anew() -> None:
    for outputs, plans in run_world(RANKS, same_loads_again):
        assert all(torch.equal(outputs[0], other) for other in outputs)
        assert plans == [1, 1, 1]


def norm_after_loading(group: dist.ProcessGroup) -> tuple[float, float]:
    """Of gradients 0, 1, ... of the experts, where the slots have been filled by moves and by loading."""
    norms = []
    state: dict[str, Any] = {}
    for loads in (False, True):
        policy = get("flexmoe", slots=5, threshold=1.0)
        ep = ExpertParallel(group, num_experts=EXPERTS, policy=policy, gradient_divisor=RANKS)
        model = parallelize(make_model(), ep)
        if loads:
            ep.load_state_dict(state)
        else:
            x_TD, y_TD = batch(0)
            move_hot_spot(model)(3)
            nn.functional.mse_loss(model(x_TD), y_TD).backward()
            ep.step(torch.optim.SGD(model.parameters()))
            assert policy.moves()  # type: ignore[attr-defined]
            state = ep.state_dict()
        for number, layer in enumerate(list(model)[1:3]):
            for weight in layer.experts.parameters():  # type: ignore[union-attr]
                held = policy.placement(number)[ep.rank]  # type: ignore[attr-defined]
                weight.grad = torch.stack([torch.full_like(row, e) for e, row in zip(held, weight, strict=True)])
        norms.append(float(total_norm([weight for weight in model.parameters() if is_expert(weight)], group=group)))
    return norms[0], norms[1]


def test_a_loaded_placement_counts_each_expert_once() -> None:
    numbers = sum(weight[0].numel() for layer in list(make_model())[1:3] for weight in layer.experts.parameters())
    once = (numbers * sum(expert**2 for expert in range(EXPERTS))) ** 0.5
    for norms in run_world(RANKS, norm_after_loading):
        assert norms == pytest.approx((once, once))


def pickled(group: dist.ProcessGroup) -> str:
    model = parallelize(make_model(), ExpertParallel(group, num_experts=EXPERTS))
    try:
        pickle.dumps(model)
    except TypeError as error:
        return str(error)
    return ""


def test_a_parallel_model_says_how_to_save_it() -> None:
    for message in run_world(RANKS, pickled):
        assert "save model.state_dict()" in message
