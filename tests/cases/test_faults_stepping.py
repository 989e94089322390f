"""Which recalibrator belongs to the model that trains, whether it is stepped, and whether anything is dropped at all:
whoever asks for a drop and gets none is told within the first steps, with the cause and the mend."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import VOCAB, build
from torch import nn
from transformers import Trainer, TrainingArguments

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.hosts.trainer_callback import RecalibrationCallback

CONFIG = LRMoEConfig(drop=0.4, warmup_steps=2, guard_variance=None)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), lrmoe.MoE(dim=8, expert_dim=8, num_experts=4, top_k=2))


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[int]:
    """Trains; the body of the loop comes after each optimizer step."""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().sum().backward()
        optimizer.step()
        yield step


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def said(action: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if w.category is UserWarning]


def run(steps: int, *, step: bool = True, model: nn.Module | None = None, **options: Any) -> tuple[Any, list[str]]:
    model = model or small()
    optimizer = sgd(model)
    if options.pop("follow", False):
        options["optimizer"] = optimizer
    recal = lrmoe.attach(model, CONFIG, **options)

    def train() -> None:
        for _ in loop(model, optimizer, steps):
            if step:
                recal.step()

    return recal, said(train)


# --- S10: silently off --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("follow", [False, True])
def test_s10_a_healthy_loop_is_told_nothing(follow: bool) -> None:
    recal, messages = run(5, step=not follow, follow=follow)
    assert messages == []
    assert recal.clock.step == 5


def test_s10_nobody_steps_is_told_at_the_second_step_and_once() -> None:
    recal, messages = run(5, step=False)
    assert recal.clock.step == 0
    assert len(messages) == 1
    assert "SGD made 2 steps on the Sequential, and nobody has moved its recalibrator on" in messages[0]
    assert "Call recal.step()" in messages[0]


def test_s10_two_optimizers_of_one_model_make_one_step() -> None:
    model = small()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.01) for part in model)
    recal = lrmoe.attach(model, CONFIG)

    def train() -> None:
        for _ in loop(model, first, 4):
            second.step()
            recal.step()

    assert said(train) == []


def test_s10_an_optimizer_of_another_model_is_nobodys_business() -> None:
    model, other = small(), nn.Linear(8, 8)
    recal = lrmoe.attach(model, CONFIG)
    foreign = sgd(other)

    def train() -> None:
        for _ in loop(other, foreign, 5):
            pass

    assert said(train) == []
    assert recal.clock.step == 0


def test_s10_stepped_twice_is_counted_once_and_said() -> None:
    recal, messages = run(12, follow=True)
    assert recal.clock.step == 12
    assert len(messages) == 1
    assert "step() was called twice" in messages[0]
    assert "given to attach() moves the recalibrator on already" in messages[0]


def test_s10_stepping_by_hand_twice_is_said() -> None:
    model = small()
    optimizer = sgd(model)
    recal = lrmoe.attach(model, CONFIG)

    def train() -> None:
        for _ in loop(model, optimizer, 3):
            recal.step()
            recal.step()

    (message,) = said(train)
    assert "step() was called twice" in message


def test_s10_stepping_for_another_model_is_said_with_its_cause() -> None:
    model, trained = small(), small()
    optimizer = sgd(trained)
    recal = lrmoe.attach(model, CONFIG)
    for _ in loop(model, sgd(model), 1):
        recal.step()

    def train() -> None:
        for _ in loop(trained, optimizer, 3):
            recal.step()

    message = said(train)[0]
    assert "nothing was trained of the Sequential" in message
    assert "attach to that one" in message


def test_s10_stepping_what_was_detached_is_said() -> None:
    model = small()
    optimizer = sgd(model)
    recal = lrmoe.attach(model, CONFIG)
    recal.detach()

    def train() -> None:
        for _ in loop(model, optimizer, 3):
            recal.step()

    (message,) = [text for text in said(train) if "detached" in text]
    assert "was detached from its Sequential and moves nothing any more" in message
    assert recal.clock.step == 0


def test_s10_a_warm_up_as_long_as_the_training_is_said() -> None:
    recal = lrmoe.attach(small(), LRMoEConfig(drop=0.2, warmup_steps=4, final_dense_steps=2))
    (message,) = said(lambda: recal.set_total_steps(6))
    assert "nothing will be dropped in a training of 6 steps: warmup_steps=4 and final_dense_steps=2" in message
    recal = lrmoe.attach(small(), LRMoEConfig(drop=0.2, warmup_steps=4))
    assert said(lambda: recal.set_total_steps(5)) == []


def alone(**options: Any) -> lrmoe.MoE:
    torch.manual_seed(0)
    return lrmoe.MoE(dim=8, expert_dim=8, num_experts=4, top_k=2, config=CONFIG, **options)


def test_s10_a_layer_without_a_recalibrator_that_nobody_steps_is_told() -> None:
    moe = alone()
    (message,) = said(lambda: list(loop(moe, sgd(moe), 5)))
    assert "SGD made 2 steps on the MoE, and nobody has moved its schedule on" in message
    assert "Call its step() once after each optimizer step, or lrmoe.attach(" in message


def test_s10_a_layer_without_a_recalibrator_that_is_stepped_is_fine() -> None:
    moe = alone()
    assert said(lambda: [moe.step() for _ in loop(moe, sgd(moe), 5)]) == []
    assert moe.control.clock.step == 5


def test_s10_a_layer_without_a_recalibrator_in_evaluation_mode_is_told() -> None:
    moe = alone().eval()
    (message,) = said(lambda: [moe.step() for _ in loop(moe, sgd(moe), 5)])
    assert "the MoE trains in evaluation mode" in message


def test_s10_a_selection_bias_that_nobody_moves_is_told_without_a_drop_too() -> None:
    def train(selection_bias: bool) -> list[str]:
        exact = LRMoEConfig(drop=0.0)
        moe = lrmoe.MoE(dim=8, expert_dim=8, num_experts=4, top_k=2, config=exact, selection_bias=selection_bias)
        return said(lambda: list(loop(moe, sgd(moe), 3)))

    assert train(False) == []
    (message,) = train(True)
    assert "selection biases stand still" in message


@pytest.mark.parametrize("how", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_s10_attached_a_layer_is_its_recalibrators_business_and_a_copy_its_own(how: Any) -> None:
    """The watch of before says nothing; a copied layer is watched by itself, and detached the layer is again."""
    moe = alone()
    optimizer = sgd(moe)
    assert said(lambda: list(loop(moe, optimizer, 1))) == []
    copied = how(moe)
    recal = lrmoe.attach(moe, CONFIG, optimizer=optimizer)
    assert said(lambda: list(loop(moe, optimizer, 4))) == []
    assert len(said(lambda: list(loop(copied, sgd(copied), 3)))) == 1
    recal.detach()
    assert len(said(lambda: list(loop(moe, optimizer, 3)))) == 1


@pytest.mark.parametrize("how", ["step", "optimizer", "nobody"])
def test_s10_evaluation_mode_is_told_at_once(how: str) -> None:
    model = small().eval()
    recal, messages = run(3, model=model, step=how == "step", follow=how == "optimizer")
    assert any("trains in evaluation mode" in m and "model.train()" in m for m in messages)
    assert sum("evaluation mode" in m for m in messages) == 1
    metrics = recal.metrics()
    assert metrics["drop"] == 0.0
    assert metrics["kept_share"] == 1.0
    assert metrics["layers"] == {}


def test_s10_exact_training_in_evaluation_mode_is_fine() -> None:
    model = small().eval()
    optimizer = sgd(model)
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.0))

    def train() -> None:
        for _ in loop(model, optimizer, 3):
            recal.step()

    assert said(train) == []


def test_s10_an_evaluation_between_steps_is_fine() -> None:
    model = small()
    optimizer = sgd(model)
    recal = lrmoe.attach(model, CONFIG)

    def train() -> None:
        for _ in loop(model, optimizer, 4):
            recal.step()
            model.eval()
            model(torch.randn(3, 8))
            model.train()

    assert said(train) == []


def test_s10_many_forwards_without_a_step_are_told_where_no_optimizer_can_be_recognised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An optimizer of master copies holds none of the model's parameters."""
    monkeypatch.setattr("lrmoe.experts.stepping._FORWARDS", 5)
    model = small()
    lrmoe.attach(model, CONFIG)

    def train() -> None:
        for _ in range(8):
            model(torch.randn(6, 8)).sum().backward()

    (message,) = said(train)
    assert "5 forwards were trained on" in message


def test_s10_the_drop_told_is_the_one_in_effect() -> None:
    model = small()
    optimizer = sgd(model)
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.4, warmup_steps=1))
    drops = []
    for step in loop(model, optimizer, 3):
        recal.step()
        if step == 1:
            recal.clock.set_exact([True])
        metrics = recal.metrics()
        drops.append((metrics["drop"], metrics["scheduled_drop"]))
    assert drops == [(0.0, 0.0), (0.4, 0.4), (0.0, 0.4)]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_s1_a_copy_that_nobody_steps_is_told(how: Any) -> None:
    model = small()
    lrmoe.attach(model, CONFIG, optimizer=sgd(model))
    twin = how(model)
    optimizer = sgd(twin)

    def train() -> None:
        for _ in loop(twin, optimizer, 3):
            pass

    (message,) = said(train)
    assert "nobody has moved its recalibrator on" in message


def test_s1_attached_with_another_optimizer_than_the_one_that_trains() -> None:
    model = small()
    recal = lrmoe.attach(model, CONFIG, optimizer=sgd(model))
    trains = torch.optim.Adam(model.parameters())

    def train() -> None:
        for _ in loop(model, trains, 4):
            pass

    (message,) = said(train)
    assert "Adam made 2 steps" in message
    assert "The SGD that attach() was given has made none" in message
    assert recal.clock.step == 0


def test_s1_after_detaching_nothing_is_watched() -> None:
    model = small()
    recal = lrmoe.attach(model, CONFIG)
    recal.detach()

    def train() -> None:
        for _ in loop(model, sgd(model), 4):
            pass

    # Of the layer, which trains on by a configuration of its own.
    (message,) = said(train)
    assert "nobody has moved its schedule on" in message
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


# --- S1: the recalibrator that moves is the one that trains -----------------------------------------------------------


def trainer(folder: Path, callback: RecalibrationCallback | None, **options: Any) -> Trainer:
    tokens = torch.randint(2, VOCAB, (16, 6), generator=torch.Generator().manual_seed(3))
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [] if callback is None else [callback]
    rows = [{"input_ids": row, "labels": row.clone()} for row in tokens]
    return Trainer(args=args, train_dataset=rows, callbacks=callbacks, **options)


def test_s1_each_training_steps_the_recalibrator_of_its_own_model(tmp_path: Path) -> None:
    """As a hyperparameter search does it: model_init builds and attaches, and train() is called twice."""
    made: list[lrmoe.Recalibrator] = []

    def build_and_attach() -> nn.Module:
        model = build("mixtral")
        made.append(lrmoe.attach(model, CONFIG))
        return model

    callback = RecalibrationCallback()
    runner = trainer(tmp_path, callback, model_init=build_and_attach)
    built = len(made)
    for _ in range(2):
        runner.train()
        assert callback.recal is made[-1]
        assert made[-1].clock.step == 4
        assert callback.metrics is not None
        assert callback.metrics["kept_share"] == pytest.approx(0.6, abs=0.05)
    assert len(made) == built + 2


def test_s1_one_callback_in_two_trainers(tmp_path: Path) -> None:
    models = [build("mixtral"), build("mixtral")]
    recals = [lrmoe.attach(model, CONFIG) for model in models]
    callback = RecalibrationCallback()
    for model in models:
        trainer(tmp_path, callback, model=model).train()
    assert [recal.clock.step for recal in recals] == [4, 4]


def test_s1_the_recalibrator_of_another_model_is_refused(tmp_path: Path) -> None:
    model, other = build("mixtral"), build("mixtral")
    lrmoe.attach(model, CONFIG)
    foreign = lrmoe.attach(other, CONFIG)
    with pytest.raises(ValueError, match=r"is of another model: its layer .*experts.*not in the Mixtral"):
        trainer(tmp_path, RecalibrationCallback(foreign), model=model).train()


def test_s1_a_trainer_with_an_optimizer_of_its_own_is_stepped_by_the_callback(tmp_path: Path) -> None:
    model = build("mixtral")
    recal = lrmoe.attach(model, CONFIG, optimizer=sgd(model))
    with pytest.warns(UserWarning, match=r"attach\(\) was given another optimizer than the \w+ that the Trainer"):
        trainer(tmp_path, RecalibrationCallback(recal), model=model).train()
    assert recal.clock.step == 4


def test_s10_a_trainer_without_the_callback_is_told(tmp_path: Path) -> None:
    model = build("mixtral")
    recal = lrmoe.attach(model, CONFIG)
    with pytest.warns(UserWarning, match="nobody has moved its recalibrator on.*RecalibrationCallback"):
        trainer(tmp_path, None, model=model).train()
    assert recal.clock.step == 0


def test_s10_from_pretrained_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    """The model comes in evaluation mode."""
    build("mixtral").save_pretrained(tmp_path)
    model = type(build("mixtral")).from_pretrained(tmp_path)
    assert not model.training
    optimizer = sgd(model)
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.2))
    ids = torch.randint(2, VOCAB, (2, 6))

    def train() -> None:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            recal.step()

    (message,) = said(train)
    assert "trains in evaluation mode" in message
    assert "from_pretrained" in message
    assert recal.metrics()["kept_share"] == 1.0
