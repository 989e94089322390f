"""State that must stay what it is: sums that a NaN must not reach, fp32 that must stay fp32, checkpoints of any moment.

T tokens, D model width, E experts.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import lrmoe
from lrmoe import LRMoEConfig, strict_json
from lrmoe.balance.registry import get, names
from lrmoe.experts.meter import SHARES, BackwardStats, Meter, shares
from lrmoe.parallel import checkpoint
from lrmoe.recalibration.guard import WINDOW
from lrmoe.routing import TopKRouter

DIM = 8
E = 4


class Model(nn.Module):
    """Two MoE layers, one behind the other."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (
            lrmoe.MoE(dim=DIM, expert_dim=8, num_experts=E, top_k=2, **options) for _ in range(2)
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        hidden_TD: Tensor = self.second(self.first(x_TD))
        return hidden_TD


def tokens(seed: int = 0, count: int = 16) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, seed: int = 0, scale: float = 1.0) -> None:
    model.zero_grad()
    (model(tokens(seed)).square().sum() * scale).backward()


# --- S5: fp32 that must stay fp32 ---------------------------------------------------------------------------------


def biased() -> TopKRouter:
    router = TopKRouter(dim=4, num_experts=2, top_k=1, normalize=False, selection_bias=True)
    assert router.selection_bias is not None
    router.selection_bias.fill_(0.5)
    return router


def _state_bf16() -> dict[str, Tensor]:
    return {name: value.bfloat16() for name, value in biased().state_dict().items()}


def _assigned() -> TopKRouter:
    router = biased()
    router.load_state_dict(_state_bf16(), assign=True)
    return router


def _assigned_to_meta() -> TopKRouter:
    with torch.device("meta"):
        router = TopKRouter(dim=4, num_experts=2, top_k=1, normalize=False, selection_bias=True)
    router.load_state_dict(_state_bf16(), assign=True)
    return router


def _swapped() -> TopKRouter:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return _assigned().bfloat16()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _assigned_fp64() -> TopKRouter:
    router = biased()
    router.load_state_dict({name: value.double() for name, value in router.state_dict().items()}, assign=True)
    return router


def _buffer_replaced() -> TopKRouter:
    # As accelerate's set_module_tensor_to_device does.
    router = biased()
    router._buffers["selection_bias"] = _state_bf16()["selection_bias"]
    return router


def _data_replaced() -> TopKRouter:
    # As the mixed precision of FSDP1 and DDP does with a buffer_dtype.
    router = biased()
    assert router.selection_bias is not None
    router.selection_bias.data = router.selection_bias.bfloat16()
    return router


def _tensors_swapped() -> TopKRouter:
    router = biased()
    assert router.selection_bias is not None
    torch.utils.swap_tensors(router.selection_bias, _state_bf16()["selection_bias"])
    return router


ROUTES: dict[str, Callable[[], TopKRouter]] = {
    "assign": _assigned,
    "assign to meta": _assigned_to_meta,
    "assign fp64": _assigned_fp64,
    "swap": _swapped,
    "copy": lambda: copy.deepcopy(_assigned()),
    "pickle": lambda: pickle.loads(pickle.dumps(_assigned())),
    "buffer": _buffer_replaced,
    "data": _data_replaced,
    "swap_tensors": _tensors_swapped,
}


@pytest.mark.parametrize("route", ROUTES)
def test_s5_the_selection_bias_takes_small_steps_whatever_route_it_came_by(route: str) -> None:
    router = ROUTES[route]()
    for _ in range(64):
        router.update_selection_bias(torch.tensor([0, 2]))
    assert router.selection_bias is not None
    assert router.selection_bias.dtype == torch.float32
    torch.testing.assert_close(router.selection_bias, torch.tensor([0.564, 0.436]), rtol=0, atol=2e-6)


def test_s5_an_assigned_state_is_fp32_at_once_and_in_the_next_state() -> None:
    router = _assigned()
    assert router.state_dict()["selection_bias"].dtype == torch.float32
    assert router.weight.dtype == torch.bfloat16


# --- S7: a backward that is not finite ------------------------------------------------------------------------------


def _stats(importance: float, kept: float, variance: float) -> BackwardStats:
    sums = [torch.tensor(value, dtype=torch.float64) for value in (importance, kept, variance)]
    return BackwardStats(
        load_E=torch.tensor([3, 1]),
        kept_E=torch.tensor([2, 1]),
        importance_total=sums[0],
        importance_kept=sums[1],
        variance=sums[2],
    )


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_s7_one_backward_that_is_not_finite_leaves_the_shares_of_the_others(place: int, value: float) -> None:
    meter = Meter(watched=True)
    bad = [1.0, 1.0, 1.0]
    bad[place] = value
    for numbers in ([8.0, 6.0, 1.0], bad, [2.0, 2.0, 0.5]):
        meter.add(_stats(*numbers))
    totals = meter.totals()
    assert totals is not None
    found = shares(totals)
    assert found["kept_importance_share"] == 0.8
    assert found["variance_share"] == 0.15
    assert (found["backwards"], found["nonfinite_backwards"]) == (3, 1)
    # What was routed and what was computed is true of all three.
    assert (found["load"], found["kept"], found["kept_share"]) == ([9, 3], [6, 3], 0.75)
    sums_3 = meter.take_sums()
    assert sums_3 is not None
    assert sums_3.tolist() == [10.0, 8.0, 1.5]
    load_E = meter.take_load_E()
    assert load_E is not None
    assert load_E.tolist() == [9, 3]


def test_s7_where_nothing_was_finite_the_shares_are_unknown_and_not_whole() -> None:
    meter = Meter()
    meter.add(_stats(math.nan, math.nan, math.nan))
    totals = meter.totals()
    assert totals is not None
    found = shares(totals)
    assert found["kept_importance_share"] is None
    assert found["variance_share"] is None
    json.dumps(found, allow_nan=False)
    # Nothing that had importance, and nothing lost: exact, as it always read.
    meter = Meter()
    meter.add(_stats(0.0, 0.0, 0.0))
    totals = meter.totals()
    assert totals is not None
    read = shares(totals)
    assert (read["kept_importance_share"], read["variance_share"]) == (1.0, 0.0)
    meter.reset()
    assert meter.totals() is None


def test_s7_an_interval_with_a_skipped_step_reads_as_one_without_it() -> None:
    config = LRMoEConfig(drop=0.5, selector="topq", guard_tail=None)
    found = []
    for scales in ((1.0, 1.0), (1.0, math.inf, 1.0)):
        recal = lrmoe.attach(Model(), config)
        for seed, scale in enumerate(scales):
            # The attempt that overflows is of the first one's tokens, so that loads stay comparable.
            backward(recal._model, 0 if scale == math.inf else min(seed, 1), scale)
            recal.step()
        found.append(recal.metrics())
    plain, skipped = found
    for name, layer in plain["layers"].items():
        for key in ("kept_importance_share", "variance_share"):
            assert skipped["layers"][name][key] == layer[key]
    assert plain["nonfinite_backwards"] == 0
    assert skipped["nonfinite_backwards"] == 2
    assert [layer["nonfinite_backwards"] for layer in skipped["layers"].values()] == [1, 1]
    json.dumps(skipped, allow_nan=False)


def test_s7_layers_that_know_no_share_stay_out_of_the_mean_over_layers() -> None:
    recal = lrmoe.attach(Model(), LRMoEConfig(drop=0.5))
    for name, numbers in (("first", (math.nan,) * 3), ("second", (4.0, 3.0, 1.0))):
        recal.layers[name].meter.add(_stats(*numbers))
    assert recal.metrics(reset=False)["variance_share"] == 0.25
    recal.layers["second"].meter.reset()
    metrics = recal.metrics()
    assert metrics["variance_share"] is None
    assert metrics["kept_share"] == 0.75


def test_s7_a_step_that_a_loss_scaler_skips() -> None:
    """The optimizer is not stepped, so neither is the recalibrator: the next attempt is of the same step. Its draws are
    new ones, the loads of both move the bias once, and the guard has what was finite."""
    model = Model(selection_bias=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.5), optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    positions, loads = [], {"first": torch.zeros(E), "second": torch.zeros(E)}
    for scale in (math.inf, 1.0):
        optimizer.zero_grad()
        with lrmoe.recording() as calls:
            scaler.scale(model(tokens(3)).square().sum() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        positions.append({(call.step, call.microbatch) for call in calls})
        for call, name in zip(calls, ("second", "first"), strict=True):
            loads[name] += call.load_E
    assert positions == [{(0, 0)}, {(0, 1)}]
    assert recal.clock.step == 1
    assert recal.clock.microbatch == -1
    for name, load_E in loads.items():
        bias_E = getattr(model, name).router.selection_bias
        assert torch.equal(bias_E, 1e-3 * torch.sign(load_E.mean() - load_E))
    (window_L3,) = recal.state_dict()["guard"]["window"]
    for row, layer in zip(window_L3, recal.metrics()["layers"].values(), strict=True):
        assert row[0] > 0.0
        assert row[2] / row[0] == pytest.approx(layer["variance_share"])


# --- L2: a state of one form, whenever it is saved ------------------------------------------------------------------

GUARDED = LRMoEConfig(drop=0.4, guard_variance=1e-6, seed=2)


def _trained(config: LRMoEConfig, steps: int) -> lrmoe.Recalibrator:
    recal = lrmoe.attach(Model(), config)
    for step in range(steps):
        backward(recal._model, step)
        recal.step()
    return recal


def _flat(state: dict[str, Any]) -> set[str]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return set(flatten_state_dict({"recalibrator": state})[0])


@pytest.mark.parametrize("config", [GUARDED, LRMoEConfig(drop=0.4, guard_variance=None, seed=2)])
def test_l2_a_recalibrator_has_the_same_parts_at_every_step(config: LRMoEConfig) -> None:
    recal = lrmoe.attach(Model(), config)
    first = _flat(recal.state_dict())
    for step in range(WINDOW + 2):
        backward(recal._model, step % 3)
        recal.step()
        assert _flat(recal.state_dict()) == first
    assert first == _flat(_trained(GUARDED, 0).state_dict())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("saved", "into"), [(0, 12), (12, 0), (3, 0), (12, 12), (12, 3)])
@pytest.mark.parametrize("whole", [True, False], ids=["stateful", "plain"])
def test_l2_a_recalibrator_in_a_distributed_checkpoint(tmp_path: Path, saved: int, into: int, whole: bool) -> None:
    before = _trained(GUARDED, saved)
    after = _trained(GUARDED, into)
    assert bool(before.metrics(reset=False)["guard_events"]) == (saved == 12)
    dcp.save({"recal": before if whole else before.state_dict()}, checkpoint_id=tmp_path)
    if whole:
        dcp.load({"recal": after}, checkpoint_id=tmp_path)
    else:
        state = {"recal": after.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        after.load_state_dict(state["recal"])
    assert after.state_dict() == before.state_dict()
    assert after.metrics()["guard_events"] == before.metrics()["guard_events"]


def test_l2_states_of_before_are_still_read() -> None:
    before = _trained(GUARDED, 12)
    state = json.loads(json.dumps(before.state_dict()))
    keys = ("step", "layer", "kind", "value", "limit")
    state["guard"]["events"] = [dict(zip(keys, event, strict=True)) for event in state["guard"]["events"]]
    assert state["guard"]["events"]
    after = _trained(GUARDED, 0)
    after.load_state_dict(state)
    assert after.state_dict() == before.state_dict()


class _Policy:
    """A policy as torch.distributed.checkpoint takes it, beside something that is in every checkpoint."""

    def __init__(self, name: str, steps: int) -> None:
        self.policy = get(name)
        for step in range(steps):
            lam_GE = torch.arange(32).reshape(4, 8) * (step + 1) % 7
            for layer in range(2):
                self.policy.observe(lam_GE, layer=layer)
                self.policy.plan(lam_GE, layer=layer)
            self.policy.step()

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.name, "state": self.policy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["state"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", names())
def test_l2_a_policy_in_a_distributed_checkpoint(tmp_path: Path, name: str) -> None:
    for saved, into in ((0, 3), (3, 0), (3, 2)):
        before, after = _Policy(name, saved), _Policy(name, into)
        dcp.save({"policy": before}, checkpoint_id=tmp_path / f"{saved}-{into}")
        dcp.load({"policy": after}, checkpoint_id=tmp_path / f"{saved}-{into}")
        if saved:
            assert after.state_dict() == before.state_dict()
        assert json.loads(json.dumps(before.state_dict())) == before.state_dict()


def test_l2_policy_states_of_before_are_still_read() -> None:
    before = _Policy("flexmoe", 3).policy
    state = before.state_dict()
    keys = ("placement", "loads", "observed")
    old = {str(layer): dict(zip(keys, rest, strict=True)) for layer, *rest in state["layers"]}
    assert len(old) == 2
    after = get("flexmoe")
    after.load_state_dict({**state, "layers": old})
    assert after.state_dict() == state


# --- W2: a layer that is the model itself ---------------------------------------------------------------------------


def test_w2_a_layer_that_is_the_model_has_a_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lrmoe")
    torch.manual_seed(0)
    recal = lrmoe.attach(lrmoe.MoE(dim=DIM, expert_dim=8, num_experts=E, top_k=2), GUARDED)
    for step in range(WINDOW):
        backward(recal._model, step)
        recal.step()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "another try: the model itself (V*/sum R" in said


def test_w2_pages_and_tensorboard_name_it_too(tmp_path: Path) -> None:
    from lrmoe.report.text import short_layer_names

    reporters = pytest.importorskip("lrmoe.training.reporters")
    assert short_layer_names([""]) == ["the model itself"]
    recal = lrmoe.attach(lrmoe.MoE(dim=DIM, expert_dim=8, num_experts=E, top_k=2), LRMoEConfig(drop=0.5))
    backward(recal._model)
    # The key stays what get_submodule takes.
    assert list(recal.layers) == [""]
    tags: dict[str, float] = {}
    writer = SimpleNamespace(
        add_scalar=lambda tag, value, step: tags.update({tag: value}), add_histogram=lambda *a, **k: None, flush=bool
    )
    layers = reporters.TensorBoardLayers(SimpleNamespace(metrics=recal.metrics()), writer)
    state = SimpleNamespace(is_world_process_zero=True, global_step=1)
    layers.on_log(None, state, None, logs={"loss": 1.0, "lrmoe/drop": 0.5})
    assert set(tags) == {f"{key}_by_layer/the model itself" for key in (*SHARES, "guarded")}


# --- S7: what is written ---------------------------------------------------------------------------------------------


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def strictly(text: str) -> Any:
    """As jq, a browser or Go would read it."""
    return json.loads(text, parse_constant=_refuse)


AWKWARD: dict[str, Any] = {
    "step": 3,
    "loss": math.nan,
    "layers": [{"share": math.inf, "load": (1, 2)}, {"share": -math.inf, "name": "Infinity in a name"}],
    "none": None,
}


def _same(found: Any) -> bool:
    return repr(found) == repr({**AWKWARD, "layers": [{**AWKWARD["layers"][0], "load": [1, 2]}, AWKWARD["layers"][1]]})


def test_s7_what_is_not_finite_is_written_as_json_and_comes_back() -> None:
    text = strict_json.dumps(AWKWARD)
    assert strictly(text)["loss"] == "NaN"
    assert [layer["share"] for layer in strictly(text)["layers"]] == ["Infinity", "-Infinity"]
    assert _same(strict_json.loads(text))
    assert _same(strict_json.loads(text.encode()))
    # Bare, as another program may have written it.
    assert _same(strict_json.loads(json.dumps(AWKWARD)))
    finite = {"step": 1, "loss": 0.1}
    assert strict_json.dumps(finite, indent=2) == json.dumps(finite, indent=2)
    assert strictly(strict_json.dumps({math.nan: 1})) == {"NaN": 1}
    with pytest.raises(TypeError):
        strict_json.dumps({"loss": math.nan, "path": Path()})


def test_s7_files_of_a_run_folder_hold_no_bare_nan(tmp_path: Path) -> None:
    files = pytest.importorskip("lrmoe.training.files")
    files.write_json(tmp_path / "summary.json", AWKWARD)
    files.append_record(tmp_path / "appended.jsonl", AWKWARD)
    files.write_records(tmp_path / "written.jsonl", [AWKWARD])
    (tmp_path / "bare.jsonl").write_text(json.dumps(AWKWARD) + "\n")
    strictly((tmp_path / "summary.json").read_text())
    assert _same(files.read_json(tmp_path / "summary.json"))
    for name in ("appended", "written"):
        strictly((tmp_path / f"{name}.jsonl").read_text())
    for name in ("appended", "written", "bare"):
        (record,) = files.read_records(tmp_path / f"{name}.jsonl")
        assert _same(record)


@pytest.mark.parametrize("bare", [True, False])
def test_s7_a_run_page_is_written_from_records_with_nan(tmp_path: Path, bare: bool) -> None:
    report = pytest.importorskip("lrmoe.report")
    layer = {"name": "", "kept_share": 0.5, "variance_share": math.nan, "load_max_over_mean": 1.0, "load": [2, 2]}
    lines = [
        {"step": step, "loss": 1.0, "kept_share": 0.5, "variance_share": math.nan if step == 2 else 0.25, "drop": 0.5}
        | {"nonfinite_backwards": 3 * (step == 2), "forward_seconds": math.inf, "layers": [layer]}
        for step in (1, 2, 3)
    ]
    dumps = json.dumps if bare else strict_json.dumps
    (tmp_path / "metrics.jsonl").write_text("".join(dumps(line) + "\n" for line in lines))
    (tmp_path / "config.json").write_text(dumps({"command": "train", "limit": math.inf, "train": {}}))
    told = report.write_report(tmp_path).read_text()
    assert "3 backward passes of layers were not finite" in told
    for script in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', told, re.DOTALL):
        strictly(script)


def test_s7_a_comparison_page_is_written_with_times_that_are_no_numbers(tmp_path: Path) -> None:
    frame = pytest.importorskip("lrmoe.report.frame")
    assert frame.inline_json({"y": [1.0, math.nan, -math.inf], "<": 2}) == '{"y":[1.0,null,null],"\\u003c":2}'


def test_s7_intervals_without_a_share_stay_out_of_a_run_s_mean(tmp_path: Path) -> None:
    summary = pytest.importorskip("lrmoe.training.summary")
    files = pytest.importorskip("lrmoe.training.files")
    every = {"loss": 1.0, "kept_share": 0.5, "forward_seconds": 0.0, "backward_seconds": 0.0, "seconds": 1.0}
    shares_ = {2: 0.2, 4: None, 6: math.nan, 8: 0.4}
    files.write_records(
        tmp_path / "metrics.jsonl",
        [{"step": step, **every, "variance_share": share} for step, share in shares_.items()],
    )
    config = pytest.importorskip("lrmoe.training.config").TrainConfig()
    assert summary.summarize(config, tmp_path, diverged_at=None)["variance_share"] == pytest.approx(0.3)


def test_s7_weights_that_are_not_finite_are_json_in_a_checkpoint_and_equal_to_themselves() -> None:
    restored = pytest.importorskip("lrmoe.hosts.restored_weights")
    model = Model()
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.5))
    with torch.no_grad():
        model.first.experts.down_proj.fill_(math.nan)
    stored = strictly(json.dumps(restored.sample_weights(recal)))
    compared, different = restored._compare(stored, recal)
    assert compared == len(stored) > 0
    assert different == []
    with torch.no_grad():
        model.first.experts.down_proj.fill_(1.0)
    _, different = restored._compare(stored, recal)
    assert different == ["first.experts.down_proj"]


def test_s7_a_share_that_nobody_knows_is_not_logged() -> None:
    callback = pytest.importorskip("lrmoe.hosts.trainer_callback")
    recal = lrmoe.attach(Model(), LRMoEConfig(drop=0.5))
    backward(recal._model, scale=math.nan)
    recal.step()
    scalars = callback._scalars(recal.metrics())
    assert scalars["nonfinite_backwards"] == 2.0
    assert "variance_share" not in scalars
    assert all(map(math.isfinite, scalars.values()))


def test_s7_a_checkpoint_s_manifest_is_json(tmp_path: Path) -> None:
    model = Model()
    recal = lrmoe.attach(model, LRMoEConfig(drop=0.5))
    path = checkpoint.save(tmp_path, step=1, model=model, recalibrator=recal, extra={"best": math.inf})
    strictly((path / "lrmoe.json").read_text())
    assert checkpoint.load(path, model=model, recalibrator=recal).extra == {"best": math.inf}
