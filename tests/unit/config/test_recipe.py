"""Recipes are read with every mistake named, and written so that they can be read again."""

from pathlib import Path

import pytest

from fsdptrain.config import Config, resolve, to_yaml
from fsdptrain.config.recipe import LEFT_OUT, load_recipe, read_recipe
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
    assert (config.optim.lr, config.optim.adam_eps, config.optim.weight_decay, config.optim.adam_beta1) == (
        1e-6,
        1e-8,
        0.015,
        0.5,
    )


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
        ("learning_rat: 1\n", "unknown key 'learning_rat'"),
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


def test_a_missing_recipe_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"--recipe .*none.yaml cannot be read: No such file"):
        read_recipe(tmp_path / "none.yaml")


def test_an_empty_recipe_says_nothing(recipe):
    assert read_recipe(recipe("# nothing\n")) == {}


def test_each_value_is_written_with_its_source(recipe):
    resolved = resolve(["--recipe", str(recipe("hf_checkpoint: x\nlr: 1e-6\n")), "--no-bf16"])
    lines = to_yaml(resolved.config, resolved.sources).splitlines()
    found = {line.split(":")[0].strip(): line for line in lines}
    assert found["hf_checkpoint"].split("#")[1] == " recipe"
    assert found["bf16"].split() == ["bf16:", "false", "#", "flag"]
    assert found["fp16"].split() == ["fp16:", "false", "#", "default"]
    assert len({line.index("#") for line in lines if "#" in line}) == 1


def test_a_dry_run_is_not_part_of_a_recipe():
    assert "dry_run" not in to_yaml(Config(hf_checkpoint="x", dry_run=True))


def test_flag_that_turns_something_off_wins_over_what_the_recipe_says_about_it(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("hf_checkpoint: x\neval_size: 64\neval_greedy: true\n")

    resolved = resolve(["--recipe", str(recipe), "--eval-interval", "0"])

    assert (resolved.config.data.eval_size, resolved.config.run.eval_greedy) == (None, False)
    assert resolved.sources["eval_size"] == LEFT_OUT
    with pytest.raises(ConfigError, match="--eval-size has no effect"):
        resolve(["--recipe", str(recipe), "--eval-interval", "0", "--eval-size", "64"])


def test_recipe_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("hf_checkpoint: x\neval_size: 64\neval_interval: 0\n")
    with pytest.raises(ConfigError, match="--eval-size has no effect"):
        resolve(["--recipe", str(recipe)])
