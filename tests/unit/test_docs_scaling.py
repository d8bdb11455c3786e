"""docs/scaling.md is what the planner says."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MADE = runpy.run_path(str(DOCS / "generate_scaling.py"))
PAGE = (DOCS / "scaling.md").read_text(encoding="utf-8")
AGAIN = "run: python docs/generate_scaling.py"


def test_the_words_are_up_to_date_and_every_model_has_its_rows():
    assert PAGE.startswith(MADE["HEAD"]), AGAIN
    assert PAGE.endswith(MADE["TAIL"]), AGAIN
    rows = PAGE.removeprefix(MADE["HEAD"]).removesuffix(MADE["TAIL"]).splitlines()
    wanted = [(name, str(num_gpus)) for name in MADE["MODELS"] for num_gpus in MADE["GPUS"]]
    found = [(cells[1].split(",")[0].strip(), cells[2].strip()) for cells in (row.split("|") for row in rows)]
    assert found == wanted, AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-4B"])
def test_the_rows_are_up_to_date(name: str):
    assert MADE["rows"](name) in PAGE, AGAIN
