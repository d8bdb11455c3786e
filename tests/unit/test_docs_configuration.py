"""The pages that are made from the code are up to date."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MADE = runpy.run_path(str(DOCS / "generate_configuration.py"))
FORMER_FLAGS = MADE["FORMER_FLAGS"]
FLAGS = {key.flag for key in MADE["all_keys"]().values()}


@pytest.mark.parametrize(
    ("page", "make"), [("configuration.md", "configuration_page"), ("coming_from_slime.md", "slime_page")]
)
def test_the_page_is_what_the_code_says(page, make):
    assert (DOCS / page).read_text(encoding="utf-8") == MADE[make](), "run: python docs/generate_configuration.py"


def test_a_former_flag_leads_to_a_flag_that_exists():
    assert [former.here for former in FORMER_FLAGS.values() if former.here and former.here not in FLAGS] == []


def test_a_flag_that_is_said_to_be_missing_is_missing():
    assert [flag for flag, former in FORMER_FLAGS.items() if not former.here and flag in FLAGS] == []


def test_a_flag_that_is_the_same_keeps_its_name():
    renamed = [flag for flag, former in FORMER_FLAGS.items() if former.here not in ("", flag) and flag in FLAGS]
    assert renamed == []
