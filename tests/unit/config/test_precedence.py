"""A preset stands just below whoever names its algorithm: default < recipe's preset < recipe < flag's preset < flag."""

from pathlib import Path

import pytest

from fsdptrain.config import Config, resolve, to_yaml
from fsdptrain.config.keys import all_keys
from fsdptrain.config.presets import PRESETS
from fsdptrain.config.recipe import ALGORITHM_OWN, SUPERSEDED, load_recipe

QUICKSTART = Path(__file__).parents[3] / "fsdptrain" / "recipes" / "spell_backward_demo.yaml"


def decided(config):
    """What an algorithm is: the options that it decides, and those of other sections that any preset speaks of."""
    beside = {flat for preset in PRESETS.values() for flat in preset.beside}
    keys = [all_keys()[flat] for flat in sorted(ALGORITHM_OWN | beside)]
    return {key.flat: key.value(config) for key in keys}


def needed(algorithm: str) -> dict[str, str]:
    return {"opd_teacher": "y"} if algorithm == "opd" else {}


def flags(algorithm: str) -> list[str]:
    return [part for flat, value in needed(algorithm).items() for part in (all_keys()[flat].flag, value)]


def written(tmp_path: Path, **values) -> str:
    """The recipe that a run with `values` leaves: every value of it."""
    path = tmp_path / "r.yaml"
    path.write_text(to_yaml(Config(hf_checkpoint="x", **values)))
    return str(path)


@pytest.mark.parametrize("before", ["grpo", "dapo", "gspo", "sapo"])
@pytest.mark.parametrize("now", sorted(PRESETS))
def test_the_written_recipe_of_a_run_can_be_run_with_every_other_algorithm(before, now, tmp_path):
    size = {} if now == "sft" else {"global_batch_size": 64, **needed(now)}
    recipe = written(tmp_path, algorithm=before, global_batch_size=64)
    resolved = resolve(["--recipe", recipe, "--algorithm", now, *flags(now)])
    assert decided(resolved.config) == decided(Config(hf_checkpoint="x", algorithm=now, **size))
    assert resolved.sources["loss"] == ("recipe" if now == before else SUPERSEDED)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_quickstart_is_a_recipe_for_every_algorithm(name):
    config = resolve(["--recipe", str(QUICKSTART), "--algorithm", name, *flags(name)]).config
    tuned = {"eps_clip_high": 0.28} if name == "grpo" else {}
    assert decided(config) == {**decided(Config(hf_checkpoint="x", algorithm=name, **needed(name))), **tuned}
    assert config.optim.lr == 2e-4


def test_a_flag_that_repeats_the_recipe_changes_nothing(tmp_path):
    recipe = written(
        tmp_path, algorithm="dapo", global_batch_size=64, eps_clip_high=0.3, loss_aggregation="sequence_sum"
    )
    assert load_recipe(recipe, algorithm="dapo", loss="grpo") == load_recipe(recipe)


def test_what_the_user_changed_in_another_section_stays(tmp_path):
    """Only what the recipe's own preset had said gives way, or what the new one says."""
    assert load_recipe(written(tmp_path, algorithm="dapo"), algorithm="rloo").shaping.overlong_penalty == 0.0
    changed = written(tmp_path, algorithm="dapo", overlong_penalty=0.5, lr=1e-5)
    config = load_recipe(changed, algorithm="rloo")
    assert (config.shaping.overlong_penalty, config.optim.lr) == (0.5, 1e-5)
    plain = written(tmp_path, algorithm="grpo", overlong_penalty=0.5)
    assert load_recipe(plain, algorithm="dapo").shaping.overlong_penalty == 1.0


def test_another_loss_leaves_aggregation_and_advantage_to_the_recipe(tmp_path):
    recipe = written(tmp_path, algorithm="gspo", global_batch_size=64, use_opsm=True)
    config = load_recipe(recipe, loss="cispo").algorithm
    assert (config.loss, config.eps_clip, config.eps_clip_high) == ("cispo", 0.2, None)
    assert (config.loss_aggregation, config.use_opsm) == ("sequence_mean", True)
