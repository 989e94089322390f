"""Where a run's metrics are shown beside its own records: TensorBoard, Weights & Biases, trackio.

The metrics of the whole model go through Transformers' own callbacks for each of them. TensorBoard also gets those of
every layer, and histograms of how the load is spread over its experts. W&B and trackio are imported when a run asks
for them, by its first rank alone.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from lrmoe import strict_json
from lrmoe.experts.meter import BY_SEQUENCE, SHARES
from lrmoe.hosts.transformers import RecalibrationCallback
from lrmoe.labels import layer_label
from lrmoe.training.config import TrainConfig

# Of runs in the services that sort them by project; W&B's own settings may name another.
PROJECT = "lrmoe"


def check_reporters(config: TrainConfig) -> None:
    """Imports what the reporters of a run need, before anything is loaded or written.

    Raises:
        ValueError: naming the package that is missing and how to get it.
    """
    for name in config.reporters:
        try:
            # Each is named as its package.
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(
                f"report_to={config.report_to!r} needs the package {name} ({error}): pip install {name}, or leave it "
                "out of report_to"
            ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What reporters are told of a run.

    Args:
        start: optimizer steps that lie behind.
        resume: whether it goes on with what reporters have seen of it before.
        recalibration: where its metrics come from.
    """

    config: TrainConfig
    out: Path
    start: int
    resume: bool
    recalibration: RecalibrationCallback

    @property
    def name(self) -> str:
        """That of its folder."""
        return self.out.absolute().name or PROJECT


@contextmanager
def reporting(run: Run) -> Iterator[list[TrainerCallback]]:
    """The callbacks of ``run.config.reporters``, for the Trainer's end of its list. They need a
    :class:`RecalibrationCallback` ahead of them, and are closed however the block ends."""
    with ExitStack() as stack:
        yield [callback for name in run.config.reporters for callback in stack.enter_context(_REPORTERS[name](run))]


class TensorBoardLayers(TrainerCallback):  # type: ignore[misc]
    """Writes the metrics of every layer to TensorBoard, at each training log: the scalars ``METRIC_by_layer/LAYER``
    (``guarded``: 1 where the guard has stopped the dropping) and, as a histogram over the layer's experts,
    ``load_over_mean_by_layer/LAYER``: the pairs routed to each expert over the mean of all (1: an even share).

    The metrics of the whole model are in the logs that Transformers' ``TensorBoardCallback`` writes.

    Args:
        recalibration: of the same Trainer, registered ahead of this one.
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or what has its ``add_scalar``, ``add_histogram`` and
            ``flush``. Whoever made it closes it.
    """

    def __init__(self, recalibration: RecalibrationCallback, writer: Any) -> None:
        self._recalibration = recalibration
        self._writer = writer

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs or not state.is_world_process_zero:
            return
        if "lrmoe/drop" not in logs:
            raise ValueError(
                "TensorBoardLayers has no metrics yet: the Trainer needs the RecalibrationCallback that it was given, "
                "ahead of it in callbacks=[...] or by add_to(trainer)"
            )
        step = state.global_step
        for name, layer in (self._recalibration.metrics or {})["layers"].items():
            name = layer_label(name)
            for key in (*SHARES, *BY_SEQUENCE):
                if (value := layer.get(key)) is not None:
                    self._writer.add_scalar(f"{key}_by_layer/{name}", value, step)
            if "guarded" in layer:
                self._writer.add_scalar(f"guarded_by_layer/{name}", float(layer["guarded"]), step)
            if pairs := sum(layer["load"]):
                load_E = np.asarray(layer["load"], dtype=np.float64) * (len(layer["load"]) / pairs)
                # TensorBoard's own bins are a tenth of a value wide and more, as much as loads differ.
                self._writer.add_histogram(f"load_over_mean_by_layer/{name}", load_E, step, bins=_BINS)
        self._writer.flush()


_BINS = 30


class _Settings(TrainerCallback):  # type: ignore[misc]
    """The run's settings in TensorBoard: as text, and as hyperparameters that its HParams page compares runs by."""

    def __init__(self, config: TrainConfig, writer: Any) -> None:
        self._config = config
        self._writer = writer
        self._end: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from torch.utils.tensorboard.summary import hparams

        plain = self._config.to_dict()
        self._writer.add_text("lrmoe/config", "\n".join(f"    {line}" for line in _lines(plain)))
        flat = {**{f"recalibration.{key}": value for key, value in plain.pop("recalibration").items()}, **plain}
        values = {key: value for key, value in flat.items() if value is not None}
        # By their names in TensorBoardCallback, which writes the values.
        experiment, begin, self._end = hparams(values, {"train/loss": 0, "eval/loss": 0})  # type: ignore[no-untyped-call]
        # SummaryWriter.add_hparams would make a run of its own for them.
        for summary in (experiment, begin):
            self._writer.file_writer.add_summary(summary)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._writer.file_writer.add_summary(self._end)


def _lines(value: object) -> list[str]:
    return strict_json.dumps(value, indent=2).splitlines()


@contextmanager
def _tensorboard(run: Run) -> Iterator[list[TrainerCallback]]:
    from torch.utils.tensorboard import SummaryWriter

    # What was written past the checkpoint that the run goes on from is written again, and read as of one run.
    writer = SummaryWriter(log_dir=str(run.out / "tensorboard"), purge_step=run.start + 1)
    try:
        # The last of them closes the writer.
        yield [_Settings(run.config, writer), TensorBoardLayers(run.recalibration, writer), TensorBoardCallback(writer)]
    finally:
        writer.close()


@contextmanager
def _wandb(run: Run) -> Iterator[list[TrainerCallback]]:
    """Transformers' callback, in a W&B run that is begun here: it would neither name it, nor keep it in the run folder,
    nor go on with it, nor end it."""
    import wandb
    from transformers.integrations import WandbCallback

    if wandb.run is not None:
        # Begun by the caller, who ends it.
        wandb.config.update({PROJECT: run.config.to_dict()}, allow_val_change=True)
        yield [WandbCallback()]
        return
    settings = wandb.setup().settings
    offline = settings.mode == "online" and not _logged_in(wandb)
    known = _wandb_id(run.out / "wandb") if run.resume else None
    going_on = {} if known is None else {"id": known}
    if known is not None and settings.mode == "online" and not offline:
        going_on["resume"] = "allow"
    wandb.init(
        project=settings.project or PROJECT,
        name=run.name,
        dir=str(run.out),
        config={PROJECT: run.config.to_dict()},
        # Where nobody has logged in W&B would ask, or fail.
        mode="offline" if offline else None,
        **going_on,
    )
    failed = True
    try:
        yield [WandbCallback()]
        failed = False
    finally:
        wandb.finish(exit_code=int(failed))


def _logged_in(wandb: Any) -> bool:
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # Versions whose login() always asks.
        return wandb.api.api_key is not None


def _wandb_id(folder: Path) -> str | None:
    """The id of the newest run in the folder W&B keeps, whose entries are named (offline-)run-TIME-ID."""
    found = [re.fullmatch(r"(?:offline-)?run-(\d+_\d+)-(.+)", entry.name) for entry in folder.glob("*run-*")]
    times = sorted((match[1], match[2]) for match in found if match is not None)
    return times[-1][1] if times else None


@contextmanager
def _trackio(run: Run) -> Iterator[list[TrainerCallback]]:
    import trackio
    from transformers.integrations import TrackioCallback

    class Callback(TrackioCallback):  # type: ignore[misc]
        def setup(self, *args: Any, **kwargs: Any) -> None:
            # Transformers would go on with any run of the same name, also one of another folder.
            self._trackio = _Beginning(trackio, run)
            try:
                super().setup(*args, **kwargs)
            finally:
                self._trackio = trackio

    callback = Callback()
    try:
        yield [callback]
    finally:
        # Done already, unless training was cut short.
        if callback._initialized:
            trackio.finish()


class _Beginning:
    """trackio, whose ``init`` is told more of the run than Transformers has to say."""

    def __init__(self, trackio: Any, run: Run) -> None:
        self._trackio = trackio
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trackio, name)

    def init(self, **options: Any) -> Any:
        run = self._run
        begun = {"project": PROJECT, "name": run.name, "resume": "allow" if run.resume else "never"}
        return self._trackio.init(**{**options, **begun, "config": {PROJECT: run.config.to_dict()}})


_REPORTERS: dict[str, Callable[[Run], Any]] = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
