"""One training run with Transformers' Trainer: prepared without touching a file, then carried out in its folder."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments, default_data_collator
from transformers.integrations import TensorBoardCallback

import lrmoe
from lrmoe.control import Recalibrator
from lrmoe.hosts.transformers import RecalibrationCallback
from lrmoe.training.checkpoints import newest_checkpoint
from lrmoe.training.config import TrainConfig
from lrmoe.training.files import check_out_folder, clear_run, locked, read_json, write_json
from lrmoe.training.memory import measure_saved_bytes
from lrmoe.training.presets import load_model, load_weights
from lrmoe.training.recorder import LossMeter, Progress, RunRecorder
from lrmoe.training.summary import summarize
from lrmoe.training.text import TokenText, TrainingOrder, ValidationSet, read_documents, tokenize


@dataclass(kw_only=True, slots=True)
class Loaded:
    """What a run trains on and with; everything a user can get wrong in it has been checked."""

    text: TokenText
    model: PreTrainedModel
    tokenizer: Any
    recal: Recalibrator


@dataclass(kw_only=True, slots=True)
class Prepared:
    """A run that is ready to start."""

    config: TrainConfig
    out: Path
    resume: bool
    overwrite: bool
    loaded: Loaded
    arguments: TrainingArguments


def load(config: TrainConfig) -> Loaded:
    """Loads text and model and attaches the recalibration.

    Raises:
        ValueError: naming what is wrong and the mend.
    """
    documents = read_documents(config.text)
    model, tokenizer = load_model(config.model, seed=config.seed)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.seq > limit:
        raise ValueError(f"seq={config.seq} is longer than the model's max_position_embeddings={limit}; lower seq")
    text = tokenize(documents, tokenizer, seq=config.seq, memorize_bytes=config.memorize_bytes)
    return Loaded(text=text, model=model, tokenizer=tokenizer, recal=lrmoe.attach(model, config.recalibration))


def prepare(config: TrainConfig, out: Path, *, resume: bool = False, overwrite: bool = False) -> Prepared:
    """Checks the run folder and loads what the run needs; writes nothing.

    Raises:
        ValueError: naming what is wrong and the mend.
    """
    check_out_folder(out, command="train", resume=resume, overwrite=overwrite)
    stored = read_json(out / "config.json") if resume else None
    if stored is not None:
        check_same_settings(stored["train"], config.to_dict(), out)
    loaded = load(config)
    if stored is not None:
        check_same_corpus(stored["corpus"], loaded.text.describe(), out)
    return Prepared(
        config=config, out=out, resume=resume, overwrite=overwrite, loaded=loaded, arguments=_arguments(config, out)
    )


def check_same_settings(stored: dict[str, Any], given: dict[str, Any], out: Path) -> None:
    """Checks that a run is resumed with the settings it began with; only the number of threads may change.

    Raises:
        ValueError: naming the fields that differ.
    """
    stored, given = ({**values, **values["recalibration"]} for values in (stored, given))
    keys = [key for key in {**stored, **given} if key not in ("recalibration", "threads")]
    different = [f"{k}={stored.get(k)!r}, now {given.get(k)!r}" for k in keys if stored.get(k) != given.get(k)]
    if different:
        raise ValueError(
            f"out={str(out)!r} was begun with {'; '.join(different)}; resume with the same settings or give another out"
        )


def check_same_corpus(stored: dict[str, Any], given: dict[str, Any], out: Path) -> None:
    """Raises ValueError if the text is not the one the run began with."""
    if stored["sha256"] != given["sha256"]:
        raise ValueError(
            f"the text is not the one out={str(out)!r} was begun with ({stored.get('source')}, "
            f"{stored.get('bytes')} bytes); bring it back, or start anew with --overwrite"
        )


def train(prepared: Prepared, *, progress: Progress | None = None, report: bool = True) -> dict[str, Any]:
    """Trains, and writes ``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``tensorboard/``, ``summary.json`` and
    ``report.html`` into the run folder.

    Args:
        prepared: from :func:`prepare`; used up.
        progress: told of every step and every record.
        report: whether to write ``report.html``.

    Returns:
        What ``summary.json`` holds.

    Raises:
        ValueError: if another process is writing into the folder.
    """
    out = prepared.out
    out.mkdir(parents=True, exist_ok=True)
    with locked(out), _threads(prepared.config.threads):
        if prepared.overwrite:
            clear_run(out)
        if not prepared.resume:
            write_json(out / "config.json", describe(prepared))
        (out / "summary.json").unlink(missing_ok=True)
        recorder = _run(prepared, progress)
        summary = summarize(prepared.config, out, diverged_at=recorder.diverged_at)
        summary["parameters"] = sum(p.numel() for p in prepared.loaded.model.parameters())
        write_json(out / "summary.json", summary)
        if report:
            from lrmoe.report import write_report

            write_report(out)
    return summary


def describe(prepared: Prepared) -> dict[str, Any]:
    """What ``config.json`` holds: everything needed to repeat the run."""
    return {
        "command": "train",
        "train": prepared.config.to_dict(),
        "corpus": prepared.loaded.text.describe(),
        "architecture": prepared.loaded.model.config.to_dict(),
        "layers": list(prepared.loaded.recal.layers),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    return {
        "lrmoe": lrmoe.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
    }


def _run(prepared: Prepared, progress: Progress | None) -> RunRecorder:
    config, out, loaded = prepared.config, prepared.out, prepared.loaded
    checkpoint = newest_checkpoint(out) if prepared.resume else None
    start = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    losses = LossMeter()
    recalibration = RecalibrationCallback(loaded.recal)
    recorder = RunRecorder(recalibration, out / "metrics.jsonl", losses, progress)
    recorder.continue_from(start)
    with _tensorboard(out, purge_step=start) as tensorboard:
        trainer = _Trainer(
            model=loaded.model,
            args=prepared.arguments,
            train_dataset=TrainingOrder(
                loaded.text.train_N,
                seq=config.seq,
                length=config.steps * config.batch * config.grad_accum,
                seed=config.seed,
            ),
            eval_dataset=ValidationSet(loaded.text.validation_N, seq=config.seq, sequences=config.eval_sequences),
            # Sequences have one length; the tokenizer's own collator would add a padding mask of ones.
            data_collator=default_data_collator,
            processing_class=loaded.tokenizer,
            callbacks=[recorder, tensorboard],
        )
        trainer.remove_callback(PrinterCallback)
        recalibration.add_to(trainer)
        trainer.watch(losses, recorder, [loaded.model.get_submodule(name) for name in loaded.recal.layers])
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return recorder


def _arguments(config: TrainConfig, out: Path) -> TrainingArguments:
    # Renamed within the versions of Transformers that we take.
    renamed = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    checkpointing = "activation_checkpointing" if renamed else "gradient_checkpointing"
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch,
        per_device_eval_batch_size=config.batch,
        gradient_accumulation_steps=config.grad_accum,
        learning_rate=config.lr,
        lr_scheduler_type="constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule,
        warmup_steps=config.lr_warmup_steps,
        weight_decay=config.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        **{checkpointing: config.gradient_checkpointing, f"{checkpointing}_kwargs": {"use_reentrant": False}},
        bf16=config.bf16,
        # Without an accelerator the Trainer accepts bf16 only if told that the CPU is meant.
        use_cpu=not torch.accelerator.is_available(),
        seed=config.seed,
        # The dataset is the order; a sampler of the Trainer's own would make it depend on more than the seed.
        train_sampling_strategy="sequential",
        logging_steps=config.log_every,
        # A loss that is not finite has to be seen, not averaged away.
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=config.eval_every,
        prediction_loss_only=True,
        save_steps=config.save_every,
        save_total_limit=config.keep_checkpoints,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    # One device: with several GPUs in sight the Trainer would wrap the model in DataParallel.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


class _Trainer(Trainer):  # type: ignore[misc]
    """Transformers' Trainer; it tells the language-model loss from the balancing loss, leaves the latter out of
    validations, counts the first forward's saved bytes, and resumes the experts' weights."""

    def watch(self, losses: LossMeter, recorder: RunRecorder, moe_modules: list[nn.Module]) -> None:
        self._losses = losses
        self._recorder = recorder
        self._moe_modules = moe_modules
        self._measured = False

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Checkpoints hold one tensor per expert, the model one for all of a layer's; the Trainer's own loading does
        # not convert, and only warns that the experts keep their initial weights.
        self.model.load_state_dict(load_weights(Path(resume_from_checkpoint)).state_dict(), strict=True)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        config = self.model.config.get_text_config()
        balanced = bool(getattr(config, "output_router_logits", False))
        if not model.training:
            inputs = {**inputs, "output_router_logits": False} if balanced else inputs
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        measuring = nullcontext() if self._measured else measure_saved_bytes(self.model, self._moe_modules)
        with measuring as saved:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if not self._measured:
            self._measured = True
            self._recorder.saved_bytes = saved
        balance = outputs.get("aux_loss") if balanced else None
        share = loss.detach()
        if balance is not None:
            balance = balance.detach()
            share = share - config.router_aux_loss_coef * balance
        if not self.model_accepts_loss_kwargs:
            share = share / self.args.gradient_accumulation_steps
        self._losses.add(share, balance)
        return (loss, outputs) if return_outputs else loss


@contextmanager
def _tensorboard(out: Path, *, purge_step: int) -> Iterator[TensorBoardCallback]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(out / "tensorboard"), purge_step=purge_step)
    try:
        yield TensorBoardCallback(writer)
    finally:
        writer.close()


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
