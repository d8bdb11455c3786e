"""Recipes are read with every mistake named, and written so that they can be read again."""

import pytest

from fsdptrain.config import Config, resolve, to_yaml
from fsdptrain.config.recipe import LEFT_OUT, load_recipe, read_recipe
from fsdptrain.config.shipped import FOLDER, find_recipe, read_summary
from fsdptrain.errors import ConfigError


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "r.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_numbers_as_python_writes_them_are_numbers(recipe):
    config = load_recipe(recipe("hf_checkpoint: x\nlr: 1e-6\nadam_eps: 1E-8\nweight_decay: 1.5e-2\nadam_beta1: .5\n"))
    optim = config.optim
    assert (optim.lr, optim.adam_eps, optim.weight_decay, optim.adam_beta1) == (1e-6, 1e-8, 0.015, 0.5)


def test_keywords_win_over_the_recipe(recipe):
    path = recipe("hf_checkpoint: x\noptim: {lr: 1e-6, adam_beta1: 0.8}\n")
    config = load_recipe(path, lr=1e-5, fsdp={"cpu_offload": True})
    assert (config.optim.lr, config.optim.adam_beta1, config.fsdp.cpu_offload) == (1e-5, 0.8, True)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lr: [", "is not YAML: line "),
        ("lr: 1\nlr: 2\n", "is not YAML: line 2: key 'lr' is given twice"),
        ("- a\n", "must hold keys with values, such as `lr: 1e-6`, got list"),
        ("fsdp:\n  cpu_ofload: true\n", "unknown key 'cpu_ofload' in section 'fsdp'; did you mean 'cpu_offload'?"),
        ("eps_clip: 1.5\n", "--eps-clip must be less than 1, got 1.5"),
        ("1: 2\n", "unknown key '1'"),
        (f"num_rollout: {'1' * 5001}\n", "is not YAML: Exceeds the limit"),
        (f"a: {'[' * 1500}", "is not YAML: maximum recursion depth exceeded"),
    ],
)
def test_a_mistake_names_the_file(recipe, text, line):
    path = recipe(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert str(path) in str(caught.value)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_recipe_says_nothing(recipe):
    assert read_recipe(recipe("# nothing\n")) == {}


def test_a_dry_run_is_not_part_of_a_recipe():
    assert "dry_run" not in to_yaml(Config(hf_checkpoint="x", dry_run=True))


def test_flag_that_turns_something_off_wins_over_what_the_recipe_says_about_it(recipe) -> None:
    path = str(recipe("hf_checkpoint: x\neval_size: 64\neval_greedy: true\n"))
    resolved = resolve(["--recipe", path, "--eval-interval", "0"])
    assert (resolved.config.data.eval_size, resolved.config.run.eval_greedy) == (None, False)
    assert resolved.sources["eval_size"] == LEFT_OUT
    with pytest.raises(ConfigError, match="--eval-size has no effect"):
        resolve(["--recipe", path, "--eval-interval", "0", "--eval-size", "64"])


def test_recipe_that_contradicts_itself_is_refused(recipe) -> None:
    path = recipe("hf_checkpoint: x\neval_size: 64\neval_interval: 0\n")
    with pytest.raises(ConfigError, match="--eval-size has no effect"):
        resolve(["--recipe", str(path)])


def test_a_header_without_these_lines_is_listed_as_a_dash(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("# no sentence\nlr: 1\n# Hardware: not in the header\n")
    assert read_summary(path) == ("x", "-", "-")
    path.write_text("lr: 1\n")
    assert read_summary(path) == ("x", "-", "-")


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
