"""Functions of ours that a package for a device may replace on it: an attention kernel, the memory that is free.

A package offers one by an entry point of the group `fsdptrain.overrides`, named `<device type>.<key>`, where the key is
the whole dotted name of a function in `OVERRIDABLE`:

    [project.entry-points."fsdptrain.overrides"]
    "npu.fsdptrain.model.attention.attention.varlen_attention" = "my_kernels.attention:varlen_attention"

They are resolved once, when a run or an inspection is built, which lists them. A plug-in that cannot be loaded is an
error, and so are two for one function: what runs is never the original where another was installed.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import update_wrapper
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, ParamSpec, TypeVar

from fsdptrain.errors import ConfigError, describe

P = ParamSpec("P")
R = TypeVar("R")

GROUP = "fsdptrain.overrides"
OVERRIDABLE = (
    "fsdptrain.fsdp.optimizer.has_fused_adamw",
    "fsdptrain.model.attention.attention.segment_attention",
    "fsdptrain.model.attention.attention.varlen_attention",
    "fsdptrain.model.logprobs.chunked_logprobs",
    "fsdptrain.memory.flops.peak_tflops",
    "fsdptrain.platform.device_memory",
)


class Overridable(Generic[P, R]):
    """A function of `OVERRIDABLE`: calls the original until `install_overrides` has chosen another."""

    def __init__(self, original: Callable[P, R]) -> None:
        update_wrapper(self, original)
        self.original = original
        self.chosen = original

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.chosen(*args, **kwargs)


overridable = Overridable  # as a decorator


@dataclass(frozen=True)
class Override:
    """What runs in place of one of our functions, and whose it is."""

    key: str  # the function's whole dotted name
    value: str  # package.module:function of the one that takes its place
    package: str  # name and version of the distribution

    @property
    def line(self) -> str:
        return f"{self.key}: {self.value} of {self.package}"


def install_overrides(device_type: str) -> list[Override]:
    """Make every function of `OVERRIDABLE` what the packages installed here say for `device_type`; what they say.

    Functions without a plug-in are the originals again. ConfigError, and nothing is changed, for a key that is none of
    ours, for two plug-ins of one key, and for one that cannot be loaded or takes other arguments. Plug-ins for other
    devices are not imported.
    """
    points = list(_points(device_type))
    functions = {key: _function(key) for key in OVERRIDABLE}
    chosen = {key: _load(key, point, functions[key]) for key, point in points}
    for key, function in functions.items():
        function.chosen = chosen.get(key, function.original)
    return [Override(key, point.value, _package(point)) for key, point in points]


def _points(device_type: str) -> Iterator[tuple[str, EntryPoint]]:
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        device, _, key = point.name.partition(".")
        if key not in OVERRIDABLE:
            raise ConfigError(
                f"plug-in {_said(point)}: {key or point.name} is nothing that may be overridden; a name is <device "
                f"type>.<key> with a key of {', '.join(OVERRIDABLE)}"
            )
        if device != device_type:
            continue
        if key in found:
            raise ConfigError(f"two plug-ins for {point.name}: {_said(found[key])} and {_said(point)}; remove one")
        found[key] = point
    yield from found.items()


def _function(key: str) -> Overridable[..., Any]:
    """By name: it lies in a higher layer, which this one must not import before somebody calls `install_overrides`."""
    module, _, name = key.rpartition(".")
    return getattr(import_module(module), name)


def _load(key: str, point: EntryPoint, function: Overridable[..., Any]) -> Callable[..., Any]:
    try:
        theirs = point.load()
        found = list(inspect.signature(theirs).parameters)
    except Exception as error:  # code of others: whatever it raises, the original must not run instead
        raise ConfigError(f"plug-in {_said(point)} cannot be loaded: {describe(error)}; mend or remove it") from error
    wanted = list(inspect.signature(function.original).parameters)
    if found != wanted:
        raise ConfigError(f"plug-in {_said(point)} takes ({', '.join(found)}), but {key} takes ({', '.join(wanted)})")
    return theirs


def _said(point: EntryPoint) -> str:
    return f"{point.name} = {point.value} of {_package(point)}"


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "a package without a name"
