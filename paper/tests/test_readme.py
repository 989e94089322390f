"""The numbers of the README are those of the committed records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

PAPER = Path(__file__).parents[1]
RESULTS = PAPER.parent / "docs" / "results"
README = (PAPER / "README.md").read_text(encoding="utf-8")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def line(*words: str) -> str:
    """The one line of a table with all of these."""
    (found,) = [line for line in README.splitlines() if line.startswith("| ") and all(word in line for word in words)]
    return found


def rows(study: str, table: str) -> list[dict[str, Any]]:
    tables = read(RESULTS / "studies" / f"{study}.json")["tables"]
    return list(next(one for one in tables if one["name"] == table)["rows"])


def test_the_files_that_it_names_are_there() -> None:
    links = [part.partition(")")[0].partition("#")[0] for part in README.split("](")[1:]]
    assert len(links) > 20
    assert [link for link in links if link and not (PAPER / link).exists()] == []


def test_the_perplexity_near_zero_loss() -> None:
    losses = {row["variant"]: row["loss"] for row in rows("ablation", "near_zero")}
    exact = math.exp(losses["C0"])
    said = line("1.015190")
    assert f"{exact:.6f}" in said
    for variant in ("C20 topq", "C50 topq"):
        found = math.exp(losses[variant])
        assert f"{found:.6f} ({100 * (found / exact - 1):+.3f} %)" in said


def test_the_order_of_the_metrics() -> None:
    near = {row["variant"]: row["train_loss"] for row in read(RESULTS / "near_zero.json")["rows"]}
    said = line("LRM 0.012474")
    for name, words in (("lrm", "LRM"), ("grad_norm", "gradient norm"), ("abs_grad", "absolute gradient")):
        assert f"{words} {math.exp(near[f'C20 topq {name}']) - math.exp(near['C0']):+.5f}" in said
    assert f"random {math.exp(near['C20 topq random']) - math.exp(near['C0']):+.5f}" in said
    scratch = {row["variant"]: row["difference"] for row in rows("ablation", "scratch")}
    for name in ("random", "abs_grad", "grad_norm"):
        assert f"{scratch[f'C20 topq {name}']:+.4f}" in line("over no drop at 20 %, from scratch")
    for name in ("C20 topq", "C50 topq", "C20 pps", "C50 pps"):
        assert f"{scratch[name]:+.4f}" in line("1.015190")


@pytest.mark.parametrize(
    ("table", "variant", "words"),
    [
        ("skewed", "LRMoE 20%", "20 % dropped: −10 %, −17 % and −13 % to three losses"),
        ("skewed", "LRMoE 50%", "at 50 %: −25 %, −29 % and −26 %"),
        ("even", "LRMoE 20%", "20 %: −22 %, −17 %, and the last loss is not reached"),
    ],
)
def test_the_time_to_a_loss_against_symi(table: str, variant: str, words: str) -> None:
    assert words in line("−44.8 %")
    found = [row["over SYMI"] for row in rows("time_to_loss", table) if row["variant"] == variant]
    shares = [f"−{100 * (1 - ratio):.0f} %" for ratio in found if ratio is not None]
    assert [word for word in words.replace(",", "").split(" ") if word.startswith("−")] == [
        share.split(" ")[0] for share in shares
    ]


def test_the_memory_the_backward_and_the_throughput() -> None:
    told = read(PAPER / "results" / "pressure.json")
    two = next(row for row in told["published"]["rows"] if row["skew"] == 2)
    fixed, mine = two["fixed"], two["lrmoe"]
    whole = (fixed["buffers"]["kept"] + two["base"], mine["buffers"]["kept"] + two["base"] + two["replicas"])
    assert f"{whole[0]:.2f} and {whole[1]:.2f} GiB (−{100 * (1 - whole[1] / whole[0]):.0f} %)" in line("12.88 GiB")
    for which in ("kept", "operator"):
        assert f"{fixed['buffers'][which]:.2f} and {mine['buffers'][which]:.2f}" in line("12.88 GiB")
    for how in ("fused", "plain"):
        assert f"{fixed['backward_ms'][how]:.2f} and {mine['backward_ms'][how]:.2f}" in line("29.64 ms")
    at = {(one["accounting"], one["policy"]): one for one in told["policies"] if one["pressure"] == 20}
    for policy in ("ultraep", "symi", "fixed"):
        assert f"{100 * at['kept', policy]['completes']:.1f}" in line("100 %, UltraEP 58.4")
        assert f"{100 * at['kept', policy]['batch']:.1f}" in line("100 %, UltraEP 58.4")
        assert f"{100 * at['operator', policy]['completes']:.1f}" in line("100 %, UltraEP 58.4")
    assert f"{100 * at['kept', 'lrmoe']['backward']:.1f} % of it is" in line("100 %, UltraEP 58.4")


def test_what_fits_below_the_mean_load() -> None:
    records = read(RESULTS / "balance.json")["records"]
    fits = dict.fromkeys(("fixed", "ultraep", "lrmoe, no drop", "lrmoe"), 0)
    for record in records:
        for policy in record["below_mean"]["policies"]:
            if policy["policy"] in fits:
                fits[policy["policy"]] += policy["fits"]
    assert fits == {"fixed": 0, "ultraep": 0, "lrmoe, no drop": 0, "lrmoe": 13}
    assert len(records) == 13
    assert "in 13 of 13 loads" in line("no exact plan fits")
