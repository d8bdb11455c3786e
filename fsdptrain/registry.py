"""From a name to an object: a table's entry, or `package.module:attribute`."""

import importlib
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from fsdptrain.errors import ConfigError

T = TypeVar("T")


def resolve(name: str, table: Mapping[str, T], *, flag: str) -> T:
    """The entry of `table`, or the attribute that `package.module:attribute` names. ConfigError if there is neither."""
    if name in table:
        return table[name]
    if ":" not in name:
        raise ConfigError(
            f"{flag} does not know {name!r}{suggest(name, table)}; it takes {', '.join(table)} or package.module:name"
        )
    return import_attribute(name, flag=flag)


def import_attribute(path: str, *, flag: str) -> Any:
    """Import `package.module:attribute`, from the current folder too."""
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not look into the current folder, `python -m` does
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{flag} {path}: {error}; it is package.module:attribute, importable from here") from error


def suggest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """`; did you mean 'x'?` or nothing."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
