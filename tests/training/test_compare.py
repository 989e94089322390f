"""Paired runs: that they are paired, that only what is unfinished is done again, and what the table says."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lrmoe import LRMoEConfig
from lrmoe.studies.compare import CompareConfig, compare, prepare_comparison
from lrmoe.studies.compare_table import HEADINGS, cells, footnote, make_rows, markdown
from lrmoe.studies.variants import DEFAULT, Variant, parse_variant, parse_variants
from lrmoe.training.config import TrainConfig
from lrmoe.training.files import read_records

MakeConfig = Callable[..., TrainConfig]


class Killed(Exception):
    pass


def comparison(config: TrainConfig, **changes: Any) -> CompareConfig:
    texts = changes.pop("variants", ["C0: drop=0", "C50 topq: drop=0.5 selector=topq"])
    settings = {"seeds": (0, 1), **changes}
    return CompareConfig(train=config, variants=tuple(parse_variants(texts)), **settings)


def run(config: CompareConfig, out: Path, **options: Any) -> dict[str, Any]:
    progress = options.pop("progress", lambda *_: None)
    return compare(prepare_comparison(config, out, **options), progress=progress)


@pytest.fixture
def short(tiny: MakeConfig) -> TrainConfig:
    return tiny(steps=4, eval_every=4, save_every=2)


def first_losses(out: Path) -> dict[tuple[str, int], float]:
    return {(r["variant"], r["seed"]): r["loss"] for r in read_records(out / "metrics.jsonl") if r["step"] == 1}


def test_variants_are_paired_and_the_table_says_how_they_differ(short: TrainConfig, tmp_path: Path) -> None:
    out = tmp_path / "c"
    summary = run(comparison(short), out)
    losses = first_losses(out)
    # The same weights and the same batch: the first loss of a seed is one number, to the last bit.
    for seed in (0, 1):
        assert losses["C0", seed] == losses["C50 topq", seed]
    assert losses["C0", 0] != losses["C0", 1]
    rows = {row["variant"]: row for row in summary["rows"]}
    base, half = rows["C0"], rows["C50 topq"]
    assert base["eval_loss_difference"] == 0
    assert base["kept_share"] == 1
    assert half["kept_share"] == pytest.approx(0.5)
    assert half["eval_loss_differences"] == [half["eval_losses"][i] - base["eval_losses"][i] for i in (0, 1)]
    assert half["eval_loss_difference"] == pytest.approx(sum(half["eval_loss_differences"]) / 2)
    assert half["eval_loss_difference"] != 0
    assert base["eval_loss_spread"] == pytest.approx(abs(base["eval_losses"][0] - base["eval_losses"][1]))
    assert base["backward_ratio"] == 1
    assert half["backward_ratio"] > 0
    assert half["saved_bytes"] == base["saved_bytes"] > 0
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "summary.json", "table.md", "runs"}
    assert json.loads((out / "summary.json").read_text()) == summary
    lines = read_records(out / "metrics.jsonl")
    assert len(lines) == 2 * 2 * 4
    for line in lines:
        assert line["drop"] == (0 if line["variant"] == "C0" else 0.5)
    table = (out / "table.md").read_text()
    assert "C50 topq" in table
    assert f"{half['eval_loss']:.4f}" in table
    headings, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[:4])
    shown = dict(zip(headings, rows[1], strict=True))
    assert (shown["kept pairs"], shown["kept sum R"]) == (
        f"{100 * half['kept_share']:.1f} %",
        f"{100 * half['kept_importance_share']:.2f} %",
    )


@pytest.mark.slow
def test_interrupted_comparison_redoes_only_what_is_unfinished(short: TrainConfig, tmp_path: Path) -> None:
    config = comparison(short)
    whole = run(config, tmp_path / "whole")
    out = tmp_path / "cut"
    done: list[tuple[str, int]] = []

    def kill(name: str, step: int, record: Any) -> None:
        if name == "C0, seed 1" and step == 3:
            raise Killed

    with pytest.raises(Killed):
        run(config, out, progress=kill)
    assert not (out / "summary.json").exists()
    prepared = prepare_comparison(config, out, resume=True)
    assert prepared.total_steps == 2 * 4
    resumed = compare(prepared, progress=lambda name, step, record: done.append((name, step)))
    # Two runs of the first seed were finished; the cut one goes on from its checkpoint at step 2.
    assert list(dict.fromkeys(done)) == [
        ("C0, seed 1", 3),
        ("C0, seed 1", 4),
        *[("C50 topq, seed 1", i) for i in (1, 2, 3, 4)],
    ]
    for before, after in zip(whole["rows"], resumed["rows"], strict=True):
        for key in ("eval_losses", "train_losses", "kept_share", "kept_importance_share", "saved_bytes"):
            assert before[key] == after[key]
    again: list[str] = []
    assert run(config, out, resume=True, progress=lambda name, *_: again.append(name)) == resumed
    assert again == []


def test_resume_refuses_other_settings(short: TrainConfig, tmp_path: Path) -> None:
    run(comparison(short, seeds=(0,)), tmp_path / "c")
    for changed, message in (
        (comparison(short, seeds=(0, 1)), r"seeds=\[0\], now \[0, 1\]"),
        (comparison(short, seeds=(0,), variants=["C0: drop=0"]), "variants="),
        (comparison(replace(short, lr=1.0), seeds=(0,)), r"lr=0\.01, now 1\.0"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_comparison(changed, tmp_path / "c", resume=True)
    with pytest.raises(ValueError, match="is not empty"):
        prepare_comparison(comparison(short), tmp_path / "c")


def test_damage_is_told_with_its_mend_before_the_rest_is_trained(short: TrainConfig, tmp_path: Path) -> None:
    config = comparison(short, seeds=(0,), variants=["C0: drop=0"], pretrain_steps=1)
    out = tmp_path / "c"
    run(config, out)
    kept, pretrained = out / "runs" / "C0" / "seed-0", out / "pretrained" / "seed-0"
    before = {path: path.read_text() for path in (kept / "summary.json", kept / "metrics.jsonl")}
    for path, content, said in (
        (kept / "summary.json", "{", "cannot be read as JSON"),
        (
            kept / "summary.json",
            '{"seconds": 3}',
            r"is damaged or of another version of lrmoe \(eval_loss is missing\)",
        ),
        (kept / "metrics.jsonl", "{\n{}\n", "line 1: not valid JSON"),
        (pretrained / "summary.json", "[]", "must hold one JSON object"),
    ):
        path.write_text(content)
        folder = re.escape(str(path.parent))
        with pytest.raises(
            ValueError, match=rf"{path.name}.* {said}.*; delete the folder {folder}, and the run is done"
        ):
            prepare_comparison(config, out, resume=True)
        path.write_text(before.get(path, content))
    shutil.rmtree(pretrained)
    # A finished run needs the weights that it began with no longer.
    prepare_comparison(config, out, resume=True)
    shutil.copytree(kept, pretrained)
    (kept / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"seed-0 has no weights left to go on from; delete the folder .*pretrained"):
        prepare_comparison(config, out, resume=True)


@pytest.mark.slow
def test_runs_side_by_side_give_what_runs_one_by_one_give(short: TrainConfig, tmp_path: Path) -> None:
    one = run(comparison(replace(short, threads=1), seeds=(0,)), tmp_path / "one")
    seen: set[str] = set()
    config = comparison(short, seeds=(0,), jobs=2)
    two = run(config, tmp_path / "two", progress=lambda name, *_: seen.add(name))
    assert seen == {"C0, seed 0", "C50 topq, seed 0"}
    for first, second in zip(one["rows"], two["rows"], strict=True):
        assert first["eval_losses"] == second["eval_losses"]
        assert first["train_losses"] == second["train_losses"]


def test_variants_part_after_a_shared_pretraining(tiny: MakeConfig, tmp_path: Path) -> None:
    train = tiny(steps=4, eval_every=4, save_every=4, memorize_bytes=256)
    out = tmp_path / "c"
    run(comparison(train, pretrain_steps=8, seeds=(0,)), out)
    pretrained = read_records(out / "pretrained" / "seed-0" / "metrics.jsonl")
    assert [record["step"] for record in pretrained] == list(range(1, 9))
    assert {record["kept_share"] for record in pretrained} == {1.0}
    losses = first_losses(out)
    assert losses["C0", 0] == losses["C50 topq", 0] < pretrained[0]["loss"]
    stored = json.loads((out / "runs" / "C0" / "seed-0" / "config.json").read_text())
    assert stored["corpus"]["validation_is_training"]
    assert not json.loads((out / "pretrained" / "seed-0" / "config.json").read_text())["corpus"][
        "validation_is_training"
    ]
    assert "training text" in (out / "table.md").read_text()


def test_bad_input_leaves_no_folder(short: TrainConfig, tmp_path: Path) -> None:
    out = tmp_path / "c"
    for build, message in (
        (lambda: comparison(replace(short, model="nothing")), "neither a preset"),
        (lambda: comparison(replace(short, text="/nowhere")), "cannot be read"),
        (lambda: comparison(short, seeds=()), r"seeds=\[\]"),
        (lambda: comparison(short, seeds=(1, 1)), r"seeds=\[1, 1\]"),
        (lambda: comparison(short, jobs=0), "jobs=0"),
        (lambda: comparison(short, pretrain_steps=-1), "pretrain_steps=-1"),
        (lambda: comparison(short, variants=["a: drop=0", "b: drop=2"]), "variant 'b': drop=2"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_comparison(build(), out)
    assert not out.exists()


def test_variant_is_read_as_written() -> None:
    variant = parse_variant("C20 pps: drop=0.2, selector=pps warmup_steps=40 error_budget=none")
    assert variant.name == "C20 pps"
    assert variant.folder == "C20-pps"
    config = variant.config(LRMoEConfig(metric="grad_norm", error_budget=0.5))
    assert config == LRMoEConfig(drop=0.2, selector="pps", warmup_steps=40, metric="grad_norm", error_budget=None)
    assert Variant.from_dict(json.loads(json.dumps(variant.to_dict()))) == variant


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drop=0.2", "has no name"),
        (": drop=0.2", "has no name"),
        ("...: drop=0.2", "letter or a digit"),
        ("a: dorp=0.2", r"'dorp=0\.2' is not FIELD=VALUE"),
        ("a: drop", "'drop' is not FIELD=VALUE"),
        ("a: seed=3", "'seed=3' is not FIELD=VALUE"),
        ("a: drop=much", "drop='much' is no number"),
        ("a: warmup_steps=1.5", "warmup_steps='1.5' is no integer"),
        ("a: drop=0.1 drop=0.2", "drop is given twice"),
    ],
)
def test_misspelt_variant_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_variant(text)


def test_variants_need_folders_of_their_own_and_get_a_baseline() -> None:
    with pytest.raises(ValueError, match="names that differ"):
        parse_variants(["a b: drop=0.1", "a-b: drop=0.2"])
    with pytest.raises(ValueError, match="names that differ"):
        parse_variants(["a: drop=0.1", "a: drop=0.2"])
    assert [v.name for v in parse_variants(["a: drop=0.1"])] == ["C0", "a"]
    assert [v.name for v in parse_variants(["exact: drop=0", "a: drop=0.1"])] == ["exact", "a"]
    assert len(parse_variants([])) == len(DEFAULT)


def test_variant_folder_stays_inside_the_comparison() -> None:
    for text in ("../../x: drop=0", "/etc/x: drop=0", "a/../b: drop=0", "..: drop=0.1 ", "x\\..\\y: drop=0"):
        try:
            folder = parse_variant(text).folder
        except ValueError:
            continue
        assert "/" not in folder
        assert "\\" not in folder
        assert not folder.startswith(".")


def summary(**changes: Any) -> dict[str, Any]:
    values = dict.fromkeys(
        ("eval_loss", "train_loss", "kept_share", "kept_importance_share", "variance_share", "load_max_over_mean"), 1.0
    )
    saved = {"moe": 2**20, "model": 2**21}
    return {
        **values,
        "forward_seconds": 0.1,
        "backward_seconds": 0.2,
        "saved_bytes": saved,
        "diverged_at": None,
        **changes,
    }


def test_table_shows_what_is_missing_or_diverged_as_such() -> None:
    rows = make_rows(
        {
            "C0": [summary(eval_loss=2.0), summary(eval_loss=2.5)],
            "a|b": [summary(eval_loss=2.25, backward_seconds=0.1), summary(eval_loss=math.nan, diverged_at=7)],
            "gpu": [summary(forward_seconds=None, backward_seconds=None, saved_bytes=None)] * 2,
        },
        "C0",
    )
    shown = [dict(zip(HEADINGS, cells(row), strict=True)) for row in rows]
    assert shown[0]["minus no drop (each seed)"] == "+0.0000 (+0.000, +0.000)"
    assert shown[1]["minus no drop (each seed)"] == "+nan (+0.250, +nan)"
    assert shown[1]["expert backward"] == "150 ms (0.75 x)"
    assert shown[2]["expert backward"] == shown[2]["saved for backward"] == "-"
    assert rows[0]["eval_loss_spread"] == 0.5
    assert rows[0]["eval_loss_std"] == pytest.approx(0.5 / math.sqrt(2))
    note = footnote(rows, "C0", steps=40)
    assert "training loss over the last 40 steps" in note
    assert "validation 0.5000 (std 0.3536)" in note
    assert "a|b diverged at step 7" in note
    lines = markdown(rows, note).splitlines()
    assert lines[3].startswith("| a\\|b |")
    assert "One seed" in footnote(make_rows({"C0": [summary()]}, "C0"), "C0", steps=400)


def test_killed_run_leaves_its_weights_only_until_it_is_finished(short: TrainConfig, tmp_path: Path) -> None:
    out = tmp_path / "c"
    run(comparison(short, seeds=(0,)), out)
    assert not list(out.glob("runs/*/*/checkpoints"))
    shutil.rmtree(out / "runs" / "C0")
    assert prepare_comparison(comparison(short, seeds=(0,)), out, resume=True).total_steps == 4
