"""``lrmoe train``: one training run, in this process or over several."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lrmoe.commands.options import need
from lrmoe.commands.pages import write_page
from lrmoe.commands.run_options import (
    EXTRA,
    add_recalibration_options,
    add_run_options,
    quiet_libraries,
    run_settings,
    say_text,
    stored_config,
)
from lrmoe.problems import Problems
from lrmoe.training.config import TrainConfig
from lrmoe.training.documents import check_text
from lrmoe.training.files import check_out_folder
from lrmoe.training.presets import check_experts, check_model


def add_options(parser: argparse.ArgumentParser) -> None:
    """All settings of a run."""
    add_run_options(parser)
    add_recalibration_options(parser)


def run(given: dict[str, Any]) -> int:
    """The verb."""
    out, resume, overwrite = given.pop("out"), given.pop("resume", False), given.pop("overwrite", False)
    settings = run_settings(stored_config(out, resume, "train"), given)
    config = _checked(settings, out, resume, overwrite)
    need(*EXTRA)
    from lrmoe.training.launch import launch, warm_up
    from lrmoe.training.world import World, join_world, torchrun_size

    size = torchrun_size() or 1
    if size == 1 and config.ep > 1:
        warm_up()
    quiet_libraries()
    from lrmoe.training.run import check

    if size > 1:
        world, complaint = join_world(timeout=config.rank_timeout), None
        try:
            check(config, out, size=size, resume=resume, overwrite=overwrite)
        except (ValueError, OSError) as error:
            complaint = error
        world.agree(complaint)
        return _train_rank(world, config, out, resume, overwrite)
    if config.ep > 1:
        check(config, out, size=config.ep, resume=resume, overwrite=overwrite)
        return launch(_train_rank, config, out, resume, overwrite, size=config.ep, timeout=config.rank_timeout)
    return _train_rank(World(), config, out, resume, overwrite)


def _checked(settings: dict[str, Any], out: Path, resume: bool, overwrite: bool) -> TrainConfig:
    """The run's config; ValueError with all that can be told to be wrong before torch is imported."""
    problems = Problems()
    with problems:
        config = TrainConfig.from_dict(settings)
    with problems:
        check_out_folder(out, command="train", resume=resume, overwrite=overwrite)
    if not resume:
        # What a run began with was right then, or is told where it is read.
        with problems:
            check_model(settings["model"])
            check_experts(settings["model"], settings["ep"])
        with problems:
            if settings["text"] is not None:
                check_text(settings["text"])
    problems.tell()
    return config


def _train_rank(world: Any, config: TrainConfig, out: Path, resume: bool, overwrite: bool) -> int:
    """The run, as one of its processes; the first of them speaks to the user."""
    from lrmoe.terminal import print_summary, progress_bar
    from lrmoe.training.run import prepare, train

    quiet_libraries()
    prepared = prepare(config, out, resume=resume, overwrite=overwrite, world=world)
    if not world.is_main:
        return 0 if train(prepared)["diverged_at"] is None else 1
    say_text(prepared.loaded.text.describe(), config.model)
    with progress_bar(config.model, config.steps) as steps:
        summary = train(prepared, progress=lambda step, record: steps("", step, record))
    ranks = f", {world.size} ranks" if world.size > 1 else ""
    print_summary(f"{config.model}, {config.steps} steps, drop {config.recalibration.drop}{ranks}", _numbers(summary))
    write_page(out)
    if summary["diverged_at"] is not None:
        print(f"lrmoe train: the loss is not finite at step {summary['diverged_at']}; lower --lr", file=sys.stderr)
        return 1
    return 0


def _numbers(summary: dict[str, Any]) -> list[tuple[str, str]]:
    from lrmoe.training.summary import LAST_STEPS

    def show(key: str, form: str, scale: float = 1.0) -> str:
        value = summary[key]
        return "-" if value is None else form.format(value * scale)

    saved = summary["saved_bytes"]
    return [
        ("validation loss", show("eval_loss", "{:.4f}")),
        (f"training loss, last {min(LAST_STEPS, summary['steps'])} steps", show("train_loss", "{:.4f}")),
        ("kept pairs", show("kept_share", "{:.1f} %", 100)),
        ("kept sum R", show("kept_importance_share", "{:.2f} %", 100)),
        ("V*/sum R", show("variance_share", "{:.4f}")),
        ("load max/mean", show("load_max_over_mean", "{:.2f}")),
        ("expert forward a step", show("forward_seconds", "{:.0f} ms", 1000)),
        ("expert backward a step", show("backward_seconds", "{:.0f} ms", 1000)),
        ("saved for backward, MoE layers", "-" if saved is None else f"{saved['moe'] / 2**20:.1f} MiB"),
        ("wall clock", show("seconds", "{:.0f} s")),
    ]
