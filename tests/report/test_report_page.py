"""The page as a whole: what is on it, that strings stay strings, that it loads nothing, that it stands on thin data."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from run_folders import VARIANTS, compare_run, record, records, summary_of, train_config, train_run, write

pytest.importorskip("plotly")
import plotly.graph_objects as go

from lrmoe.report import write_report


class Page(HTMLParser):
    """What a browser makes of the HTML: elements with attributes, visible text, and the JSON of the figures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._open: list[str] = []
        self._json = False
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        self._json = dict(attrs).get("type") == "application/json"

    def handle_endtag(self, tag: str) -> None:
        self._open.append("")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
            if self._json:
                self.data: dict[str, Any] = json.loads(data, parse_constant=_no_constant)
        elif not self._open or self._open[-1] != "style":
            self.words.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def page_of(run: Path) -> Page:
    return Page(write_report(run))


def figures(page: Page) -> list[dict[str, Any]]:
    found = []
    for figure in page.data["figures"].values():
        found += [one for one in (figure if isinstance(figure, list) else [figure]) if one is not None]
    return found


RUN_FIGURES = {
    "loss",
    "dropped",
    "kept_importance",
    "variance",
    "variance_map",
    "importance_map",
    "load_spread",
    "time",
    "time_over_run",
}


def test_a_training_run_shows_what_ran_and_its_numbers(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run")
    page = page_of(run)
    assert (run / "report.html").exists()
    for words in ("qwen3-moe-tiny, 60 steps", "Python 3.11 standard library", "2 layers × 4 experts", "1,234,567"):
        assert words in page.text
    assert "went from 2.150 to 2.117 nats per token" in page.text
    assert "computed 80.0 % of the token-expert pairs, which hold 98.0 % of the importance" in page.text
    assert "32.0 ms" in page.text, "backward, a step"
    assert "What this does not save" in page.text
    assert "A step took 150 ms, of which a drop can save a part of the 32.0 ms" in page.text
    drawn = {attributes["data-figure"] for attributes in page.named("div") if "data-figure" in attributes}
    assert drawn == RUN_FIGURES
    assert all(attributes["aria-label"] for attributes in page.named("div") if "data-figure" in attributes)
    assert page.data["loads"][0]["total"] == [[240, 180, 120, 60]] * 2


def test_a_comparison_has_a_table_with_the_numbers_of_the_summary(tmp_path: Path) -> None:
    page = page_of(compare_run(tmp_path / "run"))
    assert "qwen3-moe-tiny: 3 variants, 3 seeds, 60 steps each" in page.text
    assert (
        "C0 , which drops nothing, ended at a validation loss of 2.137 nats per token, its 3 seeds 0.040 apart"
        in page.text
    )
    assert "Within that spread: C20 pps (+0.005)" in page.text
    assert "Worse: C20 topq (+0.300)" in page.text
    for cell in ("+0.3000 +0.300, +0.300, +0.300", "80.0 %", "98.00 %", "0.0250", "32.0 ms 0.80 ×", "3.00 MiB"):
        assert cell in page.text
    assert len([attributes for attributes in page.named("button") if "data-variant" in attributes]) == 3


def test_every_variant_has_one_line_and_a_seed_band(tmp_path: Path) -> None:
    page = page_of(compare_run(tmp_path / "run"))
    traces = page.data["figures"]["eval_loss"]["data"]
    lines = [trace for trace in traces if trace.get("fill") is None]
    assert [line["name"] for line in lines] == list(VARIANTS)
    assert [line["meta"]["variant"] for line in lines] == [0, 1, 2]
    assert len({(line["line"]["color"], line["line"]["dash"]) for line in lines}) == 3
    assert sum(trace.get("fill") == "toself" for trace in traces) == 3
    difference = page.data["figures"]["difference"]["data"]
    topq = next(trace for trace in difference if trace.get("name") == "C20 topq")
    assert topq["x"] == [20, 40, 60]
    assert topq["y"] == pytest.approx([0.3] * 3)


def test_plotly_accepts_every_figure(tmp_path: Path) -> None:
    lines = [
        {**record(step), "layers": [{"name": f"l.{i}", "kept_share": 0.8, "load": [1, 2]} for i in range(12)]}
        for step in (1, 2)
    ]
    runs = [compare_run(tmp_path / "a"), train_run(tmp_path / "b"), train_run(tmp_path / "many-layers", lines)]
    for run in runs:
        for figure in figures(page_of(run)):
            go.Figure(figure)


HOSTILE = "</script><script>alert(1)</script><img src=x onerror='alert(2)'> &amp; \"q\""


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    variants = {"C0": VARIANTS["C0"], HOSTILE: {"drop": 0.2, "cost": 0.1, "selector": HOSTILE}}
    run = compare_run(tmp_path / "<b>run&", variants, model=HOSTILE, text=f"/texts/{HOSTILE}")
    line = {**json.loads((run / "metrics.jsonl").read_text().split("\n")[0])}
    line["layers"][0]["name"] = HOSTILE
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + json.dumps(line) + "\n")
    page = page_of(run)
    assert page.named("img") == []
    assert len(page.named("script")) == 3, "plotly, the data, the page's own"
    assert page.text.count(HOSTILE) >= 5, "shown as it is, where it names a variant, the model and the text"
    assert not any("onerror" in attributes for _, attributes in page.elements)
    for trace in page.data["figures"]["eval_loss"]["data"]:
        assert "<" not in trace.get("name", ""), "plotly reads HTML in names"
    assert all(
        "<" not in name for one in page.data["loads"] for name in (one["variant"], *one["names"], *one["layers"])
    )


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(compare_run(tmp_path / "run"))
    for tag, attributes in page.elements:
        assert "src" not in attributes, tag
        assert tag not in {"iframe", "object", "embed", "base", "image"}
        assert attributes.get("href") in (None, "data:,"), tag
    styles = (tmp_path / "run" / "report.html").read_text().partition("</style>")[0]
    assert "@import" not in styles
    assert "url(" not in styles


def test_plotly_is_inlined_once(tmp_path: Path) -> None:
    page = page_of(compare_run(tmp_path / "run"))
    assert [len(script) > 1_000_000 for script in page.scripts] == [True, False, False]
    assert (tmp_path / "run" / "report.html").stat().st_size < 6_000_000


def test_losses_that_are_not_finite_leave_a_gap_and_a_notice(tmp_path: Path) -> None:
    lines = records()
    lines[2]["loss"], lines[3]["loss"], lines[3]["eval_loss"] = math.nan, math.inf, math.nan
    page = page_of(train_run(tmp_path / "run", lines))
    assert "The training loss is not a finite number (2 times, first at step 30)" in page.text
    assert "The validation loss is not a finite number (once, first at step 40)" in page.text
    train, validation = page.data["figures"]["loss"]["data"]
    assert [value is None for value in train["y"]] == [False, False, True, True, False, False]
    assert [value is None for value in validation["y"]] == [False, True, False]


def test_a_seed_that_diverged_is_not_averaged_away(tmp_path: Path) -> None:
    run = compare_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["variant"] == "C20 topq" and line["seed"] == 1 and line["step"] == 60:
            line["eval_loss"] = math.nan
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run)
    assert "C20 topq, seed 1: the validation loss is not a finite number (once, first at step 60)" in page.text
    curves = {trace.get("name"): trace for trace in page.data["figures"]["eval_loss"]["data"]}
    assert curves["C20 topq"]["y"][-1] is None
    assert curves["C20 pps"]["y"][-1] is not None


def test_one_logged_step_is_drawn_as_points(tmp_path: Path) -> None:
    page = page_of(train_run(tmp_path / "run", [record(10)]))
    loss = page.data["figures"]["loss"]["data"]
    assert [trace["mode"] for trace in loss] == ["lines+markers"]
    assert page.data["loads"][0]["steps"] == [10]


def test_a_layer_without_load_is_shown_as_such(tmp_path: Path) -> None:
    lines = records()
    for line in lines:
        line["layers"][1]["load"] = line["layers"][1]["kept"] = [0] * 4
    page = page_of(train_run(tmp_path / "run", lines))
    assert page.data["loads"][0]["total"][1] == [0] * 4
    assert page.data["loads"][0]["top"] == pytest.approx(1.6)


def test_only_a_step_and_a_loss_are_enough(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "run", {}, [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}], {}))
    assert page.data["figures"]["loss"]["data"][0]["y"] == [2.5]
    assert set(page.data["figures"]) == {"loss"}
    for words in ("No layer logged this.", "No layer logged its loads.", "Not measured.", "No drop was logged."):
        assert words in page.text


def test_an_empty_unfinished_run_says_so(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "run", train_config(), [], None))
    assert "The run is unfinished" in page.text
    assert "metrics.jsonl has no line yet" in page.text
    assert page.data["figures"] == {}


def test_a_comparison_without_a_summary_is_computed_from_the_lines(tmp_path: Path) -> None:
    run = compare_run(tmp_path / "run")
    told = page_of(run).text
    (run / "summary.json").unlink()
    computed = page_of(run).text
    for cell in ("2.1367", "+0.3000", "+0.0050", "spread 0.0400", "98.00 %"):
        assert cell in told
        assert cell in computed
    assert "The run is unfinished" in computed


def test_memorising_is_not_called_unseen_text(tmp_path: Path) -> None:
    lines = records()
    config = {**train_config(), "corpus": {"source": "a text", "validation_is_training": True}}
    page = page_of(write(tmp_path / "run", config, lines, summary_of(lines)))
    assert "validation is on the text that is trained on" in page.text
    assert "never trained on" not in page.text


@pytest.mark.parametrize(
    ("save", "words"), [("preactivation", "those of a backward that drops nothing"), ("input", "once more")]
)
def test_what_is_said_of_saved_activations_fits_the_run(tmp_path: Path, save: str, words: str) -> None:
    lines = records()
    config = train_config(recalibration={"drop": 0.2, "save": save})
    page = page_of(write(tmp_path / "run", config, lines, summary_of(lines)))
    section = page.text.partition("What this does not save")[2].partition("Settings")[0]
    assert words in section
    assert f'save="{save}"' in section
    assert ("preactivation" in section) == (save == "preactivation")


def test_a_failure_leaves_the_old_page(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run")
    before = write_report(run).read_bytes()
    (run / "metrics.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match="line 1"):
        write_report(run)
    assert (run / "report.html").read_bytes() == before
    assert sorted(path.name for path in run.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "report.html",
        "summary.json",
    ]


def test_the_page_is_the_same_twice(tmp_path: Path) -> None:
    run = compare_run(tmp_path / "run")
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_the_seeds_of_a_single_validation_are_a_bar(tmp_path: Path) -> None:
    run = compare_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] != 60:
            line.pop("eval_loss", None)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    traces = page_of(run).data["figures"]["eval_loss"]["data"]
    bars = [trace for trace in traces if "name" not in trace]
    assert [trace["x"] for trace in bars] == [[60, 60]] * 3
    assert all(trace["line"]["width"] > 0 and trace["y"][0] - trace["y"][1] == pytest.approx(0.04) for trace in bars)
