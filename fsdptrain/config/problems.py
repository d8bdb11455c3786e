"""Errors of fields and their rules in one line, with flag, value and fix. Imported after an error only."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import pydantic
from pydantic_core import ErrorDetails

from fsdptrain.config.keys import Key, all_keys, all_sections
from fsdptrain.config.rules import Condition, Excludes, NoEffectError, Requires, Rule
from fsdptrain.errors import ConfigError
from fsdptrain.registry import suggest

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_BOUNDS = {
    "greater_than": ("must be greater than", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be less than", "lt"),
    "less_than_equal": ("must be at most", "le"),
}
_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def field_problems(error: pydantic.ValidationError, *, section: str) -> list[str]:
    """Return a line for each invalid field of a section, such as `--eps-clip must be less than 1, got 1.5`."""
    lines: dict[str, str] = {}  # the first of each field: a union has one error for each of its types
    for detail in error.errors(include_url=False):
        key = Key(all_sections()[section], str(detail["loc"][0]))
        annotation, value = key.field.annotation, detail["input"]
        line = f"{key.flag} {_reason(detail, annotation)}, got {_shown(value)}{near(value, annotation)}"
        lines.setdefault(key.name, line)
    return [*lines.values()]


def _reason(detail: ErrorDetails, annotation: Any) -> str:
    kind = detail["type"]
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"{words} {detail.get('ctx', {})[bound]:g}"
    if kind == "finite_number":
        return "must be finite"
    if kind == "too_short":
        return "needs at least one"
    return f"must be {describe(annotation)}"


def describe(annotation: Any) -> str:
    """Describe the values that an annotation accepts."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " * (len(args) > 1) + ", ".join(str(choice) for choice in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(choice) for choice in args if choice is not type(None))
    if origin is list:
        choices = get_args(args[0])
        return f"a list of {', '.join(map(str, choices)) or _NOUNS[args[0]][2:] + 's'}"
    if origin is dict:
        return f"a mapping{' to numbers' * (float in args)} (on the command line: key=value ...)"
    return _NOUNS[annotation]


def near(value: Any, annotation: Any) -> str:
    """Return `; did you mean 'x'?` if the annotation is a choice of strings and `value` is close to one."""
    choices = [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return suggest(value, choices) if isinstance(value, str) else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def rule_problem(config: Config, key: Key, rule: Rule) -> ConfigError:
    """Return the error of an option that was set and breaks `rule`."""
    if isinstance(rule, Excludes):
        return ConfigError(f"{key.shown(config)} does not work {_reason_of_rule(config, key, rule)}")
    return NoEffectError(f"{key.flag} has no effect {_reason_of_rule(config, key, rule)}", key.flat)


def _reason_of_rule(config: Config, key: Key, rule: Rule) -> str:
    if rule.reason:
        return rule.reason
    if isinstance(rule, Requires):
        return _what_is_missing(config, key, rule)
    other = all_keys()[next(filter(config.holds, rule.conditions)).key]
    fix = rule.fix or ("leave one of them out" if isinstance(rule, Excludes) else "remove it")
    return f"with {other.shown(config)}: {fix}"


def _what_is_missing(config: Config, key: Key, rule: Requires) -> str:
    names = [_described(condition) for condition in rule.conditions]
    other = all_keys().get(rule.conditions[0].key)  # None: its feature is not installed
    if len(names) == 1 and other is not None and config.is_set(other.flat):
        only = f", only with {names[0]}" if rule.conditions[0].relation else ""
        return f"with {other.shown(config)}{only}: {rule.fix or 'remove it'}"
    return f"without {' or '.join(names)}: {rule.fix or f'add it, or leave {key.flag} out'}"


def _described(condition: Condition) -> str:
    flag = "--" + condition.key.replace("_", "-")
    if condition.relation == ">":
        return f"{flag} above {condition.values[0]}"
    return f"{flag} {' or '.join(condition.values)}".strip()
