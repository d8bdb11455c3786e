"""Each recipe is a configuration, and the comments at its top are true: `fsdptrain recipes` and the docs show them."""

import re
from pathlib import Path

import pytest

from fsdptrain.config import load_recipe
from fsdptrain.config.shipped import recipe_names
from tests.recipe_headers import HARDWARE, RECIPES, needed_extras, read_header


def test_the_package_has_the_recipes_of_the_repository() -> None:
    assert recipe_names() == [path.stem for path in RECIPES]
    assert {"gsm_symbolic_qwen3_4b", "sft_qwen2.5_7b", "spell_backward_demo"} <= set(recipe_names())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_header_says_what_the_recipe_trains_how_to_run_it_and_on_what(path: Path) -> None:
    header, config = read_header(path), load_recipe(path)
    assert re.fullmatch(r"[A-Z].{20,}[^.]\.", header.summary)
    assert any(re.search(rf"(?<!\S)--recipe {re.escape(path.stem)}(?!\S)", line) for line in header.commands)
    assert HARDWARE.fullmatch(header.hardware), header.hardware
    assert header.time != ""
    assert header.extras == needed_extras(config, on_gpu=header.machine[1] > 0)
    model = config.model.hf_checkpoint.rpartition("/")[2].lower().replace("-", "_")
    for suffix in ("_base", "_instruct"):
        model = model.removesuffix(suffix)
    if not path.stem.startswith("spell_backward"):  # whose model the demo makes
        assert path.stem.endswith(f"_{model}"), model
        assert config.run.output_dir == f"runs/{path.stem}"
