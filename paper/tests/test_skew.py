"""The argument of the method: what each system can do with skewed loads under the same capacity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lrmoe.studies.loads import read_loads, skewed_loads
from paper.__main__ import PAPER, main
from paper.skew.capacities import HEADINGS, argue, cells

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"


def by_policy(records: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    return {str(record["policy"]): record for record in records}


def synthetic() -> list[tuple[str, torch.Tensor]]:
    return [(f"synthetic, {skew}", skewed_loads(skew)) for skew in (1.5, 2.0, 2.5, 3.0, 4.0)]


def recorded() -> list[tuple[str, torch.Tensor]]:
    return [(f"router {n}", lam_GE) for n, lam_GE in enumerate(read_loads(RESULTS / "router_loads.json", None))]


@pytest.mark.parametrize("slots", [1, 2])
def test_the_argument(slots: int) -> None:
    for label, lam_GE in synthetic() + recorded():
        record = argue(label, lam_GE, slots=slots)
        assert len(cells(record)) == len(HEADINGS)
        # Below the mean load no exact plan fits, and says so; LRMoE fits.
        below = by_policy(record["below_mean"]["policies"])
        for name in ("fixed", "ultraep", "lrmoe, no drop"):
            assert not below[name]["fits"], label
            assert "does not fit" in str(below[name]["reason"])
        assert below["lrmoe"]["fits"], label
        kept, rows = float(str(below["lrmoe"]["kept_rows"])), int(lam_GE.sum())
        # The busiest rank keeps at most 0.9 of the mean of all rows.
        assert float(str(below["lrmoe"]["backward"])) * kept / rows <= 0.9
        # Where UltraEP fits, LRMoE without a drop is not worse, and with one needs less.
        level = by_policy(record["at_ultraep"]["policies"])

        def cost(name: str) -> tuple[int, int]:
            return int(str(level[name]["replicas"])), int(str(level[name]["moved_rows"]))  # noqa: B023

        assert cost("lrmoe, no drop") <= cost("ultraep"), label
        assert cost("lrmoe")[0] < cost("ultraep")[0], label
        assert cost("lrmoe, level")[0] <= cost("ultraep")[0], label
        for name in ("lrmoe", "lrmoe, level"):
            assert cost(name)[1] < cost("ultraep")[1], label
            assert level[name]["extra_dropped"] == 0


def test_the_table_on_the_page_about_balancing_is_the_committed_one() -> None:
    page = (DOCS / "balancing.md").read_text(encoding="utf-8")
    for record in json.loads((RESULTS / "balance.json").read_text())["records"]:
        assert f"| {' | '.join(cells(record))} |" in page


def test_the_command_gives_the_committed_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loads = ["--loads", str(RESULTS / "router_loads.json")]
    assert main(["skew", *loads, "--out", str(tmp_path / "balance.json")], PAPER) == 0
    made = json.loads((tmp_path / "balance.json").read_text())["records"]
    committed = json.loads((RESULTS / "balance.json").read_text())["records"]
    assert [cells(record) for record in made] == [cells(record) for record in committed]
    assert f"| {' | '.join(cells(made[0]))} |" in capsys.readouterr().out
