"""The comments at the top of each recipe are true: `fsdptrain recipes` and the documentation show them."""

import re
from pathlib import Path

import pytest

from fsdptrain.config import load_recipe
from tests.recipe_headers import HARDWARE, RECIPES, needed_extras, read_header


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_header_says_what_the_recipe_trains_how_to_run_it_and_on_what(path: Path) -> None:
    header = read_header(path)
    assert re.fullmatch(r"[A-Z].{20,}[^.]\.", header.summary)
    assert any(re.search(rf"(?<!\S)--recipe {re.escape(path.stem)}(?!\S)", line) for line in header.commands)
    assert HARDWARE.fullmatch(header.hardware), header.hardware
    assert header.time != ""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_command_installs_what_the_recipe_needs(path: Path) -> None:
    header, config = read_header(path), load_recipe(path)
    assert header.extras == needed_extras(config, on_gpu=header.machine[1] > 0)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_name_is_the_task_and_the_model(path: Path) -> None:
    config = load_recipe(path)
    model = config.model.hf_checkpoint.rpartition("/")[2].lower().replace("-", "_")
    for suffix in ("_base", "_instruct"):
        model = model.removesuffix(suffix)
    if not path.stem.startswith("spell_backward"):  # whose model the demo makes
        assert path.stem.endswith(f"_{model}"), model
        assert config.run.output_dir == f"runs/{path.stem}"
