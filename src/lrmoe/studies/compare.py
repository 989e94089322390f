"""Paired training runs: the same weights and the same data in the same order, told apart by their recalibration."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lrmoe.config import LRMoEConfig
from lrmoe.studies.compare_config import CompareConfig
from lrmoe.studies.compare_table import footnote, make_rows, markdown
from lrmoe.studies.jobs import Job, Progress, run_jobs
from lrmoe.studies.kept_run import check_kept, check_weights, is_finished, read_lines, read_summary
from lrmoe.studies.variants import Variant
from lrmoe.training.config import TrainConfig
from lrmoe.training.files import (
    check_out_folder,
    clear_run,
    locked,
    read_json,
    write_json,
    write_records,
    write_text,
)
from lrmoe.training.run import check_same_corpus, check_same_settings, load, versions


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedComparison:
    """A comparison whose settings, text, model and folder have been checked."""

    config: CompareConfig
    out: Path
    resume: bool
    overwrite: bool
    corpus: dict[str, Any]

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all runs that are not finished yet."""
        jobs = [*_pretrain_jobs(self.config, self.out), *_variant_jobs(self.config, self.out)]
        return sum(job.config.steps for job in jobs if self.overwrite or not is_finished(job.out))


def prepare_comparison(
    config: CompareConfig, out: Path, *, resume: bool = False, overwrite: bool = False
) -> PreparedComparison:
    """Checks everything a user can get wrong; writes nothing.

    Raises:
        ValueError: naming what is wrong and the mend.
    """
    check_out_folder(out, command="compare", resume=resume, overwrite=overwrite)
    # What can be wrong is the same for all runs, so the first seed's are tried.
    corpus = load(replace(config.train, seed=config.seeds[0])).text.describe()
    if config.pretrain_steps:
        load(_pretrain_config(config, config.seeds[0]))
    if resume:
        stored = read_json(out / "config.json")
        check_same_settings(stored["train"], config.train.to_dict(), out)
        for key, value in config.to_dict().items():
            if key != "train" and stored[key] != value:
                raise ValueError(
                    f"out={str(out)!r} was begun with {key}={stored[key]!r}, now {value!r}; resume with the same "
                    "settings or give another out"
                )
        check_same_corpus(stored["corpus"], corpus, out)
        _check_runs(config, out)
    return PreparedComparison(config=config, out=out, resume=resume, overwrite=overwrite, corpus=corpus)


def _check_runs(config: CompareConfig, out: Path) -> None:
    """Raises ValueError for damage to what there is of the runs, before hours go into what is missing."""
    for job in _pretrain_jobs(config, out):
        check_kept(job.out)
    for job in _variant_jobs(config, out):
        check_kept(job.out)
        if is_finished(job.out):
            read_lines(job.out)
        elif config.pretrain_steps:
            check_weights(_pretrained_folder(out, job.config.seed))


def compare(prepared: PreparedComparison, *, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Trains what is not finished yet and writes ``config.json``, ``metrics.jsonl`` (every run's lines, with
    ``variant`` and ``seed``), ``summary.json`` and ``table.md``; each run keeps its own folder under ``runs/``.

    Returns:
        What ``summary.json`` holds.

    Raises:
        ValueError: if another process is writing into the folder.
    """
    config, out = prepared.config, prepared.out
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        if prepared.overwrite:
            clear_run(out)
        if not prepared.resume:
            settings = {**config.to_dict(), "corpus": prepared.corpus, "versions": versions()}
            write_json(out / "config.json", {"command": "compare", **settings})
        pretrain = [job for job in _pretrain_jobs(config, out) if not is_finished(job.out)]
        run_jobs(pretrain, parallel=config.jobs, progress=progress)
        runs = _variant_jobs(config, out)
        run_jobs([job for job in runs if not is_finished(job.out)], parallel=config.jobs, progress=progress)
        for job in runs:
            # A finished run is told by its records; its weights are only needed while it can still be interrupted.
            shutil.rmtree(job.out / "checkpoints", ignore_errors=True)
        return _write_results(config, out)


def _write_results(config: CompareConfig, out: Path) -> dict[str, Any]:
    summaries: dict[str, list[dict[str, Any]]] = {}
    lines: list[dict[str, Any]] = []
    for variant in config.variants:
        for seed in config.seeds:
            folder = _run_folder(out, variant, seed)
            summaries.setdefault(variant.name, []).append(read_summary(folder))
            lines += [{"variant": variant.name, "seed": seed, **record} for record in read_lines(folder)]
    rows = make_rows(summaries, config.baseline)
    note = footnote(rows, config.baseline, steps=config.train.steps, memorized=config.train.memorize_bytes)
    summary = {
        "command": "compare",
        "baseline": config.baseline,
        "seeds": list(config.seeds),
        "note": note,
        "rows": rows,
    }
    write_records(out / "metrics.jsonl", lines)
    write_text(out / "table.md", markdown(rows, note))
    write_json(out / "summary.json", summary)
    return summary


def _run_folder(out: Path, variant: Variant, seed: int) -> Path:
    return out / "runs" / variant.folder / f"seed-{seed}"


def _pretrained_folder(out: Path, seed: int) -> Path:
    return out / "pretrained" / f"seed-{seed}"


def _pretrain_config(config: CompareConfig, seed: int) -> TrainConfig:
    exact = LRMoEConfig(drop=0.0)
    steps = max(1, config.pretrain_steps)
    return replace(_worker_config(config, seed), steps=steps, memorize_bytes=None, recalibration=exact)


def _pretrain_jobs(config: CompareConfig, out: Path) -> Sequence[Job]:
    if not config.pretrain_steps:
        return []
    return [
        Job(name=f"pretrain, seed {seed}", config=_pretrain_config(config, seed), out=_pretrained_folder(out, seed))
        for seed in config.seeds
    ]


def _variant_jobs(config: CompareConfig, out: Path) -> list[Job]:
    """Seed by seed, so that an interrupted comparison has whole seeds to show."""
    jobs = []
    for seed in config.seeds:
        common = _worker_config(config, seed)
        if config.pretrain_steps:
            common = replace(common, model=str(_pretrained_folder(out, seed)))
        for variant in config.variants:
            run = replace(common, recalibration=variant.config(common.recalibration))
            jobs.append(Job(name=f"{variant.name}, seed {seed}", config=run, out=_run_folder(out, variant, seed)))
    return jobs


def _worker_config(config: CompareConfig, seed: int) -> TrainConfig:
    threads = config.train.threads or (1 if config.jobs > 1 else None)
    return replace(config.train, seed=seed, threads=threads, keep_checkpoints=1)
