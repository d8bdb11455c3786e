"""Recipes by name, and the header that lists them."""

import pytest

from fsdptrain.config.recipe import load_recipe
from fsdptrain.config.shipped import FOLDER, find_recipe, read_summary
from fsdptrain.errors import ConfigError


def test_a_header_without_these_lines_is_listed_as_a_dash(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("# no sentence\nlr: 1\n# Hardware: not in the header\n")
    assert (read_summary(path).about, read_summary(path).hardware) == ("-", "-")
    path.write_text("lr: 1\n")
    assert (read_summary(path).about, read_summary(path).hardware) == ("-", "-")


def test_an_existing_file_wins_over_an_included_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spell_backward_sft_demo").mkdir()
    assert find_recipe("spell_backward_sft_demo") == FOLDER / "spell_backward_sft_demo.yaml"
    (tmp_path / "spell_backward_demo").write_text("hf_checkpoint: mine\n")
    assert load_recipe("spell_backward_demo").model.hf_checkpoint == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("spell_backwards_demo", "is no file and no recipe of fsdptrain; did you mean 'spell_backward_demo'"),
        ("banana", "is no file and no recipe of fsdptrain; `fsdptrain recipes` lists them"),
        ("recipes/spell_backward_demo.yaml", "No such file or directory; did you mean 'spell_backward_demo'?"),
        ("none.yaml", "none.yaml cannot be read: No such file or directory"),
        ("some/where", "some/where cannot be read: No such file or directory"),
    ],
)
def test_an_unknown_recipe_is_one_line(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_recipe(name)
    assert str(error.value).startswith(f"--recipe {name} ")
    assert message in str(error.value)
