"""The ``lrmoe`` command: one thin function a verb. Exit codes: 0 done, 1 ran and found a fault, 2 bad input."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, get_args

import lrmoe
from lrmoe.commands.options import TYPES, integers, need, number_or_none, path
from lrmoe.config import LRMoEConfig, Metric, Quota, Remainder, RouterGrad, Save, Selector

# The packages of the extra "train".
_EXTRA = ("transformers", "accelerate", "plotly", "tensorboard", "rich", "numpy")

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
# Verbs of lrmoe.commands.
_MODULES = {
    "balance": "Plan loads under each balancing policy, or play a run to them.",
    "plan": "Say what of a model fits on a cluster, under which policy, slots, drop and save mode, and how fast.",
    "pressure": "Grow the batch under a hard memory budget, and see what completes under each policy.",
    "study": "Ask whether the loss holds: which pairs, how many, when; for the models here or for one of yours.",
}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    verb = "lrmoe"
    for stream in (sys.stdout, sys.stderr):
        # A name or a sign that the terminal cannot show must not end a run that has done its work.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = vars(_parser().parse_args(argv))
        verb = f"lrmoe {arguments.pop('verb')}"
        command: Callable[[dict[str, Any]], int] = arguments.pop("command")
        return command(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        return _fail(verb, f'this command needs {error.name}: pip install "lrmoe[train]"')
    except (ValueError, OSError) as error:
        return _fail(verb, str(error))
    except RuntimeError as error:
        from lrmoe.training.launch import in_a_line

        if (message := in_a_line(error)) is None:
            raise
        _fail(verb, message)
        return 1
    except KeyboardInterrupt:
        how = "give the same command again to continue" if verb == "lrmoe study" else "continue with --resume"
        print(f"{verb}: interrupted; {how}", file=sys.stderr)
        return 130


def _fail(verb: str, message: str) -> int:
    # One line whatever a name or a library's message holds.
    print(f"{verb}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lrmoe", description="Train mixture-of-experts models with a recalibrated backward.")
    parser.add_argument("--version", action="version", version=f"lrmoe {lrmoe.__version__}")
    verbs = parser.add_subparsers(title="commands", dest="verb", required=True, metavar="COMMAND")

    from lrmoe.training.config import PARALLEL

    def verb(name: str, command: Callable[[dict[str, Any]], int], text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text, argument_default=argparse.SUPPRESS)
        added.set_defaults(command=command)
        return added

    train = verb("train", _train, "Train a model and write a run folder.")
    _add_run_options(train, without=())
    _add_recalibration_options(train)

    compare = verb("compare", _compare, "Train variants from the same weights on the same data, and compare them.")
    _add_run_options(compare, without=("seed", "keep_checkpoints", "trace", "report_to", *PARALLEL))
    _add_recalibration_options(compare)
    compare.add_argument(
        "--variant",
        dest="variants",
        action="append",
        metavar='"NAME: FIELD=VALUE ..."',
        help='a variant to train, e.g. "C20 pps: drop=0.2 selector=pps"; repeat for more; options of the same names '
        "apply to all variants that do not set them; default: no drop, and 20 %% by pps, topq and random, without a "
        "guard",
    )
    compare.add_argument("--seeds", type=integers, metavar="N,N,...", help="seeds to train each variant with (0,1,2)")
    compare.add_argument("--start-from", metavar="FOLDER", help="checkpoint or run folder that all variants start from")
    compare.add_argument("--pretrain-steps", type=int, metavar="N", help="steps without drop, before the variants part")
    compare.add_argument("--jobs", type=int, metavar="N", help="runs at a time, with one thread each if above 1 (1)")

    report = verb(
        "report", _report, "Write report.html again from the records of a run folder, or an index of a folder of them."
    )
    report.add_argument(
        "run", type=path, metavar="DIR", help="what a command wrote with --out, or a folder of such folders"
    )

    for name, text in _MODULES.items():
        # One module a verb; what it imports is imported when the options are listed or it runs.
        module = importlib.import_module(f"lrmoe.commands.{name}")
        module.add_options(verb(name, module.run, text))

    doctor = verb("doctor", _doctor, "Check the installation, and that a model's experts learn under recalibration.")
    doctor.add_argument("--model", metavar="MODEL", help="preset or checkpoint folder to check (qwen3-moe-tiny)")
    doctor.add_argument("--compile", action="store_true", help="also train a step under torch.compile (a minute)")
    doctor.add_argument("--device", metavar="DEVICE", help="cpu, cuda, ... (cuda where there is one, else cpu)")
    _add_recalibration_options(doctor)
    return parser


def _add_run_options(parser: argparse.ArgumentParser, without: tuple[str, ...]) -> None:
    from lrmoe.training.config import POLICIES, SCHEDULES, TrainConfig

    choices = {"lr_schedule": SCHEDULES, "policy": POLICIES}
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="run folder to write")
    parser.add_argument(
        "--resume", action="store_true", help="continue what --out holds, with the settings it began with"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete the run that --out holds")
    for field in fields(TrainConfig):
        if field.name in (*without, "recalibration"):
            continue
        option, text = "--" + field.name.replace("_", "-"), field.metadata["help"]
        if field.type == "bool":
            parser.add_argument(option, action="store_true", help=text)
            continue
        default = "" if field.default is None else f" ({field.default})"
        kind = str(field.type).partition(" ")[0]
        shown = {"report_to": "NAME,..."}.get(field.name, {"int": "N", "float": "X"}.get(kind, "PATH"))
        parser.add_argument(
            option,
            type=TYPES.get(kind, str),
            choices=choices.get(field.name),
            metavar=None if field.name in choices else shown,
            help=text + default,
        )


def _add_recalibration_options(parser: argparse.ArgumentParser) -> None:
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


def _take_recalibration(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given.pop(name) for name in _RECALIBRATION if name in given}


def _stored(out: Path, resume: bool, command: str) -> dict[str, Any]:
    """The ``config.json`` a run is resumed with; options given on top of it are checked against it later."""
    from lrmoe.training.files import check_out_folder, read_json

    if not resume:
        return {}
    check_out_folder(out, command=command, resume=True, overwrite=False)
    return read_json(out / "config.json")


def _train_config(stored: dict[str, Any], given: dict[str, Any]) -> Any:
    from lrmoe.training.config import TrainConfig

    values = stored.get("train") or TrainConfig().to_dict()
    recalibration = {**values["recalibration"], **_take_recalibration(given)}
    return TrainConfig.from_dict({**values, **given, "recalibration": recalibration})


def _quiet_libraries() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _train(given: dict[str, Any]) -> int:
    need(*_EXTRA)
    out, resume, overwrite = given.pop("out"), given.pop("resume", False), given.pop("overwrite", False)
    config = _train_config(_stored(out, resume, "train"), given)
    from lrmoe.training.launch import launch, warm_up
    from lrmoe.training.world import World, join_world, torchrun_size

    size = torchrun_size() or 1
    if size == 1 and config.ep > 1:
        warm_up()
    _quiet_libraries()
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


def _train_rank(world: Any, config: Any, out: Path, resume: bool, overwrite: bool) -> int:
    """The run, as one of its processes; the first of them speaks to the user."""
    from lrmoe.terminal import console, print_summary, progress_bar
    from lrmoe.training.run import prepare, train

    _quiet_libraries()
    prepared = prepare(config, out, resume=resume, overwrite=overwrite, world=world)
    if not world.is_main:
        return 0 if train(prepared)["diverged_at"] is None else 1
    _say_skipped(prepared.loaded.text.describe())
    with progress_bar(config.model, config.steps) as steps:
        summary = train(prepared, progress=lambda step, record: steps("", step, record))
    ranks = f", {world.size} ranks" if world.size > 1 else ""
    print_summary(f"{config.model}, {config.steps} steps, drop {config.recalibration.drop}{ranks}", _numbers(summary))
    console.print(f"report: {out / 'report.html'}", markup=False)
    if summary["diverged_at"] is not None:
        print(f"lrmoe train: the loss is not finite at step {summary['diverged_at']}; lower --lr", file=sys.stderr)
        return 1
    return 0


def _compare(given: dict[str, Any]) -> int:
    need(*_EXTRA)
    from lrmoe.studies.variants import Variant, parse_variants
    from lrmoe.terminal import console, print_table, progress_bar

    out, resume, overwrite = given.pop("out"), given.pop("resume", False), given.pop("overwrite", False)
    stored = _stored(out, resume, "compare")
    if "start_from" in given:
        if "model" in given:
            raise ValueError("--model and --start-from exclude each other: both say what the variants start from")
        given["model"] = given.pop("start_from")
    own = {key: given.pop(key) for key in ("seeds", "pretrain_steps", "jobs") if key in given}
    for key in ("seeds", "pretrain_steps"):
        if key in stored:
            own.setdefault(key, tuple(stored[key]) if key == "seeds" else stored[key])
    if "variants" in given or not stored:
        variants = parse_variants(given.pop("variants", []))
    else:
        variants = [Variant.from_dict(values) for values in stored["variants"]]
    config = _train_config(stored, given)
    _quiet_libraries()
    from lrmoe.studies.compare import CompareConfig, compare, prepare_comparison
    from lrmoe.studies.compare_table import HEADINGS, cells

    prepared = prepare_comparison(
        CompareConfig(train=config, variants=tuple(variants), **own), out, resume=resume, overwrite=overwrite
    )
    _say_skipped(prepared.corpus)
    with progress_bar(config.model, prepared.total_steps) as steps:
        summary = compare(prepared, progress=steps)
    rows = summary["rows"]
    print_table(HEADINGS, [cells(row) for row in rows], summary["note"])
    console.print(f"table:  {out / 'table.md'}\nreport: {out / 'report.html'}", markup=False)
    return 0


def _report(given: dict[str, Any]) -> int:
    need("plotly")
    from lrmoe.report import write_report

    print(write_report(given["run"]))
    return 0


def _doctor(given: dict[str, Any]) -> int:
    from lrmoe.doctor import Check, diagnose

    if importlib.util.find_spec("transformers") is not None:
        _quiet_libraries()

    def show(check: Check) -> None:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}", flush=True)

    config = LRMoEConfig(**_take_recalibration(given))
    report = diagnose(config=config, on_check=show, **given)
    failed = sum(not check.ok for check in report.checks)
    subject = "the installation" if report.model is None else report.model
    verdict = "all is well" if report.ok else f"{failed} failed"
    print(f"{subject}: {len(report.checks)} checks, {verdict}")
    return 0 if report.ok else 1


def _say_skipped(corpus: dict[str, Any]) -> None:
    from lrmoe.terminal import console

    reasons = ", ".join(f"{count} {reason}" for reason, count in corpus["skipped"].items())
    skipped = f"; skipped: {reasons}" if reasons else ""
    console.print(
        f"text: {corpus['source']}, {corpus['files']} files, {corpus['train_tokens']:,} tokens to train on, "
        f"{corpus['validation_tokens']:,} to validate on{skipped}",
        markup=False,
    )


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


if __name__ == "__main__":
    sys.exit(main())
