"""docs/scaling.md is what the planner says."""

import runpy
from itertools import product
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MADE = runpy.run_path(str(DOCS / "generate_scaling.py"))
PAGE = (DOCS / "scaling.md").read_text(encoding="utf-8")
AGAIN = "run: python docs/generate_scaling.py"


def test_the_words_are_up_to_date_and_every_model_has_its_rows():
    assert PAGE.startswith(MADE["HEAD"]), AGAIN
    assert PAGE.endswith(MADE["TAIL"]), AGAIN
    rows, rest = PAGE.removeprefix(MADE["HEAD"]).removesuffix(MADE["TAIL"]).split(MADE["DETAILS"])
    details, long_rows = rest.split(MADE["LONG"])
    assert set(cells(details, 2)) == {(name, str(num_gpus)) for name, num_gpus in MADE["DETAILED"]}, AGAIN
    wanted = [(name, str(num_gpus)) for name in MADE["MODELS"] for num_gpus in MADE["GPUS"]]
    assert cells(rows, 2) == wanted, AGAIN
    sizes = product(MADE["LONG_MODELS"], MADE["LENGTHS"], map(str, MADE["LONG_GPUS"]))
    assert cells(long_rows, 3) == list(sizes), AGAIN


def cells(rows: str, count: int) -> list[tuple[str, ...]]:
    """The first of each row, without the size of the model."""
    found = ([cell.split(",")[0].strip() for cell in row.split("|")] for row in rows.splitlines())
    return [tuple(row[1 : 1 + count]) for row in found]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-4B"])
def test_the_rows_are_up_to_date(name: str):
    assert MADE["rows"](name) in PAGE, AGAIN
    assert MADE["long_rows"](name, "32k") in PAGE, AGAIN
    assert MADE["details"](name, 64) in PAGE, AGAIN


@pytest.mark.slow
def test_the_rows_of_a_model_of_experts_are_up_to_date():
    assert MADE["rows"]("gpt-oss-20b") in PAGE, AGAIN
    assert MADE["details"]("gpt-oss-20b", 256) in PAGE, AGAIN
