"""From the records of a run folder to its row of the index."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lrmoe import strict_json
from lrmoe.report.index_entry import Entry, Result
from lrmoe.report.run_folder import read_object
from lrmoe.training.files import check_file

# What a setting may be without two runs' losses being of different things. Everything else must be the same.
_OF_NO_EFFECT = {
    *("seed", "threads", "log_every", "eval_every", "save_every", "keep_checkpoints", "trace", "rank_timeout"),
    *("ep", "policy", "slots", "capacity", "recalibration", "gradient_checkpointing"),
}
# What must also be the same for two times to be of the same thing.
_OF_TIME = ("threads", "ep", "policy", "slots", "gradient_checkpointing")

Object = dict[str, Any]
Fill = Callable[[Entry, Object, "Object | None"], None]
"""Gives an entry whose ``command`` is known the rest of its values.

Args:
    entry: as it is made, with its path.
    config: ``config.json`` of the folder.
    summary: its ``summary.json``, if there is one.

Raises:
    ValueError: naming what is of another kind.
    KeyError, TypeError, AttributeError, IndexError, StopIteration, ArithmeticError: for other damage.
"""


def check(entry: Entry) -> None:
    """Raises ValueError for what was taken as it stood in the records and is of another kind."""
    told = {"steps done": entry.done, "steps planned": entry.planned}
    told |= {f"seed of result {i}": result.seed for i, result in enumerate(entry.results)}
    for name, value in told.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name}={value!r} must be an integer")


def read_training(entry: Entry, config: Object, summary: Object | None) -> None:
    """Of ``lrmoe train``; see :data:`Fill`."""
    train = config["train"]
    _describe(entry, train, config)
    recalibration = train["recalibration"]
    entry.setting = setting_in_words(recalibration)
    entry.planned = train["steps"]
    told = summary or _last_lines(entry.path / "metrics.jsonl")
    entry.done = told.get("steps", told.get("step", 0))
    diverged = summary is not None and summary.get("diverged_at") is not None
    entry.state = "unfinished" if summary is None else "diverged" if diverged else "finished"
    entry.eval_loss = _number(told, "eval_loss")
    entry.train_loss = _number(told, "train_loss") if summary else _number(told, "loss")
    for name in ("kept_share", "kept_importance_share", "variance_share"):
        setattr(entry, name, _number(told, name))
    entry.guarded = guarded_layers(told)
    if summary is None:
        return
    entry.moe_seconds = _sum(_number(summary, "forward_seconds"), _number(summary, "backward_seconds"))
    if entry.eval_loss is not None and math.isfinite(entry.eval_loss):
        entry.results.append(
            Result(
                setting=entry.setting,
                seed=train.get("seed"),
                drop=recalibration.get("drop"),
                loss=entry.eval_loss,
                kept_share=entry.kept_share,
                moe_seconds=entry.moe_seconds,
            )
        )


def read_comparison(entry: Entry, config: Object, summary: Object | None) -> None:
    """Of ``lrmoe compare``; see :data:`Fill`."""
    train = config["train"]
    _describe(entry, train, config)
    variants, seeds = config["variants"], config["seeds"]
    names = ", ".join(str(variant["name"]) for variant in variants)
    entry.setting = f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''} of {names}"
    entry.planned = train["steps"] * len(variants) * len(seeds)
    if summary is None:
        entry.done = sum(_steps_done(folder) for folder in entry.path.glob("runs/*/seed-*"))
        return
    entry.done = entry.planned
    rows = summary["rows"]
    if any(step is not None for row in rows for step in row.get("diverged", [])):
        entry.state = "diverged"
    else:
        entry.state = "finished"
    base = next(row for row in rows if row["variant"] == summary["baseline"])
    entry.eval_loss, entry.train_loss = _number(base, "eval_loss"), _number(base, "train_loss")
    entry.moe_seconds = _sum(_number(base, "forward_seconds"), _number(base, "backward_seconds"))
    others = [d for row in rows if row is not base and (d := _number(row, "eval_loss_difference")) is not None]
    if others:
        entry.outcome = f"{min(others):+.3f} to {max(others):+.3f}" if len(others) > 1 else f"{others[0]:+.3f}"
    described = {variant["name"]: {**train["recalibration"], **variant} for variant in variants}
    for row in rows:
        recalibration = described[row["variant"]]
        losses = row.get("eval_losses") or [row.get("eval_loss")]
        for seed, loss in zip(seeds, losses, strict=False):
            if isinstance(loss, (int, float)) and math.isfinite(loss):
                entry.results.append(
                    Result(
                        setting=setting_in_words(recalibration),
                        seed=seed,
                        drop=recalibration.get("drop"),
                        loss=float(loss),
                        kept_share=_number(row, "kept_share"),
                        moe_seconds=_sum(_number(row, "forward_seconds"), _number(row, "backward_seconds")),
                    )
                )


def read_study(entry: Entry, config: Object, summary: Object | None) -> None:
    """Of a study; see :data:`Fill`."""
    entry.state = "unfinished" if summary is None else "finished"
    told = summary or {}
    entry.model = str(told.get("title") or config.get("study") or "")
    entry.setting = str(told.get("study") or config.get("study") or "")
    entry.outcome = str(next(iter(told.get("conclusions") or []), ""))
    cells = list(entry.path.glob("cells/*"))
    if summary is None and cells:
        entry.done = len(cells)


def read_plan(entry: Entry, config: Object, summary: Object | None) -> None:
    """Of ``lrmoe plan``; see :data:`Fill`."""
    read_policies(entry, config, summary, "options")
    entry.outcome = str((summary or {}).get("recommendation", ""))


def read_balance(entry: Entry, config: Object, summary: Object | None) -> None:
    """Of ``lrmoe balance``; see :data:`Fill`."""
    policies = read_policies(entry, config, summary, "policies")
    ran = [one for one in policies if one.get("against_fixed") is not None and one.get("policy") != "fixed"]
    if ran:
        best = min(ran, key=lambda one: one["against_fixed"])
        entry.outcome = f"shortest modelled MoE time: {best['policy']}, {best['against_fixed']:.2f} x fixed"
    elif policies:
        fits = [str(one["policy"]) for one in policies if one.get("fits")]
        entry.outcome = f"fits: {'; '.join(fits) or 'none'}"


def read_policies(entry: Entry, config: Object, summary: Object | None, key: str) -> list[Object]:
    """What all that is planned on paper has: whether it is finished, of which model, and the policies' records, which
    are under ``key`` of the summary and are returned."""
    entry.state = "unfinished" if summary is None else "finished"
    told = summary or {}
    model = told.get("model")
    entry.model = str(model["name"] if isinstance(model, dict) else told.get("source") or config.get("model") or "")
    policies: list[Object] = told.get(key) or []
    entry.setting = "; ".join(dict.fromkeys(str(one["policy"]) for one in policies))
    return policies


def _describe(entry: Entry, train: Object, config: Object) -> None:
    """What was trained, and what must be equal for a comparison."""
    corpus = config.get("corpus") or {}
    entry.model = str(train["model"])
    tokens = train["batch"] * train["seq"] * train.get("grad_accum", 1)
    text = "its own training text" if corpus.get("validation_is_training") else str(corpus.get("source") or "a text")
    entry.kind = f"{entry.model}, {train['steps']:,} steps of {tokens:,} tokens, validated on {text}"
    same = {key: value for key, value in train.items() if key not in _OF_NO_EFFECT}
    same |= {"pretrain_steps": config.get("pretrain_steps") or 0, "sha256": corpus.get("sha256")}
    entry.alike = json.dumps(same, sort_keys=True, default=str)
    timed = {key: train.get(key) for key in _OF_TIME} | {"versions": config.get("versions")}
    entry.timed_alike = json.dumps(timed, sort_keys=True, default=str)


def setting_in_words(recalibration: Object) -> str:
    """``drop 20 %, pps``, with whatever else differs from the defaults; ``no drop``."""
    from lrmoe.config import LRMoEConfig

    drop = recalibration.get("drop")
    budget = recalibration.get("error_budget")
    if drop == 0 and not budget:
        return "no drop"
    words = [f"drop {100 * drop:g} %" if isinstance(drop, (int, float)) else "drop ?"]
    words.append(str(recalibration.get("selector", "?")))
    defaults = LRMoEConfig().to_dict()
    hidden = {"drop", "selector", "seed", "save", "total_steps", "name"}
    for key, value in recalibration.items():
        if key not in hidden and key in defaults and value != defaults[key]:
            words.append(f"{key}={value}")
    return ", ".join(words)


def guarded_layers(told: Object) -> int | None:
    """In how many layers the guard stopped dropping at some time (of a summary), or holds it now (of a logged line);
    None where the records do not say."""
    guarded = told.get("guarded", told.get("guarded_layers"))
    if isinstance(guarded, list):
        return len(guarded)
    return guarded if isinstance(guarded, int) and not isinstance(guarded, bool) else None


def _number(told: Object, name: str) -> float | None:
    value = told.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"summary.json: {name}={value!r} must be a number")
    return float(value)


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _steps_done(folder: Path) -> int:
    try:
        summary = folder / "summary.json"
        told = read_object(summary) if summary.exists() else _last_lines(folder / "metrics.jsonl")
        return int(told.get("steps", told.get("step", 0)))
    except (ValueError, OSError, TypeError):
        return 0  # The page of that run says what is wrong with it.


def _last_lines(path: Path) -> Object:
    """What was logged last, with the last validation loss; nothing if nothing was logged.

    Long runs have hundreds of MB of lines, so only the last two that matter are read as JSON. A last line without an
    end is being written.
    """
    if not path.exists():
        return {}
    check_file(path)
    last = validated = ""
    for line in _whole_lines(path):
        if '"loss"' in line:
            last = line
        if '"eval_loss"' in line:
            validated = line
    told: Object = {}
    for line in (validated, last):
        if line:
            try:
                value = strict_json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"metrics.jsonl: a line is not valid JSON ({error}); delete it") from None
            told = {**told, **value}
    return told


def _whole_lines(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            yield from (line for line in file if line.endswith("\n"))
    except UnicodeDecodeError as error:
        raise ValueError(f"metrics.jsonl is not UTF-8 text (byte {error.start})") from None
