"""The text of --help, drawn by tyro. Imported for --help only."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin

import tyro

from fsdptrain.config.flags import RECIPE, Option, config_options
from fsdptrain.config.keys import all_keys, all_sections

Groups = Mapping[str, Mapping[str, Option]]  # box of the help text -> options; "" is the top level


def print_run_help(description: str) -> None:
    """Print all options of a run with help text and default, one box per section."""
    options = config_options()
    groups = {"": {"recipe": RECIPE}} | {
        section: {flat: options[flat] for flat, key in all_keys().items() if key.section == section}
        for section in all_sections()
    }
    print_help("fsdptrain", description, groups)


def print_help(prog: str, description: str, groups: Groups) -> None:
    try:
        tyro.cli(_view(groups), prog=prog, description=description, args=["--help"])
    except SystemExit:
        sys.stdout.flush()


def _view(groups: Groups) -> type:
    """Build a dataclass that tyro turns into flags."""
    fields: list[tuple[str, Any, Any]] = []
    for group, options in groups.items():
        members = [_member(name, option) for name, option in options.items()]
        if not group:
            fields += members
            continue
        section = dataclasses.make_dataclass(group, members)
        section.__doc__ = all_sections()[group].__doc__ or ""
        fields.append((group, section, dataclasses.field(default_factory=section)))
    return dataclasses.make_dataclass("Options", fields)


def _member(name: str, option: Option) -> tuple[str, Any, Any]:
    inner = [choice for choice in get_args(option.annotation) if choice is not type(None)]
    metavar = _metavar(inner[0]) if type(None) in get_args(option.annotation) else None  # avoids the metavar {None}|STR
    marks: list[Any] = [tyro.conf.arg(name=option.flag[2:], prefix_name=False, help=option.help, metavar=metavar)]
    if get_origin(option.annotation) is dict:
        marks.append(_MAPPING)
    annotation = Annotated[(option.annotation, *marks)]  # pyright: ignore[reportInvalidTypeForm]
    return name, annotation, dataclasses.field(default_factory=lambda: option.default)


def _metavar(annotation: Any) -> str:
    choices = get_args(annotation)
    return f"{{{','.join(choices)}}}" if choices else annotation.__name__.upper()


_MAPPING = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="[KEY=VALUE ...]",
    instance_from_str=lambda words: dict(word.split("=", 1) for word in words),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda mapping: [f"{key}={value}" for key, value in mapping.items()],
)
