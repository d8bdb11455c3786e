"""Resolve a name to an object: a table entry, `package.module:attribute`, `folder/file.py:attribute`, or a plug-in.

A package registers a plug-in as an entry point named `<kind>.<name>` in the group `fsdptrain.plugins`:

    [project.entry-points."fsdptrain.plugins"]
    "loggers.swanlab" = "my_package.swanlab:SwanLabLogger"
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from fsdptrain.errors import ConfigError

T = TypeVar("T")
_GIVEN: ContextVar[Mapping[str, Any]] = ContextVar("given", default={})  # noqa: B039  # never changed


class Table(Mapping[str, T]):
    """Objects by name, each imported on first use from its target `package.module:attribute`."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = targets

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self._targets[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


def resolve(
    name: str, table: Mapping[str, T], *, flag: str, plugins: str = "", call: Callable[[Any], Any] | None = None
) -> T:
    """Return the entry of `table`, the attribute `package.module:name`, or the plug-in of kind `plugins`.

    call: how an attribute will be called, for example `lambda f: f(prompt, text)`: its signature must allow that.

    Raises ConfigError if `name` is none of these. Imports no other plug-in.
    """
    if name in table:
        return table[name]
    if ":" in name:
        attribute = _attribute(name, flag)
        if call is not None:
            check_call(attribute, call, where=f"{flag} {name}")
            if inspect.iscoroutinefunction(attribute):
                raise ConfigError(f"{flag} {name} is async, but its result is never awaited: define it without async")
        return attribute
    installed = _plugins(plugins) if plugins else {}
    if name in installed:
        return _load(installed[name])
    raise ConfigError(unknown_name(flag, name, [*table, *installed], "package.module:name"))


def _attribute(path: str, flag: str) -> Any:
    if path in _GIVEN.get():
        return _GIVEN.get()[path]
    from fsdptrain.user_code import import_attribute

    return import_attribute(path, flag=flag)


@contextmanager
def given_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Within the context, `resolve` returns the `objects` of these paths `module:name` without an import."""
    token = _GIVEN.set(objects)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def check_call(function: Any, call: Callable[[Any], Any], *, where: str) -> None:
    """Raise ConfigError if the signature does not allow `call`, for example `lambda f: f(prompt, text)`."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions in C have none
        return
    except TypeError as error:
        raise ConfigError(f"{where} is not a function") from error
    try:
        call(signature.bind)
    except TypeError as error:
        raise ConfigError(f"{where} has the signature {signature}, which does not match its calls: {error}") from error


def suggest(name: str, known: Mapping[str, object] | list[str], *, cutoff: float = 0.75) -> str:
    """Return `; did you mean 'x'?`, or an empty string if no name is close. cutoff: of difflib, 0 to 1."""
    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown_name(flag: str, name: str, known: Iterable[str], path: str = "package.module:function") -> str:
    """Return the error line for an unknown value of `flag`. path: form of names outside the package."""
    names = ", ".join(known)
    return f"{flag}: unknown name {name!r}{suggest(name, list(known))} (use {names}{' or ' * bool(names)}{path})"


def misnamed(flag: str, name: str, known: Iterable[str], plugins: str) -> list[str]:
    """Return an error line unless `name` is in `known`, a plug-in of kind `plugins`, or `package.module:name`."""
    if ":" in name or name in (known := [*known, *plugin_names(plugins)]):
        return []
    return [unknown_name(flag, name, known, "package.module:name")]


def plugin_names(kind: str) -> list[str]:
    """Return the names of installed plug-ins of a `kind` (loggers, rollout, environments) without importing them."""
    return list(_plugins(kind))


def load_plugins(kind: str) -> list[Any]:
    """Import and return all installed plug-ins of a `kind`, in the order of their names."""
    return [_load(point) for _, point in sorted(_plugins(kind).items())]


def _plugins(kind: str) -> dict[str, EntryPoint]:
    points = entry_points(group="fsdptrain.plugins")
    return {point.name.removeprefix(f"{kind}."): point for point in points if point.name.startswith(f"{kind}.")}


def _load(point: EntryPoint) -> Any:
    from fsdptrain.user_code import load_plugin

    return load_plugin(point)
