"""Pages that are generated from the code are up to date. docs/models.md: tests/distributed/test_sweep.py."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "algorithms.md": ("generate_algorithms.py", "algorithms_page"),
    "configuration.md": ("generate_configuration.py", "configuration_page"),
    "hardware.md": ("generate_hardware.py", "hardware_page"),
    "recipes.md": ("generate_recipes.py", "recipes_page"),
}


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_up_to_date(page: str) -> None:
    script, make = PAGES[page]
    generated = runpy.run_path(str(DOCS / script))[make]()
    assert (DOCS / page).read_text(encoding="utf-8") == generated, f"run: python docs/{script}"


def test_the_keywords_of_config_are_up_to_date() -> None:
    found = runpy.run_path(str(DOCS / "generate_keywords.py"))
    assert found["PAGE"].read_text(encoding="utf-8") == found["keywords_module"](), "run: docs/generate_keywords.py"


@pytest.mark.parametrize("trainer", ["trl", "verl", "prime_rl", "slime"])
def test_the_table_of_names_of_another_trainer_is_up_to_date(trainer: str) -> None:
    make = runpy.run_path(str(DOCS / "generate_names.py"))["page"]
    assert (DOCS / f"coming_from_{trainer}.md").read_text(encoding="utf-8") == make(trainer), "generate_names.py"
