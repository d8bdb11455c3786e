"""Errors of pydantic in one line, with the flag, the value and the accepted values. Imported after an error only."""

import types
from typing import Any, Literal, Union, get_args, get_origin

import pydantic
from pydantic_core import ErrorDetails

from fsdptrain.config.keys import Key, all_sections
from fsdptrain.errors import ConfigError
from fsdptrain.registry import suggest

_BOUNDS = {
    "greater_than": ("must be greater than", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be less than", "lt"),
    "less_than_equal": ("must be at most", "le"),
}
_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def field_problem(error: pydantic.ValidationError, *, section: str) -> ConfigError:
    """Return the first error of a section, such as `--eps-clip must be less than 1, got 1.5`."""
    detail = error.errors(include_url=False)[0]
    name = str(detail["loc"][0])
    key = Key(all_sections()[section], name)
    annotation = key.field.annotation
    value = detail["input"]
    return ConfigError(f"{key.flag} {_reason(detail, annotation)}, got {_shown(value)}{near(value, annotation)}")


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
        return f"a list of {', '.join(map(str, choices))}" if choices else "a list of texts"
    if origin is dict:
        return "a mapping (on the command line: key=value ...)"
    return _NOUNS[annotation]


def near(value: Any, annotation: Any) -> str:
    """Return `; did you mean 'x'?` if the annotation is a choice of strings and `value` is close to one."""
    choices = [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return suggest(value, choices) if isinstance(value, str) else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
