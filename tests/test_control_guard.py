"""The guard of an attached model: layers in which dropping costs too much train exactly for a while, and it is said."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.control.guard import Guard
from lrmoe.recalibration.guard import PAUSE, WINDOW

DIM = 8
# What dropping costs in the even layer lies above, in the uneven one below.
CONFIG = LRMoEConfig(drop=0.4, guard_variance=0.1, seed=2)
# As a state has it.
EVENT = {"step": 10, "layer": 0, "kind": "stopped", "value": 0.2, "limit": 0.1}


class Branches(nn.Module):
    """Two MoE layers side by side, so that what one drops does not change the other's gradients. Tokens are much alike
    in ``even``, where any that is dropped is missed, and of very different size in ``uneven``, where few count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.even, self.uneven = (lrmoe.MoE(dim=DIM, expert_dim=8, num_experts=3, top_k=2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        size = torch.exp(-0.5 * torch.arange(x.shape[0])).unsqueeze(1)
        return torch.cat([self.even(x), self.uneven(x * size)])


def tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.0 + 0.1 * torch.randn(24, DIM, generator=generator)


def backward(model: nn.Module, seed: int = 0) -> None:
    model.zero_grad()
    model(tokens(seed)).square().sum().backward()


def dropped(recal: lrmoe.Recalibrator, steps: int) -> Iterator[dict[int, bool]]:
    """Trains so many steps without an optimizer; for each, whether each layer dropped something."""
    for _ in range(steps):
        with lrmoe.recording() as calls:
            backward(recal._model, recal.clock.step)
        recal.step()
        yield {call.layer: bool((call.kept_TK.sum() < call.load_E.sum()).item()) for call in calls}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="lrmoe")
    return caplog


# --- what happens ------------------------------------------------------------------------------------------------


def test_a_layer_that_costs_too_much_rests_and_the_other_goes_on(said: pytest.LogCaptureFixture) -> None:
    recal = lrmoe.attach(Branches(), LRMoEConfig(**{**CONFIG.to_dict(), "warmup_steps": 3}))
    found = list(dropped(recal, 3 + WINDOW + PAUSE + WINDOW + 2))
    even = [step for step, layers in enumerate(found) if layers[0]]
    # A window behind the warm-up, and one after the rest.
    assert even == [*range(3, 13), *range(63, 73)]
    assert [layers[1] for layers in found] == [False] * 3 + [True] * (len(found) - 3)
    warnings = [record.getMessage() for record in said.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    for part in ("step 13:", "1 of 2 MoE layers", "guard_variance=0.1", "even (V*/sum R 0.", "for 50 steps"):
        assert part in warnings[0]
    assert "--guard-variance none" in warnings[0]
    assert "uneven (" not in warnings[0]
    assert "step 73:" in warnings[1]
    assert "for 100 steps" in warnings[1]
    assert "step 63: drops again, for now: even" in said.messages
    told = recal.metrics()["guard_events"]
    assert [(event["step"], event["layer"], event["kind"]) for event in told] == [
        (13, "even", "stopped"),
        (63, "even", "resumed"),
        (73, "even", "stopped"),
    ]
    assert told[1]["value"] is None


def test_a_resting_layer_has_the_exact_gradients_bit_for_bit() -> None:
    model = Branches()
    exact = copy.deepcopy(model)
    lrmoe.attach(exact, LRMoEConfig(drop=0.0))
    recal = lrmoe.attach(model, CONFIG)
    for step in range(WINDOW + 1):
        backward(model, step)
        backward(exact, step)
        same = {
            name: torch.equal(weight.grad, dict(exact.named_parameters())[name].grad)  # type: ignore[arg-type]
            for name, weight in model.named_parameters()
            if "experts" in name
        }
        resting = step == WINDOW
        assert all(equal == (resting and name.startswith("even")) for name, equal in same.items())
        recal.step()
    assert float(recal.layers["even"].drop) == 0.0
    assert float(recal.layers["uneven"].drop) == CONFIG.drop


def test_the_metrics_tell() -> None:
    recal = lrmoe.attach(Branches(), CONFIG)
    for _ in dropped(recal, WINDOW - 1):
        # However often somebody reads, the guard has sums of its own.
        assert recal.metrics()["guarded_layers"] == 0
    for _ in dropped(recal, 1):
        pass
    told = recal.metrics(reset=False)
    (event,) = told["guard_events"]
    assert event.items() >= {"step": WINDOW, "layer": "even", "kind": "stopped", "limit": 0.1}.items()
    # The mean over ten steps of what the log shows: near the ratio of their sums.
    assert event["value"] > 0.1
    assert told["guarded_layers"] == 1
    # Held from now on; in the last step both dropped.
    assert [(told["layers"][name]["guarded"], told["layers"][name]["drop"]) for name in ("even", "uneven")] == [
        (True, 0.4),
        (False, 0.4),
    ]
    assert (told["drop"], told["scheduled_drop"]) == (0.4, 0.4)
    assert recal.metrics()["guard_events"] == told["guard_events"]
    assert recal.metrics()["guard_events"] == []
    json.dumps(told)
    for _ in dropped(recal, 1):
        pass
    later = recal.metrics()
    assert [later["layers"][name]["drop"] for name in ("even", "uneven")] == [0.0, 0.4]
    assert (later["drop"], later["scheduled_drop"]) == (0.2, 0.4)


def test_topq_is_judged_by_its_dropped_tail(said: pytest.LogCaptureFixture) -> None:
    config = LRMoEConfig(drop=0.4, selector="topq", guard_variance=None, guard_tail=0.05)
    recal = lrmoe.attach(Branches(), config)
    found = list(dropped(recal, WINDOW + 1))
    assert found[-1] == {0: False, 1: True}
    told = recal.metrics()
    (event,) = told["guard_events"]
    assert event["layer"] == "even"
    assert event["limit"] == 0.05
    assert 0.05 < event["value"] < 0.4
    assert "guard_tail=0.05" in said.text
    assert "even (dropped share of sum R 0." in said.text


def test_all_layers_at_once_are_one_line(said: pytest.LogCaptureFixture) -> None:
    guard = Guard(CONFIG, [f"layer{i}" for i in range(10)])
    sums_L3 = torch.tensor([[1.0, 0.8, 0.2]] * 10, dtype=torch.float64)
    assert [guard.after_step(sums_L3, step + 1) for step in range(WINDOW)] == [False] * (WINDOW - 1) + [True]
    (line,) = said.messages
    assert "10 of 10 MoE layers" in line
    assert line.count("(V*/sum R 0.2, for 50 steps)") == 8
    assert "layer7 (V*/sum R 0.2, for 50 steps) and 2 more." in line


@pytest.mark.parametrize(
    "config",
    [LRMoEConfig(drop=0.0), LRMoEConfig(drop=0.4, guard_variance=None, guard_tail=None)],
)
def test_without_a_limit_or_a_drop_nothing_is_watched(config: LRMoEConfig) -> None:
    recal = lrmoe.attach(Branches(), config)
    for _ in dropped(recal, WINDOW + 1):
        assert all(control.meter._untaken_sums_3 is None for control in recal.layers.values())
    assert recal.metrics()["guarded_layers"] == 0
    assert recal.state_dict()["guard"]["window"] == []


# --- gradients that are no numbers -------------------------------------------------------------------------------


def test_a_step_that_overflowed_hides_nothing_and_says_nothing() -> None:
    def flawed(steps: set[int]) -> list[dict[str, Any]]:
        model = Branches()
        recal = lrmoe.attach(model, CONFIG)
        for step in range(len(steps) + WINDOW):
            (model(tokens(step)).square().sum() * (torch.inf if step in steps else 1.0)).backward()
            recal.step()
        events: list[dict[str, Any]] = recal.metrics()["guard_events"]
        return events

    assert [event["step"] for event in flawed({0, 4})] == [WINDOW]
    # A window without one finite step decides nothing; the next does.
    assert [event["step"] for event in flawed(set(range(WINDOW)))] == [2 * WINDOW]


# --- state -------------------------------------------------------------------------------------------------------


def train(model: nn.Module, recal: lrmoe.Recalibrator, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(steps):
        backward(model, recal.clock.step)
        optimizer.step()
        recal.step()


@pytest.mark.parametrize(
    ("cut", "steps"), [(4, WINDOW + 2), (WINDOW, WINDOW + 2), (WINDOW + 7, 2 * WINDOW + PAUSE + 2)]
)
def test_a_resumed_run_is_the_uninterrupted_one(cut: int, steps: int) -> None:
    """Cut in the first window, at its end and in the rest; the last one to where the layer has tried again."""
    whole = Branches()
    recal = lrmoe.attach(whole, CONFIG)
    train(whole, recal, steps)
    events = recal.metrics()["guard_events"]
    assert [event["kind"] for event in events] == ["stopped", "resumed", "stopped"][: 1 if steps < PAUSE else 3]
    first = Branches()
    recal = lrmoe.attach(first, CONFIG)
    train(first, recal, cut)
    state = json.loads(json.dumps(recal.state_dict(), allow_nan=False))
    again = Branches()
    again.load_state_dict(first.state_dict())
    recal = lrmoe.attach(again, CONFIG)
    recal.load_state_dict(state)
    train(again, recal, steps - cut)
    assert recal.metrics()["guard_events"] == events
    for (name, found), wanted in zip(again.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, wanted), name


def test_states_from_before_the_guard_and_of_another_limit_are_taken() -> None:
    recal = lrmoe.attach(Branches(), CONFIG)
    for _ in dropped(recal, WINDOW + 3):
        pass
    state = recal.state_dict()
    unguarded = lrmoe.attach(Branches(), LRMoEConfig(**{**CONFIG.to_dict(), "guard_variance": None}))
    unguarded.load_state_dict(state)
    assert unguarded.metrics()["guarded_layers"] == 0
    del state["guard"]
    recal.load_state_dict(state)
    assert recal.clock.step == WINDOW + 3
    assert recal.metrics()["guarded_layers"] == 0
    assert float(recal.layers["even"].drop) == CONFIG.drop


@pytest.mark.parametrize(
    "change",
    [
        {"rest": [0]},
        {"rest": [0, 7]},
        {"pause": [50, "long"]},
        {"window": [[1.0]]},
        {"window": [[[1.0, 1.0, 1.0]] * 2] * WINDOW},
        {"window": [[[1.0, 1.0, 10**400]] * 2]},
        {"events": [{**EVENT, "layer": 9}]},
        {"events": [{**EVENT, "layer": -1}]},
        {"events": [{**EVENT, "kind": "paused"}]},
        {"events": [{**EVENT, "step": "ten"}]},
        {"events": [{**EVENT, "limit": None}]},
        {"events": [{"layer": 0}]},
        {"events": 1},
    ],
)
def test_a_broken_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    recal = lrmoe.attach(Branches(), CONFIG)
    resting = recal.state_dict()
    resting["guard"].update(rest=[PAUSE, 0], pause=[2 * PAUSE, PAUSE], window=[[[1.0, 0.5, 0.25]] * 2])
    recal.load_state_dict(resting)
    before = recal.state_dict()
    broken = copy.deepcopy(before)
    broken["step"] = 3
    broken["guard"].update(change)
    with pytest.raises(ValueError, match="not a recalibrator's state: its guard cannot be read"):
        recal.load_state_dict(broken)
    assert recal.state_dict() == before


def test_a_new_start_begins_anew() -> None:
    recal = lrmoe.attach(Branches(), CONFIG)
    for _ in dropped(recal, WINDOW + 5):
        pass
    recal.set_step(0)
    assert float(recal.layers["even"].drop) == CONFIG.drop
    found = list(dropped(recal, WINDOW + 1))
    assert [layers[0] for layers in found] == [True] * WINDOW + [False]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_goes_on_with_its_guard(duplicate: Any) -> None:
    model = Branches()
    recal = lrmoe.attach(model, CONFIG)
    for _ in dropped(recal, WINDOW + 4):
        pass
    twin = duplicate(model)._lrmoe_recalibrator
    assert twin.state_dict() == recal.state_dict()
    assert [float(control.drop) for control in twin.layers.values()] == [0.0, 0.4]
    assert not any(layers[0] for layers in dropped(twin, WINDOW - 4))
    # Six more steps make a window: sums of the copy's own backward passes have come in.
    assert twin.state_dict()["guard"]["rest"] == [PAUSE - WINDOW, 0]
    # Not moved along with its copy.
    assert recal.clock.step == WINDOW + 4


# --- compiled ----------------------------------------------------------------------------------------------------


def test_a_compiled_model_rests_without_recompiling() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = Branches()
    recal = lrmoe.attach(model, CONFIG)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    kept, graphs = [], []
    for step in range(WINDOW + 2):
        compiled(tokens(step)).square().sum().backward()
        recal.step()
        graphs.append(counters["stats"]["unique_graphs"])
        kept.append([round(read["kept_share"], 1) for read in recal.metrics()["layers"].values()])
    assert kept == [[0.6, 0.6]] * WINDOW + [[1.0, 0.6]] * 2
    assert graphs == graphs[:1] * (WINDOW + 2)
