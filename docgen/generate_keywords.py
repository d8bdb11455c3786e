"""Write fsdptrain/config/keywords.pyi, the types of the keywords of `Config`: `python -m docgen`."""

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from fsdptrain.config.keys import all_keys, all_sections

HEAD = '''"""Types of the keywords of `Config`. Made by docgen/generate_keywords.py."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from fsdptrain.config.section import Section

# fmt: off

class Keywords(TypedDict, total=False):
    """Sections, then all options by flat key. docs/configuration.md describes them."""

'''
WIDTH = 110


def keywords_module() -> str:
    names = dict.fromkeys([*all_sections(), *all_keys()])
    lines = [f"    {name}: {_line(name)}" for name in names]
    return HEAD + "\n".join(f"{line}{'  # noqa: E501' * (len(line) > WIDTH)}" for line in lines) + "\n"


def _line(name: str) -> str:
    section = "Section | Mapping[str, Any]" if name in all_sections() else ""
    option = _type_of(all_keys()[name].field) if name in all_keys() else ""
    optional = option.endswith(" | None")
    return " | ".join(filter(None, (option.removesuffix(" | None"), section, "None" * optional)))


def _type_of(field: FieldInfo) -> str:
    is_list_or_one = any(isinstance(mark, BeforeValidator) for mark in field.metadata)
    return f"{'str | ' * is_list_or_one}{_text(field.annotation)}"


def _text(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "None"
    if origin in (Union, types.UnionType):
        return " | ".join(map(_text, args))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]".replace("'", '"')
    if origin is not None and hasattr(annotation, "__metadata__"):
        return _text(args[0])
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_text, args))}]"
    return "Any" if annotation is Any else annotation.__name__
