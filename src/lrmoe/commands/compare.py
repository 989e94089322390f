"""``lrmoe compare``: variants trained from the same weights on the same data."""

from __future__ import annotations

import argparse
from typing import Any

from lrmoe.commands.options import integers, need
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
from lrmoe.studies.compare_config import CompareConfig
from lrmoe.studies.variants import Variant, parse_variants
from lrmoe.training.config import PARALLEL, TrainConfig
from lrmoe.training.documents import check_text
from lrmoe.training.files import check_out_folder
from lrmoe.training.presets import check_model

ALIASES = {"model": "start_from"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The variants, and the settings that they share."""
    add_run_options(parser, without=("seed", "keep_checkpoints", "trace", "report_to", *PARALLEL))
    add_recalibration_options(parser)
    parser.add_argument(
        "--variant",
        dest="variants",
        action="append",
        metavar='"NAME: FIELD=VALUE ..."',
        help='a variant to train, e.g. "C20 pps: drop=0.2 selector=pps"; repeat for more; options of the same names '
        "apply to all variants that do not set them; default: no drop, and 20 %% by pps, topq and random, without a "
        "guard",
    )
    parser.add_argument("--seeds", type=integers, metavar="N,N,...", help="seeds to train each variant with (0,1,2)")
    parser.add_argument("--start-from", metavar="FOLDER", help="checkpoint or run folder that all variants start from")
    parser.add_argument("--pretrain-steps", type=int, metavar="N", help="steps without drop, before the variants part")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time, with one thread each if above 1 (1)")


def run(given: dict[str, Any]) -> int:
    """The verb."""
    out, resume, overwrite = given.pop("out"), given.pop("resume", False), given.pop("overwrite", False)
    stored = stored_config(out, resume, "compare")
    if "start_from" in given:
        if "model" in given:
            raise ValueError("--model and --start-from exclude each other: both say what the variants start from")
        given["model"] = given.pop("start_from")
    own = {key: given.pop(key) for key in ("seeds", "pretrain_steps", "jobs") if key in given}
    for key in ("seeds", "pretrain_steps"):
        if key in stored:
            own.setdefault(key, tuple(stored[key]) if key == "seeds" else stored[key])
    problems = Problems()
    with problems:
        if "variants" in given or not stored:
            variants = parse_variants(given.pop("variants", []))
        else:
            variants = [Variant.from_dict(values) for values in stored["variants"]]
    settings = run_settings(stored, given)
    with problems:
        check_out_folder(out, command="compare", resume=resume, overwrite=overwrite)
    if not resume:
        # What a comparison began with was right then, or is told where it is read.
        with problems:
            check_model(settings["model"])
        with problems:
            if settings["text"] is not None:
                check_text(settings["text"])
    with problems:
        train = TrainConfig.from_dict(settings)
    problems.tell()
    config = CompareConfig(train=train, variants=tuple(variants), **own)
    need(*EXTRA)
    quiet_libraries()
    from lrmoe.studies.compare import compare, prepare_comparison
    from lrmoe.studies.compare_table import HEADINGS, cells
    from lrmoe.terminal import console, print_table, progress_bar

    prepared = prepare_comparison(config, out, resume=resume, overwrite=overwrite)
    say_text(prepared.corpus, train.model)
    with progress_bar(train.model, prepared.total_steps) as steps:
        summary = compare(prepared, progress=steps)
    rows = summary["rows"]
    print_table(HEADINGS, [cells(row) for row in rows], summary["note"])
    console.print(f"table:  {out / 'table.md'}", markup=False)
    write_page(out)
    return 0
