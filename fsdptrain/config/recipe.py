"""Reading of recipes: YAML files of options. Imported for --recipe, resumed runs and commands only.

Precedence between a recipe and flags that select another algorithm or loss:

    flag > preset of a flag's algorithm > recipe > preset of the recipe's algorithm > default

A preset ranks just below the source that names its algorithm. `--recipe runs/a/config.yaml --algorithm gspo` therefore
selects gspo, although the recipe, written by a run, contains every value of another algorithm. If a flag repeats the
recipe's algorithm, all values of the recipe are kept.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from fsdptrain.config.algorithm import AlgorithmConfig
from fsdptrain.config.keys import all_keys, build_sections, flatten
from fsdptrain.config.presets import LOSS_FIELDS, OLD_POLICY, preset_values
from fsdptrain.config.root import Config
from fsdptrain.config.rules import NoEffectError
from fsdptrain.config.written import FLOAT
from fsdptrain.errors import ConfigError

Source = Literal[
    "default",
    "preset",
    "recipe",
    "flag",
    "default, since a flag takes the recipe's value its effect",
    "preset, since a flag names another algorithm or loss",
]
LEFT_OUT: Source = "default, since a flag takes the recipe's value its effect"
SUPERSEDED: Source = "preset, since a flag names another algorithm or loss"
LOSS_OWN = frozenset(LOSS_FIELDS) - OLD_POLICY  # clip values do not transfer between losses
ALGORITHM_OWN = LOSS_OWN | {"loss", "loss_aggregation", "advantage_estimator", "advantage_scale"}


def load_recipe(path: str | Path, **flags: Any) -> Config:
    """Load a configuration from a recipe: a file, or the name of an included one.

    `flags` (flat keys or sections) override it.
    """
    return combine(read_recipe(path), flags)[0]


def combine(recipe: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Config, dict[str, Source]]:
    """Combine recipe and flags. Returns the configuration and the overridden recipe keys with their value source.

    Recipe values are dropped in two cases: a flag selects another algorithm or loss (see `superseded`), or a flag turns
    off the feature that they configure (`--eval-interval 0`, `eval_size`). Without flags nothing is dropped: an
    inconsistent recipe is an error.
    """
    values, by_flag = flatten(recipe), flatten(flags)
    left_out: dict[str, Source] = dict.fromkeys(superseded(values, by_flag), SUPERSEDED)
    values = {flat: value for flat, value in values.items() if flat not in left_out}
    while True:
        try:
            return Config(**{**values, **by_flag}), left_out
        except NoEffectError as error:
            if not flags or error.key not in values or error.key in by_flag:
                raise
            del values[error.key]
            left_out[error.key] = LEFT_OUT


def superseded(recipe: Mapping[str, Any], flags: Mapping[str, Any]) -> list[str]:
    """Return the keys of `recipe` that `flags` override implicitly. All keys are flat.

    If a flag selects another algorithm: the loss with all its options, aggregation, advantage, all values of the new
    preset, and values that equal the recipe's preset. If a flag selects another loss: the options of losses.
    """
    algorithm = recipe.get("algorithm", AlgorithmConfig().algorithm)
    old = preset_values(algorithm, recipe.get("loss"))
    giving_way: set[str] = set()
    if flags.get("algorithm", algorithm) != algorithm:
        new = preset_values(flags["algorithm"], flags.get("loss"))
        giving_way = set(ALGORITHM_OWN) | set(new) | {flat for flat in old if recipe.get(flat) == old[flat]}
    elif flags.get("loss", recipe.get("loss", old.get("loss"))) != recipe.get("loss", old.get("loss")):
        giving_way = set(LOSS_OWN)
    return [flat for flat in recipe if flat in giving_way and flat not in flags]


def value_sources(
    config: Config, recipe: Iterable[str], left_out: Mapping[str, Source], flags: Iterable[str]
) -> dict[str, Source]:
    """Return the source of each value of `config` by flat key. recipe, flags: flat keys given there."""
    preset = preset_values(config.algorithm.algorithm, config.algorithm.loss)
    sources: dict[str, Source] = dict.fromkeys(all_keys(), "default")
    sources.update(dict.fromkeys((flat for flat in preset if preset[flat] != all_keys()[flat].default), "preset"))
    sources.update(dict.fromkeys(recipe, "recipe"))
    sources.update(left_out)
    sources.update(dict.fromkeys(flags, "flag"))
    return sources


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read and validate the values of a recipe, a file or the name of an included one, unchanged.

    Raises ConfigError with the file name.
    """
    from fsdptrain.config.shipped import find_recipe

    values = read_mapping(find_recipe(path), what=f"--recipe {path}")
    try:
        build_sections(flatten(values))
    except ConfigError as error:
        raise ConfigError(f"recipe {path}: {error}") from error
    return values


def read_mapping(path: str | Path, *, what: str) -> dict[str, Any]:
    """Read a YAML file of keys with values. Raises ConfigError, which begins with `what`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError(f"{what} cannot be read: {reason}") from error
    try:
        values = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a number of 5,000 digits; 1,000 nested lists
        raise ConfigError(f"{what} is not YAML: {_one_line(error)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{what} must hold keys with values, such as `lr: 1e-6`, got {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """YAML loader with Python float syntax (1e-6) that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())
