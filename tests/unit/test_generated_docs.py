"""Pages that are generated from the code are up to date. docs/models.md: tests/distributed/test_sweep.py."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MATRIX = {"memory.md", "scaling.md"}  # a minute each, of traces of large models
PAGES = {
    "algorithms.md": ("generate_algorithms.py", "algorithms_page"),
    "configuration.md": ("generate_configuration.py", "configuration_page"),
    "coming_from_slime.md": ("generate_configuration.py", "slime_page"),
    "memory.md": ("generate_memory.py", "memory_page"),
    "scaling.md": ("generate_scaling.py", "scaling_page"),
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.matrix) if page in MATRIX else page for page in PAGES]
)
def test_a_generated_page_is_up_to_date(page: str) -> None:
    script, make = PAGES[page]
    generated = runpy.run_path(str(DOCS / script))[make]()
    assert (DOCS / page).read_text(encoding="utf-8") == generated, f"run: python docs/{script}"


def test_former_flags_lead_to_flags_that_exist_and_are_themselves_gone() -> None:
    generator = runpy.run_path(str(DOCS / "generate_configuration.py"))
    flags = {key.flag for key in generator["all_keys"]().values()}
    former = {flag: entry.here for flag, entry in generator["FORMER_FLAGS"].items()}
    assert [here for here in former.values() if here and here not in flags] == []
    assert [flag for flag, here in former.items() if here != flag and flag in flags] == []
