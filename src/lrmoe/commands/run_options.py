"""What the verbs that train have in common: the options of a run, and the settings they come to."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from lrmoe.commands.options import add_fields, number_or_none, path
from lrmoe.config import LRMoEConfig, Metric, Quota, Remainder, RouterGrad, Save, Selector
from lrmoe.training.config import POLICIES, SCHEDULES, TrainConfig
from lrmoe.training.files import check_out_folder, read_json
from lrmoe.training.presets import BYTE_VOCAB_SIZE, PRESETS, checkpoint_folder, has_tokenizer

# The packages of the extra "train".
EXTRA = ("transformers", "accelerate", "plotly", "tensorboard", "rich", "numpy")

# Options of the recalibration; --seed and --steps also give it its seed and the length of the run.
_RECALIBRATION: dict[str, tuple[Callable[[str], Any], tuple[str, ...] | None, str]] = {
    "drop": (float, None, "fraction of token-expert pairs the backward may leave out, in [0, 1)"),
    "selector": (str, get_args(Selector), "which pairs of an expert fill its quota"),
    "metric": (str, get_args(Metric), "the importance of a pair"),
    "quota": (str, get_args(Quota), "how the drop is spread over experts"),
    "router_grad": (str, get_args(RouterGrad), "routing-weight gradient of dropped pairs"),
    "save": (str, get_args(Save), "what the forward keeps for the backward"),
    "remainder": (str, get_args(Remainder), "what stands for dropped pairs in the gradients of the experts' weights"),
    "error_budget": (float, None, "largest error of an expert's selection, as a share of its importance"),
    "warmup_steps": (int, None, "steps without drop at the start"),
    "ramp_steps": (int, None, "steps over which the drop then rises"),
    "final_dense_steps": (int, None, "steps without drop at the end"),
    "guard_variance": (number_or_none, None, "V*/sum R above which a layer stops dropping for a while; none for never"),
    "guard_tail": (number_or_none, None, "the same for topq: limit of the dropped share of sum R; none for never"),
}


def add_run_options(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """The run folder and all settings of :class:`TrainConfig` but some."""
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="run folder to write")
    parser.add_argument(
        "--resume", action="store_true", help="continue what --out holds, with the settings it began with"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete the run that --out holds")
    add_fields(
        parser,
        [field for field in fields(TrainConfig) if field.name not in (*without, "recalibration")],
        choices={"lr_schedule": SCHEDULES, "policy": POLICIES},
        names={"model": "PATH", "text": "PATH", "report_to": "NAME,..."},
    )


def add_recalibration_options(parser: argparse.ArgumentParser) -> None:
    """A group of its own."""
    group = parser.add_argument_group("recalibration of the backward")
    defaults = LRMoEConfig()
    for name, (kind, choices, text) in _RECALIBRATION.items():
        default = getattr(defaults, name)
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            choices=choices,
            metavar=None if choices else ("N" if kind is int else "X"),
            help=text if default is None else f"{text} ({default})",
        )


def take_recalibration(given: dict[str, Any]) -> dict[str, Any]:
    """Those of the recalibration, which are taken out of ``given``."""
    return {name: given.pop(name) for name in _RECALIBRATION if name in given}


def stored_config(out: Path, resume: bool, command: str) -> dict[str, Any]:
    """The ``config.json`` a run is resumed with; options given on top of it are checked against it later."""
    if not resume:
        return {}
    check_out_folder(out, command=command, resume=True, overwrite=False)
    return read_json(out / "config.json")


def run_settings(stored: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a :class:`TrainConfig`, not checked yet: those it began with, or the defaults, and what is
    given."""
    values = stored.get("train") or TrainConfig().to_dict()
    recalibration = {**values["recalibration"], **take_recalibration(given)}
    return {**values, **given, "recalibration": recalibration}


def quiet_libraries() -> None:
    """Transformers says nothing below an error, and draws no bars."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def say_text(corpus: dict[str, Any], model: str) -> None:
    """What a run's text is, what of it was left out, and what its tokens are where the model does not say."""
    from lrmoe.terminal import console

    reasons = ", ".join(f"{count} {reason}" for reason, count in corpus["skipped"].items())
    skipped = f"; skipped: {reasons}" if reasons else ""
    console.print(
        f"text: {corpus['source']}, {corpus['files']} files, {corpus['train_tokens']:,} tokens to train on, "
        f"{corpus['validation_tokens']:,} to validate on{skipped}",
        markup=False,
    )
    say_fallback(model)


def say_fallback(model: str) -> None:
    """That text is taken as bytes, for a model that could be expected to bring a tokenizer and does not."""
    from lrmoe.terminal import console

    if model not in PRESETS and not has_tokenizer(checkpoint_folder(model)):
        console.print(
            f"tokens: {model} brings no tokenizer, so the text is taken as bytes, {BYTE_VOCAB_SIZE} ids; for a model "
            "that was trained on other tokens save its tokenizer there (tokenizer.save_pretrained)",
            markup=False,
        )
