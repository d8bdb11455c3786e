"""Values of options, drawn from the fields of the configuration: valid ones, and slightly invalid ones."""

import math
import types
from collections.abc import Iterable
from itertools import chain
from typing import Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from fsdptrain.config import Config
from fsdptrain.config.checks import check_data_options
from fsdptrain.config.flags import resolve
from fsdptrain.config.keys import Key, all_keys
from fsdptrain.errors import FsdptrainError

TEXTS = st.text(max_size=12) | st.sampled_from(
    ["auto", "none", "None", "", " ", "a:b", "a.b:c", "/", ".", "1", "x" * 300]
)
WRONG = st.none() | st.booleans() | st.integers(-1, 1) | st.floats() | TEXTS | st.lists(TEXTS, max_size=2)
# Not run for a step: they need servers, GPUs, several processes, other packages or long runs.
NOT_RUN = frozenset(
    [
        "hf_checkpoint",
        "output_dir",
        "num_rollout",
        "prompt_data",
        "eval_prompt_data",
        "resume",
        "dry_run",
        "probe",
        "nproc_per_node",
        "max_restarts",
        "log_dir",
        "log_to",
        "log_project",
        "log_run_name",
        "backend",
        "rollout_engine",
        "load_strategy",
        "dist_timeout",
        "environment",
        "reward",
        "input_key",
        "label_key",
        "metadata_key",
        "image_key",
        "ref_load",
        "compile",
        "liger",
        "speed",
        "loss",
        "advantage_estimator",
        "prompt_split",
        "data_size",
        "trust_remote_code",
        "reward_timeout",
        "reward_workers",
    ]
)


def in_one(parts: Iterable[list[str]]) -> list[str]:
    return list(chain.from_iterable(parts))


def values_of(key: Key) -> st.SearchStrategy[Any]:
    """Valid values of the option's type, mostly small, with its bounds and their neighbors."""
    return _of(key.field.annotation, _bounds(key))


def _bounds(key: Key) -> list[float]:
    names = ("ge", "gt", "le", "lt")
    return [
        getattr(mark, name) for mark in key.field.metadata for name in names if getattr(mark, name, None) is not None
    ]


def _of(annotation: Any, bounds: list[float]) -> st.SearchStrategy[Any]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of(*(st.none() if choice is type(None) else _of(choice, bounds) for choice in args))
    if origin is list:
        return st.lists(TEXTS, max_size=3)
    if origin is dict:
        return st.dictionaries(TEXTS, st.booleans() | st.integers() | st.floats() | TEXTS, max_size=3)
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        edges = [int(bound) + step for bound in bounds for step in (-1, 0, 1)]
        return st.integers(0, 12) | st.sampled_from([*edges, 64, 512, 2**31, 2**63, 10**30])
    if annotation is float:
        edges = [value for bound in bounds for value in (bound, bound + 0.01, bound - 0.01)]
        return st.floats(0, 2) | st.sampled_from([*edges, 0.5, 1e-6, 1e300, 5e-324])
    return TEXTS


def _one_option(*, invalid: bool) -> st.SearchStrategy[tuple[str, Any]]:
    def pair(flat: str) -> st.SearchStrategy[tuple[str, Any]]:
        values = values_of(all_keys()[flat])
        return st.tuples(st.just(flat), values | WRONG if invalid else values)

    return st.sampled_from(sorted(all_keys())).flatmap(pair)


def sets_of_options() -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(_one_option(invalid=True), max_size=5).map(dict)


def command_lines() -> st.SearchStrategy[list[str]]:
    """Flags with words: from values, negated, joined by =, or any text."""

    def words(option: tuple[str, Any]) -> list[str]:
        return words_of(*option)

    flag = _one_option(invalid=True).map(words)
    odd = st.lists(TEXTS, min_size=1, max_size=2) | st.sampled_from(sorted(all_keys())).map(
        lambda flat: [f"--no-{flat.replace('_', '-')}"]
    )
    joined = _one_option(invalid=True).map(lambda option: ["=".join(words_of(*option)[:2])])
    return st.lists(flag | flag | odd | joined, max_size=4).map(in_one)


def words_of(name: str, value: Any) -> list[str]:
    """Return the words of the command line for a value."""
    flag = all_keys()[name].flag
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    if isinstance(value, dict):
        return [flag, *(f"{name}={item}" for name, item in value.items())]
    return [flag, str(value)]


def check_values(values: dict[str, Any]) -> None:
    """Configure a run by keyword."""
    check_data_options(Config(**{"hf_checkpoint": "x", **values}))


def _run_value(flat: str) -> st.SearchStrategy[Any]:
    """Values that a tiny run can take: no names of files, nothing huge."""
    small = values_of(all_keys()[flat])
    return small.filter(lambda value: not isinstance(value, str | list | dict) or value in _choices(flat)).filter(
        lambda value: not isinstance(value, int | float) or (math.isfinite(value) and abs(value) <= 600)
    )


def _choices(flat: str) -> tuple[Any, ...]:
    annotation = all_keys()[flat].field.annotation
    options = [annotation, *get_args(annotation)]
    return tuple(choice for one in options if get_origin(one) is Literal for choice in get_args(one))


def _can_run(flat: str) -> bool:
    kinds = {all_keys()[flat].field.annotation, *get_args(all_keys()[flat].field.annotation)}
    return flat not in NOT_RUN and bool(kinds & {bool, int, float} or _choices(flat))


@st.composite
def small_runs(draw: st.DrawFn, checkpoint: str) -> list[list[str]]:
    """Draw words of options, one list per option, whose configuration is valid for a tiny run; or []."""
    from tests.e2e.command import TINY_RUN

    names = sorted(flat for flat in all_keys() if _can_run(flat))
    chosen: list[list[str]] = []
    for flat in draw(st.lists(st.sampled_from(names), min_size=3, max_size=10, unique=True)):
        words = words_of(flat, draw(_run_value(flat)))
        more = [*chosen, words]
        try:
            resolve(["--hf-checkpoint", checkpoint, *TINY_RUN, "--num-rollout", "1", *in_one(more)])
        except FsdptrainError:
            continue
        chosen = more
    return chosen
