"""Compare the package's calls of torch and transformers with the signatures of the installed versions."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "fsdptrain"
LIBRARIES = ("torch", "transformers")
_UNKNOWN = object()


def mismatches() -> tuple[list[str], int]:
    """Return a line for each name that does not exist and each call that does not bind, and the number of calls bound.

    Calls of methods are not checked: the type of their object is unknown.
    """
    found, bound = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names, missing = _imported(tree)
        at = path.relative_to(PACKAGE.parent)
        found += [f"{at}:{line} {name} does not exist" for line, name in missing]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _resolve(node, names) is None:
                found.append(f"{at}:{node.lineno} {ast.unparse(node)} does not exist")
            if isinstance(node, ast.Call) and (signature := _signature(_resolve(node.func, names))) is not None:
                bound += 1
                if error := _error(signature, node):
                    found.append(f"{at}:{node.lineno} {ast.unparse(node.func)}: {error}")
    return found, bound


def _imported(tree: ast.AST) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """Return what names stand for, and names that cannot be imported."""
    names: dict[str, Any] = {}
    missing = []
    for line, module, name, bound_to in _imports(tree):
        try:
            value = importlib.import_module(module)
            names[bound_to] = value if name is None else getattr(value, name)
        except ImportError:
            missing.append((line, module))
        except AttributeError:
            try:
                names[bound_to] = importlib.import_module(f"{module}.{name}")
            except ImportError:
                missing.append((line, f"{module}.{name}"))
    return names, missing


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str | None, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            for alias in node.names:
                yield node.lineno, str(node.module), alias.name, alias.asname or alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                if top in LIBRARIES:
                    yield node.lineno, alias.name if alias.asname else top, None, alias.asname or top


def _resolve(node: ast.AST, names: dict[str, Any]) -> Any:
    """Return the value of `a` or `a.b.c`, None if it does not exist, _UNKNOWN if `a` is not of these libraries."""
    if isinstance(node, ast.Name):
        return names.get(node.id, _UNKNOWN)
    if not isinstance(node, ast.Attribute):
        return _UNKNOWN
    owner = _resolve(node.value, names)
    if owner is _UNKNOWN or owner is None or not (inspect.ismodule(owner) or inspect.isclass(owner)):
        return _UNKNOWN
    return getattr(owner, node.attr, None)


def _signature(value: Any) -> inspect.Signature | None:
    if value is _UNKNOWN or not callable(value):
        return None
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):  # implemented in C++
        return None


def _error(signature: inspect.Signature, call: ast.Call) -> str | None:
    positional = [] if any(isinstance(arg, ast.Starred) for arg in call.args) else call.args
    try:
        signature.bind_partial(*positional, **{word.arg: word for word in call.keywords if word.arg is not None})
    except TypeError as error:
        return str(error)
    return None
