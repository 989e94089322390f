"""One training run with Transformers' Trainer: prepared without touching a file, then carried out in its folder."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import lrmoe
from lrmoe.control import Recalibrator
from lrmoe.hosts.trainer_callback import engine_of
from lrmoe.hosts.transformers import RecalibrationCallback, set_balancer
from lrmoe.problems import Problems
from lrmoe.training.checkpoints import newest_checkpoint
from lrmoe.training.config import OUTSIDE, TrainConfig
from lrmoe.training.documents import read_documents
from lrmoe.training.files import check_out_folder, clear_run, locked, read_json, write_json
from lrmoe.training.models import check_length, load_model
from lrmoe.training.recorder import LossMeter, Progress, RunRecorder
from lrmoe.training.reporters import Run, check_reporters, reporting
from lrmoe.training.sharded import check_ranks, check_sharding, load_parts
from lrmoe.training.summary import summarize
from lrmoe.training.text import TokenText, TrainingOrder, ValidationSet, tokenize
from lrmoe.training.trainer import RunTrainer, training_arguments
from lrmoe.training.world import World


@dataclass(kw_only=True, slots=True)
class Loaded:
    """What a run trains on and with; everything a user can get wrong in it has been checked."""

    text: TokenText
    model: PreTrainedModel
    tokenizer: Any
    recal: Recalibrator


@dataclass(kw_only=True, slots=True)
class Prepared:
    """A run that is ready to start. ``checkpoint`` is what it continues from, or None."""

    config: TrainConfig
    out: Path
    resume: bool
    overwrite: bool
    loaded: Loaded
    arguments: TrainingArguments
    world: World
    checkpoint: Path | None


def load(config: TrainConfig, *, world: World | None = None, checkpoint: Path | None = None) -> Loaded:
    """Loads text and model and attaches the recalibration.

    Args:
        config: of the run.
        world: its processes, all of which call; each gets its part of the model. Default: this one alone.
        checkpoint: for several processes, where the weights come from instead of ``config.model``.

    Raises:
        ValueError: naming what is wrong and the mend.
    """
    if world is None or world.size == 1:
        documents = read_documents(config.text)
        model, tokenizer = load_model(config.model, seed=config.seed)
        check_length(model, config.seq)
        text = tokenize(documents, tokenizer, seq=config.seq, memorize_bytes=config.memorize_bytes)
    else:
        text = check_sharding(config)
        model, tokenizer = load_parts(config, size=world.size, checkpoint=checkpoint)
        set_balancer(model, config.policy, slots=config.slots, capacity=config.capacity, timeout_s=config.rank_timeout)
    return Loaded(text=text, model=model, tokenizer=tokenizer, recal=lrmoe.attach(model, config.recalibration))


def check(config: TrainConfig, out: Path, *, size: int, resume: bool = False, overwrite: bool = False) -> None:
    """Checks what :func:`prepare` would find wrong with a run over ``size`` processes, before any of them loads a
    weight; writes nothing.

    Raises:
        ValueError: naming what is wrong and the mend.
    """
    problems = Problems()
    with problems:
        check_ranks(config, size)
    with problems:
        check_reporters(config)
    with problems:
        check_out_folder(out, command="train", resume=resume, overwrite=overwrite)
    problems.tell()
    stored = read_json(out / "config.json") if resume else None
    if stored is not None:
        check_same_settings(stored["train"], config.to_dict(), out)
    text = check_sharding(config)
    if stored is not None:
        check_same_corpus(stored["corpus"], text.describe(), out)


def prepare(
    config: TrainConfig, out: Path, *, resume: bool = False, overwrite: bool = False, world: World | None = None
) -> Prepared:
    """Checks the run folder and loads what the run needs; writes nothing.

    Args:
        config, out, resume, overwrite: of the run.
        world: the processes of the run, all of which call; default: this one alone.

    Raises:
        ValueError: naming what is wrong and the mend.
    """
    world = world or World()
    if config.ep > 1 and world.size == 1:
        raise ValueError(f"ep={config.ep} needs {config.ep} processes; start the run with lrmoe train or torchrun")
    if world.is_main:
        check_reporters(config)
    check_out_folder(out, command="train", resume=resume, overwrite=overwrite)
    stored = read_json(out / "config.json") if resume else None
    if stored is not None:
        check_same_settings(stored["train"], config.to_dict(), out)
    checkpoint = world.broadcast(newest_checkpoint(out) if resume else None)
    loaded = load(config, world=world, checkpoint=checkpoint)
    if stored is not None:
        check_same_corpus(stored["corpus"], loaded.text.describe(), out)
    return Prepared(
        config=config,
        out=out,
        resume=resume,
        overwrite=overwrite,
        loaded=loaded,
        arguments=training_arguments(config, out, world),
        world=world,
        checkpoint=checkpoint,
    )


def check_same_settings(stored: dict[str, Any], given: dict[str, Any], out: Path) -> None:
    """Checks that a run is resumed with the settings it began with; only what changes nothing of the training may
    change: the number of threads, the reporters, and the ranks and how they are balanced.

    Raises:
        ValueError: naming the fields that differ.
    """
    stored, given = ({**values, **values["recalibration"]} for values in (stored, given))
    keys = [key for key in {**stored, **given} if key not in ("recalibration", *OUTSIDE)]
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


def train(prepared: Prepared, *, progress: Progress | None = None) -> dict[str, Any]:
    """Trains, and writes ``config.json``, ``metrics.jsonl``, ``checkpoints/`` and ``summary.json`` into the run folder,
    and tells ``config.report_to``.

    Args:
        prepared: from :func:`prepare`; used up.
        progress: told of every step and every record.

    Returns:
        What ``summary.json`` holds; on ranks other than the first, which writes it, ``diverged_at`` alone.

    Raises:
        ValueError: if another process is writing into the folder.
    """
    out, world = prepared.out, prepared.world
    with ExitStack() as stack:
        complaint: Exception | None = None
        if world.is_main:
            try:
                out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(out))
                if prepared.overwrite:
                    clear_run(out)
                if not prepared.resume:
                    write_json(out / "config.json", describe(prepared))
                (out / "summary.json").unlink(missing_ok=True)
            except (ValueError, OSError) as error:
                complaint = error
        if complaint is not None and world.size == 1:
            raise complaint
        world.agree(complaint)
        stack.enter_context(_threads(prepared.config.threads))
        recorder = _run(prepared, progress)
        if not world.is_main:
            return {"diverged_at": recorder.diverged_at}
        summary = summarize(prepared.config, out, diverged_at=recorder.diverged_at)
        summary["parameters"] = sum(p.numel() for p in prepared.loaded.model.parameters())
        write_json(out / "summary.json", summary)
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
    config, out, loaded, world = prepared.config, prepared.out, prepared.loaded, prepared.world
    checkpoint = prepared.checkpoint
    start = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    losses = LossMeter(world)
    recalibration = RecalibrationCallback(loaded.recal)
    recorder = RunRecorder(recalibration, out / "metrics.jsonl", losses, progress, world)
    recorder.continue_from(start)
    tracers = _tracers(prepared, start)
    with _reporters(prepared, recalibration, start) as reporters:
        trainer = RunTrainer(
            world=world,
            losses=losses,
            recorder=recorder,
            moe_modules=[loaded.model.get_submodule(name) for name in loaded.recal.layers],
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
            callbacks=[recorder, *tracers, *reporters],
        )
        trainer.remove_callback(PrinterCallback)
        recalibration.add_to(trainer)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return recorder


def _tracers(prepared: Prepared, start: int) -> list[TrainerCallback]:
    """What writes the routing trace, on the rank that does."""
    if not (prepared.config.trace and prepared.world.is_main):
        return []
    from lrmoe.training.trace import FOLDER, TraceWriter
    from lrmoe.training.trace_recorder import TraceRecorder

    model, recal = prepared.loaded.model, prepared.loaded.recal
    config = model.config.get_text_config()
    widths = {"top_k": "num_experts_per_tok", "dim": "hidden_size", "expert_dim": "moe_intermediate_size"}
    about = {name: getattr(config, key, None) for name, key in widths.items()}
    writer = TraceWriter(prepared.out / FOLDER, {**about, "layers": list(recal.layers)})
    writer.continue_from(start)
    return [TraceRecorder(recal, writer, engine_of(recal))]


def _reporters(
    prepared: Prepared, recalibration: RecalibrationCallback, start: int
) -> AbstractContextManager[list[TrainerCallback]]:
    """As :func:`reporting`, on the rank that writes; nobody on the others."""
    if not prepared.world.is_main:
        return nullcontext([])
    config, out, resume = prepared.config, prepared.out, prepared.resume
    return reporting(Run(config=config, out=out, start=start, resume=resume, recalibration=recalibration))


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
