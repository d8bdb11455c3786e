"""The features of a run: `load_features` creates those that are enabled, `Features` combines their hooks.

`feature.py` has the hooks, and the table in `fsdptrain/features/__init__.py` the order.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fsdptrain import registry
from fsdptrain.config import Config
from fsdptrain.config.checks import check_packages
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError

if TYPE_CHECKING:
    from fsdptrain.data.images import PromptProcessor
    from fsdptrain.feature import Adapter, ChangeWeight, Feature

T = TypeVar("T")


def load_features(config: Config, checkpoint: Path) -> "Features":
    """Create the features that `config` turns on. Collective. Raises ConfigError if a package is missing."""
    with raise_on_all_ranks(ConfigError, "packages"):
        check_packages(config, config.optional)
    return Features([entry.create(config, checkpoint) for entry in _enabled(config)])


def _enabled(config: Config) -> list[Any]:
    """The entries of the table, in its order, then plug-ins.

    A plug-in is an entry point `features.<name>` of the group `fsdptrain.plugins`: a subclass of `Feature` with a
    classmethod `enabled(config) -> bool`.
    """
    optional = importlib.util.find_spec("fsdptrain.features") is not None  # else the core is installed alone
    table = importlib.import_module("fsdptrain.features").FEATURES if optional else ()
    return [entry for entry in (*table, *registry.load_plugins("features")) if entry.enabled(config)]


class Features(tuple["Feature", ...]):
    """The features of a run, in order. The first four methods combine what a hook of all features returns."""

    __slots__ = ()

    def first(self, hook: "Callable[[Feature], T | None]") -> T | None:
        """Return the first result that is not None."""
        return next((result for result in map(hook, self) if result is not None), None)

    def merged(self, hook: "Callable[[Feature], Mapping[str, T]]") -> dict[str, T]:
        return {name: value for mapping in map(hook, self) for name, value in mapping.items()}

    def chained(self, hook: "Callable[[Feature, T], T]", value: T) -> T:
        """Let each feature change the result of the one before, the first one `value`."""
        return reduce(lambda result, feature: hook(feature, result), self, value)

    @contextmanager
    def entered(self, hook: "Callable[[Feature], AbstractContextManager[None]]") -> Iterator[None]:
        with ExitStack() as stack:
            for context in map(hook, self):
                stack.enter_context(context)
            yield

    def without(self) -> AbstractContextManager[None]:
        return self.entered(lambda feature: feature.without())

    def export_weight(self, name: str) -> "ChangeWeight | None":
        changes = [change for change in (feature.export_weight(name) for feature in self) if change is not None]
        if not changes:
            return None
        return lambda tensor: reduce(lambda x, change: change(x), changes, tensor)  # dequantized, then merged

    @property
    def prompt_processor(self) -> "PromptProcessor | None":
        return self.first(lambda feature: feature.prompt_processor)

    @property
    def adapter(self) -> "Adapter | None":
        return self.first(lambda feature: feature.adapter)


NO_FEATURES = Features()
