"""The table of features. A feature's modules are imported only if the configuration enables it.

The order is that of the hooks: adapters wrap stock modules, ranks split the wrapped modules, then layers are compiled
and recomputed, their routers wrapped and their activations offloaded.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdptrain.config import Config

if TYPE_CHECKING:
    from fsdptrain.feature import Feature


@dataclass(frozen=True)
class Entry:
    """A feature, its class and the condition that enables it."""

    target: str  # folder:class
    enabled: Callable[[Config], bool]

    def check(self, config: Config) -> None:
        self._class().check(config)

    def create(self, config: Config, checkpoint: Path) -> "Feature":
        return self._class().create(config, checkpoint)

    def _class(self) -> "type[Feature]":
        folder, _, name = self.target.partition(":")
        module = importlib.import_module(f"fsdptrain.features.{folder}.feature")
        return getattr(module, name)


def _shares_prefixes(config: Config) -> bool:
    from fsdptrain.features.prefix_sharing.checks import configured_obstacle

    return not configured_obstacle(config)


def _uses_router(config: Config) -> bool:
    router = config.router
    return router.replay != "off" or router.aux_loss_coef != 0 or router.bias_update_rate > 0


FEATURES = (
    Entry("lora:LoraFeature", lambda config: config.lora.rank > 0),
    Entry("context_parallel:ContextParallelFeature", lambda config: config.parallel.context_parallel_size > 1),
    Entry("model_parallel:ModelParallelFeature", lambda config: config.parallel.splits),
    Entry("compile:CompileFeature", lambda config: config.model.compile),
    Entry("activation_memory:CheckpointingFeature", lambda config: config.model.gradient_checkpointing),
    Entry("moe:MoEFeature", _uses_router),
    Entry("activation_memory:OffloadFeature", lambda config: config.model.offload_activations),
    Entry("vision:VisionFeature", lambda config: config.data.image_key is not None),
    Entry("prefix_sharing:PrefixSharingFeature", _shares_prefixes),
)
