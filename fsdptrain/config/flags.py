"""Command line parsing: which flags were given, their values, and the source of each value."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin

import yaml
from pydantic import TypeAdapter

from fsdptrain.config.checks import check_data_options
from fsdptrain.config.keys import all_keys, build_sections, flatten
from fsdptrain.config.root import Config
from fsdptrain.errors import ConfigError

if TYPE_CHECKING:
    from fsdptrain.config.recipe import Source

_FLAG = re.compile(r"--[A-Za-z]")


@dataclass(frozen=True)
class Option:
    """Flag of a command."""

    flag: str  # including the dashes
    annotation: Any
    help: str
    default: Any

    @property
    def many(self) -> bool:
        """Whether it takes any number of values."""
        return get_origin(self.annotation) in (list, dict)

    @property
    def is_switch(self) -> bool:
        """Whether it has a `--no-` form, and needs no value."""
        return self.annotation is bool or bool in get_args(self.annotation)


@dataclass(frozen=True)
class Resolved:
    """Configuration, and what it was made from, by flat key."""

    config: Config
    command_values: Mapping[str, Any]  # options of the command rather than of the run
    flags: Mapping[str, Any]
    recipe: Mapping[str, Any]
    left_out: "Mapping[str, Source]"  # keys of the recipe that flags override implicitly

    @property
    def sources(self) -> "Mapping[str, Source]":
        """The source of each value."""
        from fsdptrain.config.recipe import value_sources

        return value_sources(self.config, self.recipe, self.left_out, self.flags)


RECIPE = Option(
    "--recipe",
    str | None,
    "YAML file with options, or the name of an included recipe (`fsdptrain recipes`). Flags take precedence.",
    None,
)


def asks_for_help(argv: Sequence[str]) -> bool:
    return "--help" in argv or "-h" in argv


def config_options() -> dict[str, Option]:
    """Return all options of `Config`, by flat key."""
    return {
        flat: Option(key.flag, key.field.annotation, " ".join((key.field.description or "").split()), key.default)
        for flat, key in all_keys().items()
    }


def resolve(argv: Sequence[str], command_options: Mapping[str, Option] | None = None) -> Resolved:
    """Resolve a command line to a configuration. Precedence: flag > recipe > preset > default.

    `command_options` are options of the command itself. Raises ConfigError for any invalid input.
    """
    command_options = command_options or {}
    values = parse(argv, {"recipe": RECIPE, **config_options(), **command_options})
    command_values = {key: values.pop(key, option.default) for key, option in command_options.items()}
    path = values.pop("recipe", None)
    recipe, left_out = dict[str, Any](), dict[str, "Source"]()
    if path is None:
        config = Config(**values)
    else:
        from fsdptrain.config.recipe import combine, read_recipe

        recipe = flatten(read_recipe(path))
        config, left_out = combine(recipe, values)
    check_data_options(config)
    return Resolved(config, command_values, values, recipe, left_out)


def parse(argv: Sequence[str], options: Mapping[str, Option]) -> dict[str, Any]:
    """Parse the flags in `argv`. Returns values by key; the last occurrence of a flag wins.

    Raises ConfigError with all problems of the flags and their values.
    """
    by_flag = {option.flag: key for key, option in options.items()}
    values, problems = dict[str, Any](), list[Any]()
    rest = list(argv)
    while rest:
        is_flag = not _values(rest)
        try:
            values |= _next(rest, by_flag, options)
        except ConfigError as error:
            problems += error.args
            if is_flag:
                take(rest, many=True)
    if problems:
        try:
            build_sections({key: value for key, value in values.items() if key in all_keys()})
        except ConfigError as error:
            problems += error.args
        raise ConfigError(*problems)
    return values


def _next(rest: list[str], by_flag: Mapping[str, str], options: Mapping[str, Option]) -> dict[str, Any]:
    """Take a flag and its values from the front of `rest`. Returns its value by key."""
    word = rest.pop(0)
    flag, equals, attached = word.partition("=")
    flag = flag.replace("_", "-")
    key, negated = _find(flag, by_flag, options, word)
    option = options[key]
    if negated or option.annotation is bool:
        _refuse_value(option, attached if equals else None, rest)
    if negated or option.annotation is bool or (option.is_switch and not equals and not _values(rest)):
        return {key: not negated}
    return {key: convert(option, [attached] if equals else take(rest, many=option.many))}


def _find(flag: str, by_flag: Mapping[str, str], options: Mapping[str, Option], word: str) -> tuple[str, bool]:
    """Return the key that `flag` sets and whether it is the `--no-` form."""
    if flag in by_flag:
        return by_flag[flag], False
    positive = "--" + flag.removeprefix("--no-")
    if flag.startswith("--no-") and positive in by_flag and options[by_flag[positive]].is_switch:
        return by_flag[positive], True
    from fsdptrain.config.other_names import advice, translate

    if not _FLAG.match(word):
        if advised := translate(word.partition("=")[0]):  # Hydra writes key=value
            raise ConfigError(f"unexpected argument {word!r}: {advised}")
        raise ConfigError(f"unexpected argument {word!r}: options begin with --, e.g. --hf-checkpoint {word}")
    raise ConfigError(f"unknown flag {flag}{advice(flag, list(by_flag))}")


def _refuse_value(option: Option, attached: str | None, rest: list[str]) -> None:
    following = rest[0] if rest and rest[0].lower() in ("true", "false", "0", "1", "yes", "no", "on", "off") else None
    value = attached if attached is not None else following
    if value is not None:
        off = f"--no-{option.flag[2:]}"
        shown = option.flag if option.annotation is bool else off
        raise ConfigError(f"{shown} takes no value, got {value!r}: it is {option.flag} or {off}")


def take(rest: list[str], *, many: bool) -> list[str]:
    """Pop the values of a flag from the front of `rest`: one, or with `many` all up to the next flag."""
    tokens: list[str] = []
    while _values(rest) and (many or not tokens):
        tokens.append(rest.pop(0))
    return tokens


def _values(rest: Sequence[str]) -> bool:
    """Return whether a value is next, not a flag or the end."""
    return bool(rest) and not _FLAG.match(rest[0])


def convert(option: Option, tokens: Sequence[str]) -> Any:
    """Convert `tokens` to the type of the option. Its section checks the bounds."""
    try:
        if tokens or option.many:
            return TypeAdapter(option.annotation).validate_python(_parsed(option, tokens))
    except (ValueError, yaml.YAMLError, RecursionError):  # RecursionError: 1,000 nested lists
        pass
    from fsdptrain.config.problems import describe, near

    wanted, shown = describe(option.annotation), " ".join(tokens)
    if not tokens:
        raise ConfigError(f"{option.flag} needs a value: {wanted}")
    raise ConfigError(f"{option.flag} must be {wanted}, got {shown!r}{near(shown, option.annotation)}")


def _parsed(option: Option, tokens: Sequence[str]) -> Any:
    if get_origin(option.annotation) is list:
        return list(tokens)
    if get_origin(option.annotation) is dict:
        return _read_mapping(tokens)
    return None if tokens[0] == "None" and type(None) in get_args(option.annotation) else tokens[0]


def _read_mapping(words: Sequence[str]) -> dict[str, Any]:
    """Read key=value words, or one JSON object. Raises ValueError for anything else."""
    if len(words) == 1 and words[0].startswith("{"):
        return json.loads(words[0])
    pairs = [word.partition("=") for word in words]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError("it is key=value")
    return {key: yaml.safe_load(value) for key, _, value in pairs}
