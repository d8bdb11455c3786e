"""Pages that are generated from the code are up to date. docs/models.md: tests/distributed/test_sweep.py."""

import re
import runpy
from pathlib import Path

import pytest

from fsdptrain.config.keys import all_keys

DOCS = Path(__file__).parents[2] / "docs"
MATRIX = {"hardware.md", "memory.md"}  # a minute each, of traces of large models
PAGES = {
    "algorithms.md": ("generate_algorithms.py", "algorithms_page"),
    "configuration.md": ("generate_configuration.py", "configuration_page"),
    "hardware.md": ("generate_hardware.py", "hardware_page"),
    "memory.md": ("generate_memory.py", "memory_page"),
    "recipes.md": ("generate_recipes.py", "recipes_page"),
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.matrix) if page in MATRIX else page for page in PAGES]
)
def test_a_generated_page_is_up_to_date(page: str) -> None:
    script, make = PAGES[page]
    generated = runpy.run_path(str(DOCS / script))[make]()
    assert (DOCS / page).read_text(encoding="utf-8") == generated, f"run: python docs/{script}"


def test_the_keywords_of_config_are_up_to_date() -> None:
    found = runpy.run_path(str(DOCS / "generate_keywords.py"))
    assert found["PAGE"].read_text(encoding="utf-8") == found["keywords_module"](), "run: docs/generate_keywords.py"


def test_the_page_for_users_of_slime_names_flags_that_exist() -> None:
    rows = re.findall(r"^\| `(--[\w-]+)`[^|]*\| (.*?) \|", (DOCS / "coming_from_slime.md").read_text(), re.MULTILINE)
    assert len(rows) > 70
    flags = {key.flag for key in all_keys().values()}
    for there, here in rows:
        same = here.startswith("the same")
        assert (there in flags) == same
        assert same or here == "none" or here.split("`")[1] in flags
