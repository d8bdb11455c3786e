"""Reading and writing of configurations as YAML recipes. Written recipes can be read back."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from fsdptrain.config.keys import all_keys, build_sections, flatten
from fsdptrain.config.precedence import superseded
from fsdptrain.config.root import Config
from fsdptrain.config.rules import NoEffectError
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
_NOT_WRITTEN = ("dry_run",)  # it would make the recipe only print itself


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
    given, by_flag = flatten(recipe), flatten(flags)
    left_out: dict[str, Source] = dict.fromkeys(superseded(given, by_flag), SUPERSEDED)
    given = {flat: value for flat, value in given.items() if flat not in left_out}
    while True:
        try:
            return Config(**{**given, **by_flag}), left_out
        except NoEffectError as error:
            if not flags or error.key not in given or error.key in by_flag:
                raise
            del given[error.key]
            left_out[error.key] = LEFT_OUT


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


def to_yaml(config: Config, sources: Mapping[str, Source] | None = None) -> str:
    """Format `config` as a recipe with all values and, from `sources` (by flat key), aligned source comments."""
    lines: list[tuple[str, str]] = []
    section = ""
    for flat, key in all_keys().items():
        if flat in _NOT_WRITTEN:
            continue
        if key.section != section:
            section = key.section
            lines.append((f"{section}:", ""))
        lines.append((f"  {key.name}: {_scalar(key.value(config))}", f"  # {sources[flat]}" if sources else ""))
    width = max(min(len(line), 60) for line, _ in lines)
    return "".join(f"{line:<{width}}{source}\n" if source else f"{line}\n" for line, source in lines)


def _scalar(value: Any) -> str:
    """Format `value` on one line."""
    in_list = yaml.dump(
        [value],
        Dumper=_Dumper,
        default_flow_style=True,
        width=math.inf,
        allow_unicode=True,
        sort_keys=False,
    )
    return in_list.strip()[1:-1]


class _Loader(yaml.SafeLoader):
    """YAML loader with Python float syntax (1e-6) that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes strings that `_Loader` would read as numbers."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Quote text with line breaks or other unprintable characters, which plain YAML folds or rejects."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _string)
_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())
