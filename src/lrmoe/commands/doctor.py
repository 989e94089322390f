"""``lrmoe doctor``: checks of the installation and of a model."""

from __future__ import annotations

import argparse
import importlib.util
from typing import TYPE_CHECKING, Any

from lrmoe.commands.run_options import add_recalibration_options, quiet_libraries, take_recalibration
from lrmoe.config import LRMoEConfig
from lrmoe.problems import Problems
from lrmoe.training.presets import check_model

if TYPE_CHECKING:
    from lrmoe.doctor import Check


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model and the recalibration."""
    parser.add_argument("--model", metavar="MODEL", help="preset or checkpoint folder to check (qwen3-moe-tiny)")
    parser.add_argument("--compile", action="store_true", help="also train a step under torch.compile (a minute)")
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, ... (cuda where there is one, else cpu)")
    add_recalibration_options(parser)


def run(given: dict[str, Any]) -> int:
    """The verb."""
    problems = Problems()
    with problems:
        config = LRMoEConfig(**take_recalibration(given))
    with problems:
        if "model" in given:
            check_model(given["model"])
    problems.tell()
    from lrmoe.doctor import diagnose

    if importlib.util.find_spec("transformers") is not None:
        quiet_libraries()

    def show(check: Check) -> None:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}", flush=True)

    report = diagnose(config=config, on_check=show, **given)
    failed = sum(not check.ok for check in report.checks)
    subject = "the installation" if report.model is None else report.model
    verdict = "all is well" if report.ok else f"{failed} failed"
    print(f"{subject}: {len(report.checks)} checks, {verdict}")
    return 0 if report.ok else 1
