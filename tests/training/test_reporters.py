"""Who is told of a run beside its own records: TensorBoard for real, W&B and trackio by stand-ins that keep what they
are told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lrmoe import LRMoEConfig
from lrmoe.cli import main
from lrmoe.hosts.transformers import RecalibrationCallback
from lrmoe.training.config import TrainConfig
from lrmoe.training.files import read_records
from lrmoe.training.reporters import Run, TensorBoardLayers, reporting
from lrmoe.training.run import _reporters, prepare, train
from lrmoe.training.world import World

LAYERS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


class Killed(Exception):
    pass


def kill_at_5(step: int, record: dict[str, Any] | None) -> None:
    if step == 5 and record is not None:
        raise Killed


def events_of(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0})
    events.Reload()
    return events


# What Transformers' callbacks use of the packages, and we do.
WANDB = """
import os
calls, run = [], None
class _Settings:
    mode, project = "online", None
class _Setup:
    settings = _Settings()
def setup():
    return _Setup
def login(**options):
    calls.append(("login", options))
    return False
class _Config(dict):
    def update(self, values, **options):
        super().update(values)
config = _Config()
class _Run:
    def __init__(self, id):
        self.id, self.summary = id, {}
    def _label(self, **options):
        pass
def init(**options):
    global run
    calls.append(("init", options))
    run = _Run(options.get("id", "abc-1"))
    os.makedirs(f"{options['dir']}/wandb/offline-run-2026010{len(calls)}_000000-{run.id}")
def define_metric(*names, **options):
    pass
def log(values):
    calls.append(("log", dict(values)))
def finish(exit_code):
    global run
    calls.append(("finish", exit_code))
    run = None
"""
TRACKIO = """
calls, config, __version__ = [], {}, "0.43.0"
class context_vars:
    class current_space_id:
        get = staticmethod(lambda: None)
class _Config(dict):
    def update(self, values, **options):
        super().update(values)
config = _Config()
def init(**options):
    calls.append(("init", options))
def log(values):
    calls.append(("log", dict(values)))
def finish():
    calls.append(("finish", None))
"""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Packages of these names that come before any that are installed; gives them by name."""
    packages = tmp_path_factory.mktemp("packages")
    files = {"wandb/__init__.py": WANDB, "trackio/__init__.py": TRACKIO}
    files["wandb/sdk/lib/config_util.py"] = "class ConfigError(Exception): pass\n"
    for name, text in files.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in ("wandb", "trackio")}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(packages))
        yield __import__
    for name in [name for name in sys.modules if name.split(".")[0] in ("wandb", "trackio")]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tiny_text: Path) -> TrainConfig:
    return TrainConfig(
        model=str(tiny_model), text=str(tiny_text), steps=6, batch=4, seq=32, lr=1e-2, lr_warmup_steps=2, log_every=1,
        eval_every=3, eval_sequences=8, save_every=2, report_to="tensorboard, wandb, trackio",
        recalibration=LRMoEConfig(drop=0.25),
    )  # fmt: skip


@pytest.fixture(scope="module")
def told(whole: TrainConfig, tmp_path_factory: pytest.TempPathFactory, stand_ins: Callable[[str], Any]) -> Path:
    """The folder of a run that told all reporters, was killed at step 5, after the checkpoint at 4, and resumed."""
    out = tmp_path_factory.mktemp("runs") / "my run"

    def kill(step: int, record: dict[str, Any] | None) -> None:
        if step == 5 and record is not None:
            raise Killed

    for name in ("wandb", "trackio"):
        stand_ins(name).calls.clear()
    with pytest.raises(Killed):
        train(prepare(whole, out), progress=kill)
    train(prepare(whole, out, resume=True))
    # The tests that follow see what this run told, and tell more.
    for name in ("wandb", "trackio"):
        package = stand_ins(name)
        package.told = [*package.calls]
        package.calls.clear()
    return out


def test_tensorboard_holds_the_records_also_of_a_run_that_was_cut(told: Path) -> None:
    records, events = read_records(told / "metrics.jsonl"), events_of(told / "tensorboard")
    for tag, key in (
        ("train/loss", "loss"),
        ("train/lrmoe/drop", "drop"),
        ("train/lrmoe/kept_importance_share", "kept_importance_share"),
        ("train/lrmoe/backward_seconds", "backward_seconds"),
        ("eval/loss", "eval_loss"),
    ):
        expected = [(r["step"], pytest.approx(r[key])) for r in records if key in r]
        assert [(e.step, e.value) for e in events.Scalars(tag)] == expected, tag
    for place, name in enumerate(LAYERS):
        for key in ("kept_share", "kept_importance_share", "variance_share", "load_max_over_mean"):
            expected = [(r["step"], pytest.approx(r["layers"][place][key])) for r in records]
            assert [(e.step, e.value) for e in events.Scalars(f"{key}_by_layer/{name}")] == expected
        histograms = events.Histograms(f"load_over_mean_by_layer/{name}")
        assert [h.step for h in histograms] == [1, 2, 3, 4, 5, 6]
        for record, histogram in zip(records, histograms, strict=True):
            layer, value = record["layers"][place], histogram.histogram_value
            mean = sum(layer["load"]) / 4
            assert (value.num, sum(value.bucket), value.sum) == pytest.approx((4, 4, 4))
            assert (value.min, value.max) == pytest.approx((min(layer["load"]) / mean, max(layer["load"]) / mean))


def test_tensorboard_shows_the_settings(told: Path, whole: TrainConfig) -> None:
    events = events_of(told / "tensorboard")
    text = events.Tensors("lrmoe/config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(text) == whole.to_dict()
    content = events.PluginTagToContent("hparams")
    begun, ended = (
        HParamsPluginData.FromString(content[f"_hparams_/session_{name}"]) for name in ("start_info", "end_info")
    )
    values = begun.session_start_info.hparams
    assert values["lr"].number_value == whole.lr
    assert values["recalibration.selector"].string_value == "pps"
    assert "memorize_bytes" not in values
    assert ended.session_end_info.status == 1
    metrics = HParamsPluginData.FromString(content["_hparams_/experiment"]).experiment.metric_infos
    assert {metric.name.tag for metric in metrics} == {"train/loss", "eval/loss"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_are_told_the_records_and_go_on_after_a_kill(
    told: Path, whole: TrainConfig, stand_ins: Callable[[str], Any], name: str
) -> None:
    records, package = read_records(told / "metrics.jsonl"), stand_ins(name)
    assert [kind for kind, _ in package.told if kind not in ("log", "login")] == ["init", "finish"] * 2
    begun = {"name": "my run", "project": "lrmoe", "config": {"lrmoe": whole.to_dict()}}
    beginnings = [options for kind, options in package.told if kind == "init"]
    for options in beginnings:
        assert {key: options[key] for key in begun} == begun
    logs = [values for kind, values in package.told if kind == "log"]
    assert [(v["train/global_step"], v["train/lrmoe/variance_share"]) for v in logs if "train/loss" in v] == [
        (record["step"], record["variance_share"]) for record in records
    ]
    expected = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert [v["eval/loss"] for v in logs if "eval/loss" in v] == expected
    assert package.config["moe_intermediate_size"] == 16
    if name == "trackio":
        assert [options["resume"] for options in beginnings] == ["never", "allow"]
        return
    assert [(options["mode"], options["dir"]) for options in beginnings] == [("offline", str(told))] * 2
    assert [options.get("id") for options in beginnings] == [None, "abc-1"]
    assert [code for kind, code in package.told if kind == "finish"] == [1, 0]


@pytest.fixture
def wandb(stand_ins: Callable[[str], Any]) -> Any:
    package = stand_ins("wandb")
    package.calls.clear()
    return package


def report(out: Path, **options: Any) -> Run:
    config = TrainConfig(report_to="wandb")
    return Run(
        config=config, out=out, recalibration=RecalibrationCallback(), **{"start": 0, "resume": False, **options}
    )


def test_wandb_is_online_where_the_user_has_set_it_up(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "login", lambda **options: True)
    monkeypatch.setattr(wandb._Settings, "project", "mine")
    with reporting(report(tmp_path)) as callbacks:
        assert [type(callback).__name__ for callback in callbacks] == ["WandbCallback"]
    with reporting(report(tmp_path, resume=True)):
        pass
    first, second = (options for kind, options in wandb.calls if kind == "init")
    assert (first["project"], first["mode"], "resume" in first) == ("mine", None, False)
    assert (second["id"], second["resume"]) == ("abc-1", "allow")


def test_a_wandb_run_of_the_callers_is_used_and_left_open(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = wandb._Run("mine")
    monkeypatch.setattr(wandb, "run", mine)
    with reporting(report(tmp_path)):
        pass
    assert wandb.run is mine
    assert wandb.calls == []
    assert wandb.config["lrmoe"] == TrainConfig(report_to="wandb").to_dict()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_missing_package_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"report_to='{name}' needs the package {name} .*: pip install {name}, or"):
        prepare(TrainConfig(report_to=name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mlflow", "'mlflow' is not known here; give one or more of tensorboard, wandb, trackio with commas"),
        ("none,wandb", "'none' is not known"),
        ("", "'' is not known"),
        ("wandb,tensorboard,wandb", "names wandb twice"),
        (["wandb"], "must be a string"),
        (None, "must be a string"),
    ],
)
def test_bad_report_to_says_what_it_may_be(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"report_to=.*{message}"):
        TrainConfig(report_to=given)  # type: ignore[arg-type]


def test_command_line_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "run"), "--report-to", "tensorboard,mlflow"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lrmoe train: error: --report-to tensorboard,mlflow: 'mlflow' is not known here")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_run_from_before_the_setting_may_be_resumed_and_tell_others(
    told: Path, whole: TrainConfig, tmp_path: Path
) -> None:
    stored = json.loads((told / "config.json").read_text())
    del stored["train"]["report_to"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert TrainConfig.from_dict(stored["train"]) == replace(whole, report_to="tensorboard")
    assert prepare(replace(whole, report_to="none"), tmp_path, resume=True).checkpoint is None


def test_other_ranks_tell_nobody() -> None:
    prepared: Any = SimpleNamespace(world=World(rank=1, size=2))
    made = _reporters(prepared, RecalibrationCallback(), 0)
    assert isinstance(made, nullcontext)
    with made as callbacks:
        assert callbacks == []


def test_layers_need_the_metrics_ahead_of_them_and_skip_what_is_no_training_log() -> None:
    told: list[str] = []
    writer = SimpleNamespace(
        add_scalar=lambda tag, value, step: told.append(tag),
        add_histogram=lambda tag, values, step, bins: told.append(tag),
        flush=lambda: None,
    )
    recalibration = RecalibrationCallback()
    layers, state = TensorBoardLayers(recalibration, writer), SimpleNamespace(global_step=1, is_world_process_zero=True)
    layers.on_log(None, state, None, logs={"eval_loss": 1.0})
    with pytest.raises(ValueError, match="needs the RecalibrationCallback that it was given, ahead of it"):
        layers.on_log(None, state, None, logs={"loss": 1.0})
    # A layer that got no pair has no loads to show.
    shares = dict.fromkeys(("kept_share", "kept_importance_share", "variance_share", "load_max_over_mean"), 1.0)
    recalibration.metrics = {"layers": {"a": {**shares, "guarded": True, "load": [0, 0]}}}
    layers.on_log(None, state, None, logs={"loss": 1.0, "lrmoe/drop": 0.2})
    assert told == [*(f"{key}_by_layer/a" for key in shares), "guarded_by_layer/a"]
    recalibration.metrics["layers"]["a"]["load"] = [1, 0]
    layers.on_log(None, SimpleNamespace(global_step=2, is_world_process_zero=False), None, logs={"loss": 1.0})
    assert len(told) == 5
    layers.on_log(None, state, None, logs={"loss": 1.0, "lrmoe/drop": 0.2})
    assert told[-1] == "load_over_mean_by_layer/a"
