"""The page of the studies is what their records say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_studies", DOCS / "make_studies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_studies"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_the_records(made: ModuleType) -> None:
    assert (DOCS / "results" / "studies.md").read_text() == made.page()


def test_no_record_names_a_path_of_the_machine(made: ModuleType) -> None:
    for file in (DOCS / "results" / "studies").glob("*.json"):
        text = file.read_text()
        assert "/home/" not in text
        assert "/tmp/" not in text
        assert "/root/" not in text


def test_the_table_of_selectors_in_the_readme_has_the_numbers_of_the_study(made: ModuleType) -> None:
    found = {
        (table.name, row["variant"]): row["difference"] for table in made.read("ablation").tables for row in table.rows
    }
    columns = [("scratch", rate) for rate in (20, 30, 50)]
    columns += [(place, rate) for place in ("fine_tune", "near_zero") for rate in (20, 50)]
    checked = 0
    for line in (DOCS.parent / "README.md").read_text().splitlines():
        cells = [cell.strip(" *") for cell in line.split("|")[1:-1]]
        selector = cells[0].strip("`").partition("`")[0] if len(cells) == 8 else ""
        if selector not in ("pps", "random", "topq", "auto"):
            continue
        for (place, rate), text in zip(columns, cells[1:], strict=True):
            if text:
                digits = 4 if place == "near_zero" else 3
                assert float(text) == round(found[place, f"C{rate} {selector}"], digits), (place, rate, selector)
                checked += 1
    assert checked == 23
