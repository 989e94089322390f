"""Transformers models over several gloo ranks by ``ep_implementation="lrmoe"``, against one process on all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_transformers as tiny
import torch
import torch.distributed as dist
import transformers
from distributed.world import WorldError, run_world
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

import lrmoe
from lrmoe import LRMoEConfig
from lrmoe.hosts.transformers_ep import engines, set_balancer
from lrmoe.parallel import global_metrics

lrmoe.register()
transformers.utils.logging.disable_progress_bar()

ROWS = 4


def sharded(architecture: str, *, seed: int = 0, ep_implementation: str = "lrmoe", **sizes: int) -> PreTrainedModel:
    """This rank's part of the model that ``tiny.build`` makes in one process."""
    whole = tiny.build(architecture, seed=seed)
    whole.config.output_router_logits = False
    return (
        type(whole)
        .from_pretrained(
            None,
            config=whole.config,
            state_dict=whole.state_dict(),
            distributed_config=DistributedConfig(ep_implementation=ep_implementation, **sizes),
        )
        .train()
    )


def part(data: dict[str, Tensor], number: int, of: int) -> dict[str, Tensor]:
    """One of several equal parts of a batch."""
    return {name: tensor.chunk(of)[number] for name, tensor in data.items()}


def whole_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in grads.items()}


def train_step(
    group: dist.ProcessGroup,
    architecture: str,
    sizes: dict[str, int],
    drop: float | None = 0.0,
    options: dict[str, Any] | None = None,
    checkpointing: bool = False,
    ep_implementation: str = "lrmoe",
    remainder: Any = "none",
) -> dict[str, Any]:
    """One backward, of each data-parallel rank's part of the batch; ``drop=None`` attaches nothing."""
    model = sharded(architecture, ep_implementation=ep_implementation, **sizes)
    if options is not None:
        set_balancer(model, **options)
    recal = None if drop is None else lrmoe.attach(model, LRMoEConfig(drop=drop, remainder=remainder))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    data_ranks = sizes.get("fsdp_size", 1)
    mine = part(tiny.batch(rows=ROWS), group.rank() // (group.size() // data_ranks), data_ranks)
    loss = model(**mine).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {
        "loss": total / group.size(),
        "gradients": whole_gradients(model),
        "metrics": None if recal is None else global_metrics(recal),
        "engines": len({id(layer.engine) for layer in engines(model).values()}),
    }


def alone(architecture: str, drop: float = 0.0, remainder: Any = "none") -> dict[str, Any]:
    model = tiny.build(architecture, implementation="lrmoe")
    model.config.output_router_logits = False
    recal = lrmoe.attach(model, LRMoEConfig(drop=drop, remainder=remainder))
    loss, gradients = tiny.gradients(model, tiny.batch(rows=ROWS))
    return {"loss": loss, "gradients": gradients, "metrics": recal.metrics()}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_gradients_are_those_of_one_process(architecture: str) -> None:
    """Plain, transposed with biases, and a router whose choice is not its weight: loss and every gradient."""
    expected = alone(architecture)
    for found in run_world(2, train_step, architecture, {"fsdp_size": 2, "ep_size": 2}):
        assert torch.allclose(found["loss"], expected["loss"], rtol=1e-6)
        assert tiny.largest_difference(found["gradients"], expected["gradients"]) < 2e-5
        assert found["engines"] == 1


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        pytest.param(4, {"fsdp_size": 4, "ep_size": 2}, id="experts sharded by FSDP2 as well"),
        pytest.param(4, {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, id="tensor-parallel ranks share a batch"),
        pytest.param(2, {"tp_size": 2, "ep_size": 2}, id="one batch for all"),
    ],
)
def test_beside_other_parallelism(size: int, sizes: dict[str, int]) -> None:
    expected = alone("glm4_moe")
    for found in run_world(size, train_step, "glm4_moe", sizes):
        assert torch.allclose(found["loss"], expected["loss"], rtol=1e-6)
        assert tiny.largest_difference(found["gradients"], expected["gradients"]) < 2e-5


def test_quotas_hold_over_all_ranks() -> None:
    expected = alone("glm4_moe", drop=0.5)["metrics"]
    for found in run_world(2, train_step, "glm4_moe", {"fsdp_size": 2, "ep_size": 2}, 0.5):
        for name, layer in expected["layers"].items():
            assert found["metrics"]["layers"][name]["load"] == layer["load"]
            assert found["metrics"]["layers"][name]["kept"] == layer["kept"]


def test_a_row_of_means_is_that_of_one_process() -> None:
    """Where no expert is split; with a checkpoint in between."""
    expected, without = alone("gpt_oss", 0.5, "mean"), alone("gpt_oss", 0.5)
    assert tiny.largest_difference(without["gradients"], expected["gradients"]) > 1e-3
    rest = ({"policy": "fixed", "slots": 0}, True, "lrmoe", "mean")
    for found in run_world(2, train_step, "gpt_oss", {"fsdp_size": 2, "ep_size": 2}, 0.5, *rest):
        assert tiny.largest_difference(found["gradients"], expected["gradients"]) < 2e-5


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "fixed", "slots": 0},
        {"policy": "ultraep", "slots": 2},
        {"policy": "smartmoe"},
        {"policy": "symi", "slots": 8},
        {"policy": "fastermoe"},
    ],
)
def test_the_policy_changes_who_computes_not_what(options: dict[str, Any]) -> None:
    sizes = {"fsdp_size": 2, "ep_size": 2}
    default = run_world(2, train_step, "glm4_moe", sizes, 0.5)[0]
    chosen = run_world(2, train_step, "glm4_moe", sizes, 0.5, options)[0]
    assert chosen["metrics"]["kept_share"] == default["metrics"]["kept_share"]
    assert torch.equal(chosen["loss"], default["loss"]) or torch.allclose(chosen["loss"], default["loss"], rtol=1e-6)


def test_activation_checkpointing_changes_nothing() -> None:
    sizes = {"fsdp_size": 2, "ep_size": 2}
    plain = run_world(2, train_step, "qwen3_moe", sizes, 0.5)[0]
    recomputed = run_world(2, train_step, "qwen3_moe", sizes, 0.5, None, True)[0]
    for name, gradient in plain["gradients"].items():
        assert torch.equal(recomputed["gradients"][name], gradient), name


def test_without_attach_the_backward_is_exact() -> None:
    expected = alone("qwen3_moe")
    for found in run_world(2, train_step, "qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, None):
        assert tiny.largest_difference(found["gradients"], expected["gradients"]) < 2e-5


def test_transformers_own_exchange_of_tokens() -> None:
    """ep_implementation="auto": LRMoE runs the experts on the rows that Transformers has brought."""
    expected = alone("qwen3_moe")
    arguments = ("qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, 0.0, None, False, "auto")
    for found in run_world(2, train_step, *arguments):
        assert tiny.largest_difference(found["gradients"], expected["gradients"]) < 2e-5
        assert found["engines"] == 0


def evaluate_padded(group: dist.ProcessGroup) -> tuple[float, float]:
    """The loss in evaluation of an attached model, and the kept share of a training step on a padded batch."""
    model = sharded("glm4_moe", fsdp_size=2, ep_size=2)
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.5))
    data = tiny.padded(tiny.batch(rows=ROWS), [12, 5, 8, 3], side="right")
    mine = part(data, group.rank(), 2)
    model.eval()
    with torch.no_grad():
        loss = float(model(**part(tiny.batch(rows=ROWS), group.rank(), 2)).loss)
    model.train()
    model(**mine).loss.backward()
    return loss, float(sum(global_metrics(recal)["layers"]["model.layers.1.mlp.experts"]["load"]))


def test_evaluation_and_padding() -> None:
    model = tiny.build("glm4_moe").eval()
    with torch.no_grad():
        expected = float(model(**tiny.batch(rows=ROWS)).loss)
    found = run_world(2, evaluate_padded)
    assert sum(loss for loss, _ in found) / 2 == pytest.approx(expected, rel=1e-6)
    # Padding is no load: 28 real tokens, two experts each.
    assert [load for _, load in found] == [56.0, 56.0]


def attach_and_detach(group: dist.ProcessGroup) -> dict[str, Any]:
    model = sharded("qwen3_moe", fsdp_size=2, ep_size=2)
    layers = list(engines(model).values())
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.5))
    attached = {layer.engine for layer in layers}
    recal.detach()
    detached = {layer.engine for layer in layers}
    mine = set_balancer(model, "ultraep", slots=2)
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.5))
    kept = all(layer.engine is mine for layer in layers)
    recal.detach()
    return {
        "attached": len(attached),
        "policy": next(iter(attached)).policy.name,
        "detached": detached == {None},
        "kept": kept and all(layer.engine is mine for layer in layers),
    }


def test_one_engine_a_model() -> None:
    for found in run_world(2, attach_and_detach):
        assert found == {"attached": 1, "policy": "lrmoe", "detached": True, "kept": True}


def load_uneven(group: dist.ProcessGroup) -> None:
    sharded("qwen3_moe", fsdp_size=4, ep_size=4)


def test_misuse() -> None:
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM has no layer with ep_implementation='lrmoe'; load it"):
        set_balancer(tiny.build("qwen3_moe"))
    with pytest.raises(WorldError, match="Cannot evenly shard 6 experts across 4"):
        run_world(4, load_uneven)
