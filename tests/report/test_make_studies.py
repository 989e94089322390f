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
