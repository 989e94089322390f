"""The index of a folder of runs: every run a row with the numbers of its records, whatever lies beside it."""

from __future__ import annotations

import json
import os
import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from run_folders import compare_run, record, records, summary_of, train_config, train_run, write
from study_folders import EVIL, study_folder

pytest.importorskip("plotly")
from lrmoe.report import write_report
from lrmoe.report.index_charts import group
from lrmoe.report.index_entries import read_entries
from lrmoe.report.index_page import link_to, printable
from lrmoe.report.kinds import KINDS

FILLS = {command: kind.fill for command, kind in KINDS.items()}
HOSTILE = "a'b\"c <script>alert(1)<%2F> 50% #1 ü\n&amp;"


def figures_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    figures: dict[str, Any] = json.loads(found.group(1))["figures"]
    return figures


def markup(page: str) -> str:
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)


def words(page: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", markup(page))))


def row_of(page: str, name: str) -> str:
    """The text of a run's row."""
    rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    return next(said for row in rows if (said := words(row)).startswith(f" {printable(name)} "))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    train_run(root / "group" / HOSTILE)
    exact = records(drop=0.0)
    config = train_config(recalibration={"drop": 0.0, "selector": "pps", "seed": 0})
    write(root / "exact", config, exact, {**summary_of(exact), "guarded": ["a", "b"]})
    unlike = train_config(steps=120)
    write(root / "unlike", unlike, records(), summary_of(records()))
    write(root / "unfinished", train_config(), [record(10), record(20, validated=True), record(30)], None)
    diverged = {**summary_of(records()), "eval_loss": float("nan"), "diverged_at": 40}
    write(root / "diverged", train_config(), records(), diverged)
    compare_run(root / "deep" / "er" / "compared")
    train_run(root / "deep" / "er" / "compared" / "runs" / "C0" / "seed-0")
    train_run(root / "cells" / "one")
    train_run(root / "a" / "b" / "c" / "too deep")
    study_folder(root / "study")
    write(root / "broken" / EVIL.replace("/", ""), {}, [], None)
    (root / "broken" / EVIL.replace("/", "") / "config.json").write_text('{"command": ')
    (root / "half").mkdir()
    (root / "half" / "metrics.jsonl").write_text('{"step": 3}\n')
    (root / "checkpoint").mkdir()
    (root / "checkpoint" / "config.json").write_text('{"model_type": "qwen3_moe"}')
    begun = root / "begun"
    write(begun, json.loads((root / "deep" / "er" / "compared" / "config.json").read_text()), [], None)
    (begun / "metrics.jsonl").unlink()
    train_run(begun / "runs" / "C0" / "seed-0")
    write_report(root)
    return root


def test_every_run_is_a_row_with_the_numbers_of_its_records(root: Path) -> None:
    page = (root / "report.html").read_text(encoding="utf-8")
    told = json.loads((root / "group" / HOSTILE / "summary.json").read_text())
    row = row_of(page, f"group/{HOSTILE}")
    for shown in (f"{told['eval_loss']:.4f}", f"{told['train_loss']:.4f}", "80.0 %", "98.00 %", "0.0250", "60 of 60"):
        assert shown in row
    assert "drop 20 %, pps" in row
    seconds = told["forward_seconds"] + told["backward_seconds"]
    assert f"{1000 * seconds:.1f} ms" in row
    assert " finished " in row
    assert "no drop" in row_of(page, "exact")
    assert re.search(r"0\.0000 2 ", row_of(page, "exact")), "two guarded layers after V*/ΣR"
    assert "unfinished 30 of 60" in row_of(page, "unfinished")
    assert "2.1500" in row_of(page, "unfinished"), "the last validation loss that was logged"
    assert "diverged" in row_of(page, "diverged")
    assert "unfinished 60 of 540" in row_of(page, "begun"), "one of nine runs of 60 steps"
    compared = row_of(page, "deep/er/compared")
    assert "540 of 540" in compared
    assert "+0.005 to +0.300" in compared
    study = json.loads((root / "study" / "summary.json").read_text())
    assert study["conclusions"][0] in row_of(page, "study")


def test_what_belongs_to_a_run_or_is_none_is_not_listed(root: Path) -> None:
    entries, deeper = read_entries(root, FILLS)
    names = [entry.name for entry in entries]
    assert names == sorted(set(names))
    assert deeper
    assert not [name for name in names if "seed-0" in name or "cells" in name or "too deep" in name]
    assert "checkpoint" not in names
    assert len(names) == 10
    assert "more than 3 levels down were not looked into" in words((root / "report.html").read_text(encoding="utf-8"))


def test_links_lead_to_pages_and_names_are_no_markup(root: Path) -> None:
    page = (root / "report.html").read_text(encoding="utf-8")
    links = [unescape(link) for link in re.findall(r'<a href="([^"]*)"', markup(page))]
    assert len(links) == 7, "all but the two that are broken and the comparison that has only begun"
    for link in links:
        assert re.fullmatch(r"[\w.~%/-]+", link)
        assert (root / unquote(link)).is_file()
    assert link_to(f"group/{HOSTILE}") in links
    assert "<script>alert" not in markup(page)
    assert "onerror=alert(1)>" not in page
    assert r"ü\n&amp;" in words(page), "a line end in a name is seen as one"


def test_a_broken_folder_is_told_with_its_problem_and_breaks_nothing(root: Path) -> None:
    page = (root / "report.html").read_text(encoding="utf-8")
    problems = page[page.index('id="problems"') :]
    assert "config.json, line 1: not valid JSON" in words(problems)
    assert "config.json is missing" in words(problems)
    assert str(root) not in words(problems)
    said = words(page)
    assert "Mend or remove" in said
    assert "Do not read losses off diverged" in said
    assert "Look at the guarded layers of exact" in said
    assert "Let begun, unfinished finish" in said


def test_only_what_is_alike_is_drawn_together(root: Path) -> None:
    entries, _ = read_entries(root, FILLS)
    groups = group(entries)
    assert [sorted(entry.name for entry in one.entries) for one in groups] == [
        ["deep/er/compared", "exact", f"group/{HOSTILE}"],
        ["unlike"],
    ]
    figures = figures_of((root / "report.html").read_text(encoding="utf-8"))
    traces = {trace["name"]: trace for trace in figures["kept-0"]["data"]}
    rows = json.loads((root / "deep" / "er" / "compared" / "summary.json").read_text())["rows"]
    for row, setting in zip(rows, ("no drop", "drop 20 %, pps", "drop 20 %, topq"), strict=True):
        assert set(row["eval_losses"]) <= set(traces[setting]["y"])
    assert traces["no drop"]["x"] == [100.0] * 4
    assert set(figures) == {"kept-0", "time-0"}
    (advice,) = [part for part in groups[0].advice() if part.startswith("Use ")]
    assert "drop 20 %, pps" in advice


def test_a_single_seed_is_told_to_say_nothing(tmp_path: Path) -> None:
    for name, drop in (("one", 0.0), ("two", 0.2)):
        lines = records(drop=drop)
        config = train_config(recalibration={"drop": drop, "selector": "pps", "seed": 0})
        write(tmp_path / name, config, lines, summary_of(lines))
    assert "one seed cannot tell" in words(write_report(tmp_path).read_text(encoding="utf-8"))


def test_pages_are_written_where_they_are_missing_or_old(tmp_path: Path) -> None:
    missing, old, new = (train_run(tmp_path / name) for name in ("missing", "old", "new"))
    for run in (old, new):
        (run / "report.html").write_text("as it was")
    os.utime(old / "report.html", (1, 1))
    write_report(tmp_path)
    assert (missing / "report.html").stat().st_size > 1e6
    assert (old / "report.html").stat().st_size > 1e6
    assert (new / "report.html").read_text() == "as it was"
    write_report(tmp_path)  # An index is replaced by an index.


def test_what_no_index_can_be_made_of_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a run folder nor has one within 3 levels"):
        write_report(tmp_path)
    train_run(tmp_path / "run")
    (tmp_path / "report.html").write_text("<h1>mine</h1>")
    with pytest.raises(ValueError, match="is not an index that lrmoe wrote; move it away"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "<h1>mine</h1>"


def test_a_page_that_cannot_be_written_is_a_problem_of_its_run(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines + '{"step": "x"}\n')
    said = words(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "metrics.jsonl, line 7: step='x' must be an integer" in said
    assert "2.1167" in said, "the summary's numbers are still shown"


@pytest.mark.parametrize(
    ("command", "name", "changes", "said"),
    [
        ("train", "summary.json", {"steps": {}}, "steps done={} must be an integer"),
        ("train", "summary.json", {"steps": "sixty"}, "steps done='sixty' must be an integer"),
        ("compare", "config.json", {"seeds": [[], 1, 2]}, "seed of result 0=[] must be an integer"),
        ("compare", "summary.json", {"baseline": "nobody"}, "of another version of lrmoe (StopIteration"),
    ],
)
def test_values_of_another_kind_are_a_problem_of_their_folder(
    tmp_path: Path, command: str, name: str, changes: dict[str, Any], said: str
) -> None:
    train_run(tmp_path / "sound")
    broken = (train_run if command == "train" else compare_run)(tmp_path / "broken")
    path = broken / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert said in words(page[page.index('id="problems"') :])
    assert "2.1167" in row_of(page, "sound")


def test_settings_of_another_kind_are_one_error_that_names_the_file(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["train"]["recalibration"]["save"] = ["preactivation"]
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"run/config\.json, or another of the records .* is damaged"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_what_may_not_be_read_is_told_and_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("locked", "noread", "sound"):
        train_run(tmp_path / name)
    real_stat, real_open, real_list = os.stat, open, Path.iterdir

    def refuse(path: Any, part: str) -> None:
        if part in str(path):
            raise PermissionError(13, "Permission denied", str(path))

    def stat(path: Any, **options: Any) -> Any:
        refuse(path, "locked/")
        return real_stat(path, **options)

    def listed(self: Path) -> Any:
        refuse(self, "locked")
        return real_list(self)

    def opened(path: Any, *rest: Any, **options: Any) -> Any:
        refuse(path, "noread/metrics.jsonl")
        return real_open(path, *rest, **options)

    monkeypatch.setattr("os.stat", stat)
    monkeypatch.setattr(Path, "iterdir", listed)
    monkeypatch.setattr("builtins.open", opened)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    problems = words(page[page.index('id="problems"') :])
    assert "locked cannot be opened: Permission denied" in problems
    assert "noread metrics.jsonl cannot be read: Permission denied" in problems
    assert "2.1167" in row_of(page, "sound")


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json", "report.html"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_in_a_file_s_place_is_a_problem_of_its_run(tmp_path: Path, name: str, finished: bool) -> None:
    train_run(tmp_path / "sound")
    run = write(tmp_path / "odd", train_config(), records(), summary_of(records()) if finished else None)
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    # Newer than the records, as a page is that was written after them.
    os.utime(run / name, (2**32, 2**32))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    problems = words(page[page.index('id="problems"') :])
    assert f"odd {name} is a folder, where a file belongs; move it away or delete it" in problems
    assert "2.1167" in row_of(page, "sound")
    # Where the records are whole the numbers are shown, and only the page is missing.
    whole = name == "report.html" or (name == "metrics.jsonl" and finished)
    assert ("Mend what keeps the page of odd from being written" in words(page)) is whole
    assert ("Mend or remove odd" in words(page)) is not whole
    assert [unescape(link) for link in re.findall(r'<a href="([^"]*)"', markup(page))] == ["sound/report.html"]
    with pytest.raises(ValueError, match=rf"odd/{re.escape(name)} is a folder, where a file belongs"):
        write_report(run)


def test_a_folder_in_the_place_of_the_index_is_told(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ValueError, match=r"report\.html is a folder, where a file belongs; move it away"):
        write_report(tmp_path)
    assert not (run / "report.html").exists()


def test_a_folder_that_has_only_a_folder_named_as_a_record_is_not_passed_over(tmp_path: Path) -> None:
    train_run(tmp_path / "sound")
    (tmp_path / "odd" / "config.json").mkdir(parents=True)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "odd config.json is a folder, where a file belongs" in words(page[page.index('id="problems"') :])


def test_studies_and_plans_under_way_are_told(tmp_path: Path) -> None:
    study = study_folder(tmp_path / "study")
    for name in ("summary.json", "metrics.jsonl"):
        (study / name).unlink()
    plan = {"model": {"name": "m"}, "recommendation": "Leave it off.", "options": [{"policy": "fixed"}]}
    write(tmp_path / "plan", {"command": "plan"}, [], plan)
    (tmp_path / "plan" / "report.html").write_text("as it was")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Let study finish, or give the same command again" in words(page)
    assert "unfinished" in row_of(page, "study")
    assert "plan finished m fixed" in row_of(page, "plan")
    assert "Leave it off." in row_of(page, "plan")
