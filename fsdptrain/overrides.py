"""Functions that device packages may override, such as an attention kernel or the free-memory query.

A package registers an override as an entry point of the group `fsdptrain.overrides` named `<device type>.<key>`, where
the key is the full dotted name of a function in `OVERRIDABLE`:

    [project.entry-points."fsdptrain.overrides"]
    "npu.fsdptrain.model.attention.attention.varlen_attention" = "my_kernels.attention:varlen_attention"

Overrides are resolved once, when a run or an inspection is built, and are listed there. An override that cannot be
loaded and two overrides of one function are errors: the original never runs in place of an installed override.
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
    "fsdptrain.fsdp.optimizers.has_fused_adamw",
    "fsdptrain.model.attention.attention.segment_attention",
    "fsdptrain.model.attention.attention.varlen_attention",
    "fsdptrain.model.logprobs.chunked_logprobs",
    "fsdptrain.memory.flops.peak_tflops",
    "fsdptrain.platform.device_memory",
)


class Overridable(Generic[P, R]):
    """Function of `OVERRIDABLE`. Calls the original until `install_overrides` selects another."""

    def __init__(self, original: Callable[P, R]) -> None:
        update_wrapper(self, original)
        self.original = original
        self.selected = original

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.selected(*args, **kwargs)


overridable = Overridable  # decorator


@dataclass(frozen=True)
class Override:
    """Installed override of a function and the package that provides it."""

    key: str  # full dotted name of the overridden function
    value: str  # package.module:function of the override
    package: str  # name and version of the distribution

    @property
    def line(self) -> str:
        return f"{self.key}: {self.value} of {self.package}"


def install_overrides(device_type: str) -> list[Override]:
    """Install the overrides for `device_type` that installed packages provide, and return them.

    Functions without an override are reset to the originals. Overrides for other devices are not imported. Raises
    ConfigError, and changes nothing, for an unknown key, for two overrides of one key, and for an override that cannot
    be loaded or has different parameters.
    """
    points = list(_points(device_type))
    functions = {key: _function(key) for key in OVERRIDABLE}
    chosen = {key: _load(key, point, functions[key]) for key, point in points}
    for key, function in functions.items():
        function.selected = chosen.get(key, function.original)
    return [Override(key, point.value, _package(point)) for key, point in points]


def _points(device_type: str) -> Iterator[tuple[str, EntryPoint]]:
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        device, _, key = point.name.partition(".")
        if key not in OVERRIDABLE:
            raise ConfigError(
                f"plug-in {_describe(point)}: {key or point.name} cannot be overridden; a name is <device "
                f"type>.<key> with a key of {', '.join(OVERRIDABLE)}"
            )
        if device != device_type:
            continue
        if key in found:
            raise ConfigError(
                f"two plug-ins for {point.name}: {_describe(found[key])} and {_describe(point)}; remove one"
            )
        found[key] = point
    yield from found.items()


def _function(key: str) -> Overridable[..., Any]:
    """Import lazily by name: the function is in a higher layer, which this module must not import at load time."""
    module, _, name = key.rpartition(".")
    return getattr(import_module(module), name)


def _load(key: str, point: EntryPoint, function: Overridable[..., Any]) -> Callable[..., Any]:
    try:
        override = point.load()
        found = list(inspect.signature(override).parameters)
    except Exception as error:  # third-party code may raise anything; never fall back to the original
        raise ConfigError(
            f"plug-in {_describe(point)} cannot be loaded: {describe(error)}; fix or uninstall it"
        ) from error
    wanted = list(inspect.signature(function.original).parameters)
    if found != wanted:
        raise ConfigError(
            f"plug-in {_describe(point)} takes ({', '.join(found)}), but {key} takes ({', '.join(wanted)})"
        )
    return override


def _describe(point: EntryPoint) -> str:
    return f"{point.name} = {point.value} of {_package(point)}"


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "a package without a name"
