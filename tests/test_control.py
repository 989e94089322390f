"""attach() and the Recalibrator on models of lrmoe.MoE layers."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import sys
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lrmoe
from lrmoe.control.calls import read_tokens

CONFIG = lrmoe.LRMoEConfig(drop=0.4)


class Model(nn.Module):
    """Two MoE layers with something dense in between; takes what a language model takes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape = {"dim": 8, "expert_dim": 8, "num_experts": 4, "top_k": 2}
        self.embed = nn.Embedding(16, 8)
        self.first = lrmoe.MoE(**shape, **options)
        self.dense = nn.Linear(8, 8)
        self.second = lrmoe.MoE(**shape, **options)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        x = x + self.first(x)
        return self.second(self.dense(x))


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 16, shape or (3, 10), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, ids: Tensor | None = None, **kwargs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens() if ids is None else ids, **kwargs).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# --- position ----------------------------------------------------------------------------------------------------


def test_layers_are_numbered_in_model_order() -> None:
    recal = lrmoe.attach(Model(), CONFIG)
    assert {name: control.layer for name, control in recal.layers.items()} == {"first": 0, "second": 1}
    assert list(recal.modules()) == ["first", "second"]
    assert recal.config is CONFIG


def test_only_training_forwards_are_microbatches() -> None:
    model = Model()
    recal = lrmoe.attach(model, CONFIG)
    with lrmoe.recording() as calls:
        train(model)
        with torch.no_grad():
            model(tokens())
        model.eval()
        model(tokens())
        model.train()
        train(model)
        recal.step()
        train(model)
    assert [(c.step, c.microbatch) for c in calls if c.layer == 0] == [(0, 0), (0, 1), (1, 0)]


def test_same_seed_same_gradients_and_another_seed_others() -> None:
    def gradients(seed: int) -> dict[str, Tensor]:
        model = Model()
        lrmoe.attach(model, lrmoe.LRMoEConfig(drop=0.4, seed=seed))
        return train(model)

    first, again, other = gradients(0), gradients(0), gradients(1)
    assert all(torch.equal(grad, again[name]) for name, grad in first.items())
    assert not torch.equal(first["first.experts.down_proj"], other["first.experts.down_proj"])


def test_an_optimizer_moves_the_recalibrator() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recal = lrmoe.attach(model, CONFIG, optimizer=optimizer)
    assert recal.steps_with_optimizer
    for _ in range(3):
        train(model)
        optimizer.step()
    assert recal.clock.step == 3
    recal.detach()
    optimizer.step()
    assert recal.clock.step == 3


def test_the_schedule_follows_the_steps() -> None:
    model = Model()
    recal = lrmoe.attach(model, lrmoe.LRMoEConfig(drop=0.4, warmup_steps=1, ramp_steps=2, final_dense_steps=1))
    recal.set_total_steps(5)
    kept = []
    for _ in range(5):
        train(model)
        recal.step()
        metrics = recal.metrics()
        kept.append((round(metrics["drop"], 6), round(metrics["kept_share"], 6)))
    assert kept == [(0.0, 1.0), (0.2, 0.8), (0.4, 0.6), (0.4, 0.6), (0.0, 1.0)]


def test_a_dense_tail_waits_for_the_length_of_the_run() -> None:
    model = Model()
    config = lrmoe.LRMoEConfig(drop=0.4, final_dense_steps=1)
    recal = lrmoe.attach(model, config)
    assert recal.config is config
    with pytest.raises(ValueError, match="final_dense_steps=1 needs total_steps"):
        train(model)
    assert recal.clock.microbatch == -1
    recal.set_total_steps(1)
    train(model)
    assert recal.metrics()["kept_share"] == 1.0
    recal.set_total_steps(2)
    assert recal.config.total_steps == 2
    assert float(recal.clock.drop) == 0.4
    given = lrmoe.attach(Model(), lrmoe.LRMoEConfig(drop=0.4, final_dense_steps=1, total_steps=9))
    given.set_total_steps(2)
    assert given.config.total_steps == 9


# --- metrics -----------------------------------------------------------------------------------------------------


def test_metrics_add_up_since_the_last_call() -> None:
    model = Model()
    recal = lrmoe.attach(model, CONFIG)
    assert recal.metrics()["layers"] == {}
    assert recal.metrics()["kept_share"] == 1.0
    with lrmoe.recording() as calls:
        train(model)
        train(model)
    peek = recal.metrics(reset=False)
    metrics = recal.metrics()
    assert peek == metrics
    for layer, name in enumerate(recal.layers):
        mine = [call for call in calls if call.layer == layer]
        read = metrics["layers"][name]
        assert read["backwards"] == 2
        assert read["load"] == sum(call.load_E for call in mine).tolist()
        assert sum(read["kept"]) == sum(int(call.kept_TK.sum()) for call in mine)
        total = sum(float(call.importance_TK.sum()) for call in mine)
        kept = sum(float(call.importance_TK[call.kept_TK].sum()) for call in mine)
        assert read["kept_importance_share"] == pytest.approx(kept / total)
    assert metrics["kept_share"] == pytest.approx(0.6)
    for key in ("kept_importance_share", "variance_share", "load_max_over_mean"):
        assert metrics[key] == pytest.approx(sum(read[key] for read in metrics["layers"].values()) / 2)
    assert metrics["backward_seconds"] > 0
    assert recal.metrics()["layers"] == {}


def test_a_layer_without_a_backward_is_left_out() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = lrmoe.MoE(dim=8, expert_dim=8, num_experts=4, top_k=2)
            self.idle = lrmoe.MoE(dim=8, expert_dim=8, num_experts=4, top_k=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Branch()
    recal = lrmoe.attach(model, CONFIG)
    model(torch.randn(20, 8)).sum().backward()
    assert list(recal.metrics()["layers"]) == ["used"]


def test_a_bypassed_model_is_noticed_once() -> None:
    model = Model()
    recal = lrmoe.attach(model, CONFIG)
    with pytest.warns(UserWarning, match="layer first was trained without a call of the Model that attach"):
        model.forward(tokens()).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recal.step()
        model.forward(tokens()).sum().backward()
        recal.step()


def test_steps_without_training_warn_of_nothing() -> None:
    model = Model()
    recal = lrmoe.attach(model, CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recal.step()
        train(model)
        recal.step()
        recal.step()


# --- state -------------------------------------------------------------------------------------------------------


def test_a_restored_recalibrator_continues_the_draws() -> None:
    def draws(recal: lrmoe.Recalibrator, model: nn.Module, count: int) -> list[Tensor]:
        with lrmoe.recording() as calls:
            for _ in range(count):
                train(model)
                recal.step()
        return [call.kept_TK for call in calls]

    model = Model()
    recal = lrmoe.attach(model, CONFIG)
    draws(recal, model, 2)
    state = json.loads(json.dumps(recal.state_dict()))
    expected = draws(recal, model, 2)
    again_model = Model()
    again = lrmoe.attach(again_model, CONFIG)
    again.load_state_dict(state)
    found = draws(again, again_model, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert again.state_dict() == recal.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ["first"]}, r"the state is of layers \['first'\], this model has \['first', 'second'\]"),
        ({"config": {"seed": 7}}, "saved with seed=7, this recalibrator has seed=0"),
        ({"step": None}, "not a recalibrator's state: step missing"),
        ({"step": -1}, "step=-1 must be an integer >= 0"),
        ({"step": "5"}, "step='5' must be an integer >= 0"),
        ({"step": 1.5}, "step=1.5 must be an integer >= 0"),
        ({"step": 2**63}, r"must be below 2\*\*63"),
        ({"config": ["seed"]}, "config must be a dictionary"),
        ({"layers": "first"}, "layers a list"),
    ],
)
def test_a_foreign_state_is_refused(change: dict[str, Any], message: str) -> None:
    recal = lrmoe.attach(Model(), CONFIG)
    recal.step()
    state = {**recal.state_dict(), **change}
    state = {key: value for key, value in state.items() if value is not None}
    recal.set_step(4)
    with pytest.raises(ValueError, match=message):
        recal.load_state_dict(state)
    assert recal.clock.step == 4


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="not a recalibrator's state"):
        lrmoe.attach(Model(), CONFIG).load_state_dict(state)


@pytest.mark.parametrize("step", [-1, "2", 1.5, None, 2**63])
def test_a_wrong_step_changes_nothing(step: Any) -> None:
    recal = lrmoe.attach(Model(), CONFIG)
    recal.step()
    with pytest.raises(ValueError, match="step="):
        recal.set_step(step)
    assert (recal.clock.step, recal.clock.microbatch) == (1, -1)


def test_a_state_does_not_depend_on_wrappers() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.module = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    wrapped = lrmoe.attach(Wrapper(torch.compile(Model())), CONFIG)
    assert list(wrapped.layers) == ["module._orig_mod.first", "module._orig_mod.second"]
    plain = lrmoe.attach(Model(), CONFIG)
    plain.step()
    wrapped.load_state_dict(plain.state_dict())
    assert wrapped.clock.step == 1
    assert wrapped.state_dict() == plain.state_dict()


def test_a_layer_wrapped_after_attaching_is_still_moved_along() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Model(selection_bias=True)
    recal = lrmoe.attach(model, CONFIG)
    layer = model.first
    model.first = Wrapper(layer)
    train(model)
    recal.step()
    assert layer.router.selection_bias.abs().sum() > 0
    assert recal.modules()["first"] is layer
    recal.detach()
    assert not layer.is_attached


# --- attach and detach -------------------------------------------------------------------------------------------


def test_detach_gives_the_layers_their_own_control_back() -> None:
    model = Model(config=lrmoe.LRMoEConfig(drop=0.0))
    expected = train(model)
    own = model.first.control
    recal = lrmoe.attach(model, lrmoe.LRMoEConfig(drop=0.7))
    assert model.first.is_attached
    assert not torch.equal(train(model)["first.experts.down_proj"], expected["first.experts.down_proj"])
    recal.detach()
    recal.detach()
    assert model.first.control is own
    assert not model._forward_pre_hooks
    assert all(torch.equal(grad, expected[name]) for name, grad in train(model).items())
    lrmoe.attach(model, CONFIG)


def test_attaching_twice_is_refused() -> None:
    model = Model()
    lrmoe.attach(model, CONFIG)
    with pytest.raises(ValueError, match="this model already has a recalibrator; call its detach"):
        lrmoe.attach(model, CONFIG)
    with pytest.raises(ValueError, match="its part 0 already has a recalibrator"):
        lrmoe.attach(nn.Sequential(model), CONFIG)
    with pytest.raises(ValueError, match="first belongs to a model that already has a recalibrator"):
        lrmoe.attach(nn.ModuleDict({"first": model.first}), CONFIG)


class Refusing:
    """A host that finds the dense layer, and then cannot bind it."""

    def find(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"dense": model.get_submodule("dense")}

    def bind(self, model: nn.Module, controls: dict[str, Any]) -> Any:
        assert list(controls) == ["dense"]
        raise ValueError("not this one")


def test_a_host_that_refuses_leaves_the_layers_of_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    adapter = SimpleNamespace(HOST=Refusing())
    monkeypatch.setitem(sys.modules, "refusing_adapter", adapter)
    with monkeypatch.context() as patch:
        patch.setattr("lrmoe.hosts.attach._ADAPTERS", {"refusing_adapter": "refusing_adapter"})
        with pytest.raises(ValueError, match="not this one"):
            lrmoe.attach(model, CONFIG)
    assert not model.first.is_attached
    assert not model._forward_pre_hooks
    lrmoe.attach(model, CONFIG)


def test_detaching_again_leaves_the_next_recalibrator_alone() -> None:
    model = Model()
    first = lrmoe.attach(model, CONFIG)
    first.detach()
    lrmoe.attach(model, CONFIG)
    first.detach()
    with pytest.raises(ValueError, match="already has a recalibrator; call its detach"):
        lrmoe.attach(model, CONFIG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": [nn.Linear(2, 2)]}, "model must be a torch.nn.Module, got list"),
        ({"config": {"drop": 0.2}}, "must be an LRMoEConfig"),
        ({"optimizer": "adamw"}, r"optimizer is str.*call the recalibrator's step\(\)"),
    ],
)
def test_wrong_arguments_leave_the_model_alone(arguments: dict[str, Any], message: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=message):
        lrmoe.attach(**{"model": model, **arguments})
    lrmoe.attach(model, CONFIG)


def test_a_wrapped_optimizer_moves_the_recalibrator() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Model()
    optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    recal = lrmoe.attach(model, CONFIG, optimizer=optimizer)
    train(model)
    optimizer.step()
    assert recal.clock.step == 1


def test_a_copied_model_has_a_recalibrator_of_its_own() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recal = lrmoe.attach(model, CONFIG, optimizer=optimizer)
    train(model)
    optimizer.step()
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own = vars(duplicate)["_lrmoe_recalibrator"]
        assert own.clock.step == recal.clock.step
        assert not own.steps_with_optimizer
        train(duplicate)
        assert own.metrics()["layers"].keys() == recal.layers.keys()
        own.step()
        own.detach()
    assert recal.clock.step == 1
    assert recal.steps_with_optimizer
    optimizer.step()
    assert recal.clock.step == 2


def test_attached_in_inference_mode_it_still_moves() -> None:
    model = Model()
    with torch.inference_mode():
        recal = lrmoe.attach(model, CONFIG)
    train(model)
    recal.step()
    assert recal.clock.step == 1


def test_a_model_without_moe_layers_is_refused_with_what_it_holds() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)]), "act": nn.SiLU()})
    with pytest.raises(ValueError, match=r"(?s)no MoE layer.*ModuleDict.*Lists of separate experts.*experts.*Linear, "):
        lrmoe.attach(model, CONFIG)
    assert not hasattr(model, "_lrmoe_recalibrator")


def test_nothing_keeps_a_dropped_model_alive() -> None:
    model = Model()
    recal = lrmoe.attach(model, CONFIG)
    train(model)
    gone = weakref.ref(model.first.experts.down_proj)
    del model, recal
    gc.collect()
    assert gone() is None


def test_attaching_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    model = Model()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    lrmoe.attach(model, CONFIG)
    train(model)
    assert torch.equal(torch.get_rng_state(), before)


# --- the padding mask --------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])
FLAT = [True, True, False, False, True, True]


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((tokens(2, 3),), {"attention_mask": MASK}, FLAT),
        ((), {"input_ids": tokens(2, 3), "attention_mask": MASK.float()}, FLAT),
        ((), {"inputs_embeds": torch.zeros(2, 3, 8), "attention_mask": MASK.bool()}, FLAT),
        ((tokens(2, 3), MASK), {}, FLAT),
        ((tokens(2, 3),), {}, None),
        ((tokens(2, 1),), {"attention_mask": MASK}, None),
        ((tokens(2, 3),), {"attention_mask": MASK[:, None, None, :]}, None),
        ((tokens(2, 3),), {"attention_mask": {"full": MASK}}, None),
    ],
)
def test_which_masks_are_taken(args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[bool] | None) -> None:
    names = ("input_ids", "attention_mask")
    found = read_tokens({**dict(zip(names, args, strict=False)), **kwargs}, None)
    assert found is not None
    mask, doubt = found.real_rows(torch.Size((2, 3)), batch_major=False)
    assert (None if mask is None else mask.tolist()) == expected
    # Of a mask that is not of these tokens nobody knows what it says of them.
    assert doubt == ("it is (2, 3), and the tokens are (2, 1)" if found.shape == (2, 1) else None)


def test_a_mask_of_one_forward_is_not_that_of_the_next() -> None:
    model = Model()
    lrmoe.attach(model, CONFIG)
    with lrmoe.recording() as calls:
        train(model, tokens(2, 3), attention_mask=MASK)
        train(model, tokens(2, 3))
    assert [int(call.load_E.sum()) for call in calls if call.layer == 0] == [8, 12]


def test_an_optimizer_of_another_model_is_noticed() -> None:
    model, other = (lrmoe.MoE(dim=8, expert_dim=8, num_experts=4, top_k=2) for _ in range(2))
    with pytest.warns(UserWarning, match="optimizer holds no parameter of this MoE"):
        lrmoe.attach(model, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
