"""What went wrong for people who told an attached Transformers model to run other experts: it reported them, and ran
LRMoE's."""

from __future__ import annotations

import copy
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from distributed.world import run_world
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3VLMoeConfig,
    Trainer,
    TrainingArguments,
)
from transformers.activations import ACT2FN
from transformers.distributed import DistributedConfig

import lrmoe
from lrmoe.hosts.transformers import RecalibrationCallback

CONFIG = lrmoe.LRMoEConfig(drop=0.3)


def train(model: nn.Module, data: dict[str, torch.Tensor] | None = None) -> tuple[int, list[str]]:
    """One forward and backward: how many layers LRMoE ran, and what was said."""
    with lrmoe.recording() as calls, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(**(tiny.batch() if data is None else data)).loss.backward()
    return len(calls), [str(warning.message) for warning in said]


def vision_and_text() -> PreTrainedModel:
    text: dict[str, Any] = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3VLMoeConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]})
    return AutoModelForImageTextToText.from_config(config, experts_implementation="eager").train()


# L8: what is reported is what runs.


@pytest.mark.parametrize("other", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("how", ["method", "dictionary", "config", "inner model"])
def test_l8_the_experts_that_a_model_is_switched_to_run(how: str, other: str) -> None:
    def switch(model: PreTrainedModel, to: str) -> None:
        if how == "config":
            model.config._experts_implementation = to
        else:
            part = model.model if how == "inner model" else model
            part.set_experts_implementation({"": to} if how == "dictionary" else to)

    stock, model = tiny.build("qwen3_moe"), tiny.build("qwen3_moe")
    switch(stock, other)
    expected = tiny.gradients(stock, tiny.batch())
    recal = lrmoe.attach(model, CONFIG)
    assert model.get_experts_implementation() == {"": "lrmoe"}
    assert train(model) == (2, [])

    switch(model, other)
    assert model.get_experts_implementation() == {"": other}
    with pytest.warns(UserWarning, match=f"2 of 2 attached layers.*{other}") as said, lrmoe.recording() as calls:
        found = tiny.gradients(model, tiny.batch())
    assert calls == []
    assert torch.equal(found[0], expected[0])
    for name, gradient in found[1].items():
        # Not bit for bit: what Transformers gathers is added up in another order by several threads.
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-6)
    (message,) = [str(warning.message) for warning in said]
    assert 'set_experts_implementation("lrmoe") takes the recalibration up again; detach()' in message
    # Once.
    assert train(model) == (0, [])

    switch(model, "lrmoe")
    assert train(model) == (2, [])
    recal.detach()
    assert model.get_experts_implementation() == {"": "eager"}


def test_l8_metrics_say_that_nothing_was_dropped() -> None:
    model = tiny.build("qwen3_moe")
    recal = lrmoe.attach(model, CONFIG)
    train(model)
    model.set_experts_implementation("eager")
    train(model)
    recal.step()
    # The first microbatch is in the counts; what was in force when the step was made is the exact backward.
    metrics = recal.metrics()
    assert (metrics["drop"], metrics["scheduled_drop"]) == (0.0, 0.3)
    train(model)
    recal.step()
    metrics = recal.metrics()
    assert (metrics["drop"], metrics["kept_share"], metrics["layers"]) == (0.0, 1.0, {})
    model.set_experts_implementation("lrmoe")
    train(model)
    recal.step()
    assert recal.metrics()["drop"] == pytest.approx(0.3)


def test_l8_the_trainer_goes_on_with_the_experts_it_is_told_to_run(tmp_path: Path) -> None:
    model = tiny.build("qwen3_moe")
    callback = RecalibrationCallback(lrmoe.attach(model, CONFIG))
    args = TrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    rows = [{"input_ids": row, "labels": row} for row in tiny.batch()["input_ids"]]
    model.set_experts_implementation("grouped_mm")
    with pytest.warns(UserWarning, match="grouped_mm"):
        Trainer(model=model, args=args, train_dataset=rows, callbacks=[callback]).train()
    assert callback.metrics is not None
    assert (callback.metrics["drop"], callback.metrics["layers"]) == (0.0, {})


@pytest.mark.parametrize("before", ["eager", "lrmoe"])
def test_l8_detach_leaves_a_later_choice(before: str) -> None:
    model = tiny.build("mixtral", implementation=before)
    recal = lrmoe.attach(model, CONFIG)
    model.set_experts_implementation("grouped_mm")
    recal.detach()
    assert model.get_experts_implementation() == {"": "grouped_mm"}
    # Attaching is a choice as well, and the latest.
    recal = lrmoe.attach(model, CONFIG)
    assert train(model) == (2, [])
    recal.detach()
    assert model.get_experts_implementation() == {"": "grouped_mm"}


def test_l8_models_inside_models() -> None:
    model = vision_and_text()
    recal = lrmoe.attach(model, CONFIG)
    before = {"": "lrmoe", "vision_config": "eager", "text_config": "lrmoe"}
    assert model.get_experts_implementation() == before
    assert train(model) == (2, [])
    model.set_experts_implementation({"text_config": "batched_mm"})
    assert model.get_experts_implementation() == {**before, "text_config": "batched_mm"}
    assert train(model)[0] == 0
    model.model.language_model.set_experts_implementation("lrmoe")
    assert model.get_experts_implementation() == before
    assert train(model) == (2, [])
    # The switch of another thing still reaches everything.
    model.set_attn_implementation("eager")
    configs = [module.config for module in model.modules() if "config" in vars(module)]
    assert {config._attn_implementation for config in configs} == {"eager"}
    recal.detach()
    assert set(model.get_experts_implementation().values()) == {"eager"}


def test_l8_models_of_one_config_are_switched_apart() -> None:
    first = tiny.build("qwen3_moe")
    second, third = (type(first)(first.config).train() for _ in range(2))
    recal = lrmoe.attach(first, CONFIG)
    lrmoe.attach(second, CONFIG)
    first.set_experts_implementation("grouped_mm")
    assert [train(model)[0] for model in (first, second, third)] == [0, 2, 0]
    found = [model.get_experts_implementation()[""] for model in (first, second, third)]
    assert found == ["grouped_mm", "lrmoe", "eager"]
    recal.detach()
    assert [train(model)[0] for model in (first, second, third)] == [0, 2, 0]


@pytest.mark.parametrize("part", ["model", "model.layers", "model.layers.1"])
def test_l8_an_attached_part_follows_its_model(part: str) -> None:
    model = tiny.build("qwen3_moe", implementation="grouped_mm")
    recal = lrmoe.attach(model.get_submodule(part), CONFIG)
    layers = len(recal.layers)
    assert model.get_experts_implementation() == {"": "lrmoe"}
    assert train(model)[0] == layers
    # The very one that was in force before.
    model.set_experts_implementation("grouped_mm")
    assert train(model)[0] == 0
    model.set_experts_implementation("lrmoe")
    assert train(model)[0] == layers
    recal.detach()
    assert model.get_experts_implementation() == {"": "grouped_mm"}


@pytest.mark.parametrize("stock", ["eager", "grouped_mm"])
def test_l8_the_rest_of_an_attached_part_runs_what_it_ran(stock: str) -> None:
    """Bit for bit, and until the last part is detached."""
    model, other = (tiny.build("qwen3_moe", implementation=stock) for _ in range(2))
    first, second = (lrmoe.attach(model.model.layers[i], lrmoe.LRMoEConfig(drop=0.0)) for i in range(2))
    assert train(model) == (2, [])
    for detached, calls in ((first, 1), (second, 0)):
        detached.detach()
        model.zero_grad()
        assert train(model) == (calls, [])
    assert model.get_experts_implementation() == {"": stock}
    lrmoe.attach(model.model.layers[1], lrmoe.LRMoEConfig(drop=0.0))
    for twin in (model, copy.deepcopy(model)):
        layer, expected = (each.model.layers[0].mlp.experts for each in (twin, other))
        x, ids, weights = torch.randn(6, 32), torch.randint(0, 6, (6, 2)), torch.rand(6, 2)
        assert torch.equal(layer(x, ids, weights), expected(x, ids, weights))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_l8_a_copied_model_is_switched_alone(how: str) -> None:
    model = tiny.build("mixtral")
    recal = lrmoe.attach(model, CONFIG)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    twin.set_experts_implementation("grouped_mm")
    assert [train(twin)[0], train(model)[0]] == [0, 2]
    twin.set_experts_implementation("lrmoe")
    twin._lrmoe_recalibrator.detach()
    assert [train(twin)[0], train(model)[0]] == [0, 2]
    assert (twin.config._experts_implementation, model.config._experts_implementation) == ("eager", "lrmoe")
    recal.detach()


def test_l8_saved_models_do_not_need_lrmoe(tmp_path: Path) -> None:
    for model in (tiny.build("qwen3_moe", implementation="lrmoe"), vision_and_text()):
        lrmoe.attach(model, CONFIG)
        model.set_experts_implementation("lrmoe")
        model.save_pretrained(tmp_path)
        assert "lrmoe" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
        again = type(model).from_pretrained(tmp_path)
        assert "lrmoe" not in again.get_experts_implementation().values()


def test_l8_a_model_loaded_by_name_is_switched_too(tmp_path: Path) -> None:
    tiny.build("mixtral").save_pretrained(tmp_path)
    kind = type(tiny.build("mixtral"))
    model = kind.from_pretrained(tmp_path, experts_implementation="lrmoe").train()
    recal = lrmoe.attach(model, CONFIG)
    model.set_experts_implementation("eager")
    assert train(model)[0] == 0
    model.set_experts_implementation("lrmoe")
    assert train(model) == (2, [])
    recal.detach()
    assert model.get_experts_implementation() == {"": "lrmoe"}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["model", "model.layers.1"])
def test_l8_a_compiled_model_is_switched_without_a_graph_break(part: str) -> None:
    model = tiny.build("qwen3_moe", implementation="grouped_mm")
    model.config.output_router_logits = False
    recal = lrmoe.attach(model.get_submodule(part), CONFIG)
    compiled = torch.compile(model.model, fullgraph=True, backend="aot_eager")
    found = []
    for switched_to in ("lrmoe", "batched_mm", "lrmoe"):
        model.set_experts_implementation(switched_to)
        with lrmoe.recording() as calls:
            compiled(input_ids=tiny.batch()["input_ids"]).last_hidden_state.sum().backward()
        found.append(len(calls))
    assert found == [len(recal.layers), 0, len(recal.layers)]
    # A compiled forward says nothing itself; the step after it does.
    model.set_experts_implementation("batched_mm")
    with pytest.warns(UserWarning, match="batched_mm"):
        recal.step()


def switch_over_ranks(group: Any) -> list[str]:
    other = tiny.build("qwen3_moe")
    parts = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="lrmoe")
    model = (
        type(other)
        .from_pretrained(None, config=other.config, state_dict=other.state_dict(), distributed_config=parts)
        .train()
    )
    recal = lrmoe.attach(model, CONFIG)
    said = [str(train(model)[0]), model.get_experts_implementation()[""]]
    # Of a model that FSDP2 wraps, set_experts_implementation does nothing at all, whatever its experts.
    model.config._experts_implementation = "eager"
    try:
        train(model)
    except ValueError as error:
        said.append(str(error))
    model.config._experts_implementation = "lrmoe"
    said.append(str(train(model)[0]))
    model.config._experts_implementation = "eager"
    recal.detach()
    train(model)
    return said


def test_l8_a_model_whose_experts_are_spread_by_lrmoe_refuses_others() -> None:
    for calls, named, refusal, again in run_world(2, switch_over_ranks, timeout=180.0):
        assert (calls, named, again) == ("2", "lrmoe", "2")
        assert "switched to experts_implementation='eager'" in refusal
        assert 'set_experts_implementation("lrmoe"); detach()' in refusal


# The same kind of fault: an activation that a module was given after attaching.


def test_l8_an_activation_given_after_attaching_is_the_one_that_runs() -> None:
    stock, model = tiny.build("mixtral"), tiny.build("mixtral")
    lrmoe.attach(model, lrmoe.LRMoEConfig(drop=0.0))
    tiny.gradients(model, tiny.batch())
    for each in (stock, model):
        for layer in each.model.layers:
            layer.mlp.experts.act_fn = ACT2FN["gelu"]
    (loss, found), (stock_loss, expected) = (tiny.gradients(each, tiny.batch()) for each in (model, stock))
    torch.testing.assert_close(loss, stock_loss, rtol=1e-6, atol=1e-6)
    assert tiny.largest_difference(found, expected) < 1e-5
    model.model.layers[1].mlp.experts.act_fn = nn.Mish()
    with pytest.raises(ValueError, match="act_fn=Mish"):
        model(**tiny.batch())


def test_l8_clamps_given_after_attaching_are_those_that_run() -> None:
    stock, model = tiny.build("gpt_oss"), tiny.build("gpt_oss")
    lrmoe.attach(model, lrmoe.LRMoEConfig(drop=0.0))
    for each in (stock, model):
        for layer in each.model.layers:
            layer.mlp.experts.limit = 0.25
    (loss, found), (stock_loss, expected) = (tiny.gradients(each, tiny.batch()) for each in (model, stock))
    torch.testing.assert_close(loss, stock_loss, rtol=1e-6, atol=1e-6)
    assert tiny.largest_difference(found, expected) < 1e-5
