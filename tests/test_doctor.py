"""The doctor finds nothing wrong with what works, and what is wrong with what does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import ARCHITECTURES, build
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import lrmoe
from lrmoe.doctor import Check, DoctorReport, diagnose, installation
from lrmoe.doctor.measure import Failed
from lrmoe.doctor.model import Patient, Way, load
from lrmoe.experts import compacted
from lrmoe.hosts import transformers as host


def failed(report: DoctorReport) -> dict[str, str]:
    return {check.name: check.detail for check in report.checks if not check.ok}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("mixtral").save_pretrained(tmp_path / "mixtral")
    return tmp_path / "mixtral"


def test_the_default_model_is_well() -> None:
    seen: list[Check] = []
    report = diagnose(on_check=seen.append)
    assert report.model == "qwen3-moe-tiny"
    assert failed(report) == {}
    assert report.ok
    assert seen == report.checks
    details = {check.name: check.detail for check in report.checks}
    assert "torch 2." in details["versions"]
    assert details["layers found"].startswith("4: model.layers.0.mlp.experts, ")
    assert "80.1% of the pairs kept" in details["gradients at drop=0.2 equal the loop"]
    assert "kept pairs and moved, 9 kept none and did not" in details["experts learn"]
    for way in ("checkpointing", "checkpointing (reentrant)", "checkpointing and autocast bfloat16"):
        assert "every bit as without" in details[f"experts learn, {way}"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_well_under_another_config(architecture: str, tmp_path: Path) -> None:
    build(architecture).save_pretrained(tmp_path)
    config = lrmoe.LRMoEConfig(
        drop=0.5, selector="topq", quota="level", router_grad="exact", save="input", warmup_steps=9, final_dense_steps=3
    )
    report = diagnose(str(tmp_path), config=config)
    assert failed(report) == {}
    details = {check.name: check.detail for check in report.checks}
    assert "50.0% of the pairs kept" in details["gradients at drop=0.5 equal the loop"]


def test_a_row_of_means_for_dropped_pairs_is_known_to_the_loop(folder: Path) -> None:
    config = lrmoe.LRMoEConfig(drop=0.5, remainder="mean", guard_variance=None)
    patient = Patient(load(str(folder), "cpu"), "cpu")
    assert "pairs kept" in patient.gradients_equal_loop(config)
    assert "kept pairs and moved" in patient.experts_learn(config, Way())
    assert installation.operator("pps", "cpu", "mean")


def test_the_model_is_given_back_as_it_was(folder: Path) -> None:
    from lrmoe.doctor import model as examined

    model = examined.load(str(folder), "cpu")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    examined.Patient(model, "cpu").experts_learn(lrmoe.LRMoEConfig(), examined.Way(checkpointing=False))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.config._experts_implementation == "grouped_mm"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_dense_model_has_no_layers_to_check(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=264, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    report = diagnose(str(tmp_path))
    assert list(failed(report)) == ["layers found"]
    assert "no MoE layer that LRMoE knows was found in LlamaForCausalLM" in failed(report)["layers found"]


def test_a_model_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither a preset .* nor a folder"):
        diagnose(str(tmp_path / "nothing"))


def test_without_transformers_the_installation_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "version", lambda package: None)
    report = diagnose()
    assert report.ok
    assert report.model is None
    assert [check.name for check in report.checks] == [
        "versions",
        *(f"grouped GEMM, {dtype}" for dtype in ("float32", "bfloat16", "float16")),
        *(f"operator against the loop, {selector}" for selector in ("topq", "pps", "random", "auto")),
    ]
    with pytest.raises(ValueError, match="model='qwen3-moe-tiny' needs Transformers: in a clone of LRMoE, pip"):
        diagnose("qwen3-moe-tiny")


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    with pytest.raises(Failed, match=r"torch 2\.8\.0\+cpu, .*; torch must be 2\.10 or newer$"):
        installation.versions()


# --- what is wrong is found --------------------------------------------------------------------------------------


def broken(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The experts operator with one thing about it changed."""
    return lambda *args, **kwargs: change(lrmoe.experts.operator.controlled_experts, *args, **kwargs)


def forward_only(operator: Any, x: Tensor, ids: Tensor, alpha: Tensor, up: Tensor, down: Tensor, **kwargs: Any) -> Any:
    return operator(x, ids, alpha, up.detach(), down.detach(), **kwargs)


def another_loss(operator: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return operator(1.01 * x, *args, **kwargs)


def half_a_gradient(operator: Any, x: Tensor, ids: Tensor, alpha: Tensor, up: Tensor, *args: Any, **kwargs: Any) -> Any:
    return operator(x, ids, alpha, 0.5 * up + (0.5 * up).detach(), *args, **kwargs)


def detached_input(operator: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return operator(x.detach(), *args, **kwargs)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (forward_only, {"gradients at drop=0 equal stock", "gradients at drop=0.2 equal the loop", "experts learn"}),
        (another_loss, {"loss equals stock", "gradients at drop=0 equal stock"}),
        (half_a_gradient, {"gradients at drop=0 equal stock", "gradients at drop=0.2 equal the loop"}),
        (detached_input, {"gradients at drop=0 equal stock", "gradients at drop=0.2 equal the loop"}),
    ],
)
def test_broken_experts_are_found(
    change: Callable[..., Any], names: set[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "controlled_experts", broken(change))
    found = failed(diagnose(str(folder)))
    assert names <= set(found)
    if change is forward_only:
        assert "kept pairs but did not move" in found["experts learn, autocast bfloat16"]
    if change is half_a_gradient:
        assert "experts.gate_up_proj deviates by 5.0e-01" in found["gradients at drop=0 equal stock"]


def test_a_gradient_leaking_into_resting_experts_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return backward_wgrad(a, b, offs) + 1e-3

    backward_wgrad = compacted.grouped_wgrad
    monkeypatch.setattr(compacted, "grouped_wgrad", leaking)
    # An expert with load always keeps a pair, so some are given no load.
    monkeypatch.setattr(host, "controlled_experts", broken(only_experts_below_three))
    found = failed(diagnose(str(folder)))
    assert "experts [3, 4, 5] kept no pair but moved" in found["experts learn"]


def only_experts_below_three(operator: Any, x: Tensor, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    return operator(x, ids % 3, *args, **kwargs)


def test_a_recompute_that_draws_anew_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def moving_on(operator: Any, *args: Any, control: Any, **kwargs: Any) -> Any:
        moved = kwargs.pop("moment")
        control.clock.next_microbatch()
        return operator(*args, control=control, moment=moved._replace(position_3=control.clock.position_3), **kwargs)

    monkeypatch.setattr(host, "controlled_experts", broken(moving_on))
    found = failed(diagnose(str(folder)))
    assert "gradients differ from those without checkpointing" in found["experts learn, checkpointing (reentrant)"]


def test_an_error_in_a_check_is_a_failed_check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(host, "controlled_experts", crash)
    found = failed(diagnose(str(folder)))
    assert found["loss equals stock"] == "RuntimeError: no kernel image is available"


@pytest.mark.slow
def test_compiled_experts_learn(folder: Path) -> None:
    report = diagnose(str(folder), compile=True)
    assert failed(report) == {}
    assert report.checks[-1].name == "experts learn, torch.compile"


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used"):
        diagnose(device=device)
