"""Marks: all but a few representatives of a parametrized test for `make test-matrix`; a real model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

REAL_MODEL = Path(__file__).parents[1] / "build" / "smollm2"


def only(few: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return `cases` as parameters: those in `few` run in `make test`, the others only in `make test-matrix`.

    A case is one value, or a plain tuple of the values of several parameters.
    """
    cases, few = list(cases), list(few)
    assert all(case in cases for case in few), few
    return [_parameters(case, [] if case in few else [pytest.mark.matrix]) for case in cases]


def _parameters(case: Any, marks: list[pytest.MarkDecorator]) -> Any:
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=marks)


def chosen(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return the values of parameter `name` in the tests of this module that will run, each once."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    values = [
        item.callspec.params[name] for item in items if hasattr(item, "callspec") and name in item.callspec.params
    ]
    return [value for number, value in enumerate(values) if value not in values[:number]]
