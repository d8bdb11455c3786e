"""docs/memory.md is what the planner says."""

import runpy
from pathlib import Path

import pytest

from tests import configs

DOCS = Path(__file__).parents[2] / "docs"
MADE = runpy.run_path(str(DOCS / "generate_memory.py"))
PAGE = (DOCS / "memory.md").read_text(encoding="utf-8")
AGAIN = "run: python docs/generate_memory.py"


def test_the_words_are_up_to_date_and_every_model_has_its_row():
    assert PAGE.startswith(MADE["HEAD"]), AGAIN
    rows = PAGE.removeprefix(MADE["HEAD"]).splitlines()
    assert [row.split("|")[1].strip() for row in rows] == list(configs.NAMES), AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-4b", "llama-3.1-8b"])
def test_the_row_is_up_to_date(name: str):
    assert MADE["row"](name) in PAGE, AGAIN
