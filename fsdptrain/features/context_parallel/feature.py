"""The context parallel feature: distribute the tokens of a pack over a group of ranks."""

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import BuildOptions, Feature
from fsdptrain.features.context_parallel.checks import check_context_parallel
from fsdptrain.features.context_parallel.config import ContextParallelConfig
from fsdptrain.features.context_parallel.rows import UlyssesRows
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.features.meta import meta_model_of
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.attention.attention import PACKAGE_ATTENTION
from fsdptrain.model.rows import Layout
from fsdptrain.types import PackedBatch


class ContextParallelFeature(Feature):
    def __init__(self, config: ContextParallelConfig, *, tensor_size: int = 1) -> None:
        """tensor_size: ranks over which tensor parallelism splits the heads too."""
        self._config = config
        self._tensor_size = tensor_size
        self._group: UlyssesGroup | None = None

    @classmethod
    def check(cls, config: Config) -> None:
        model = meta_model_of(config)
        with raise_on_all_ranks(ConfigError, "--context-parallel-size"):
            check_context_parallel(
                model, config.section(ContextParallelConfig), tensor_size=config.ranks_along("tensor")
            )

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "ContextParallelFeature":
        del checkpoint
        return cls(config.section(ContextParallelConfig), tensor_size=config.ranks_along("tensor"))

    def build_options(self, options: BuildOptions) -> BuildOptions:
        return replace(options, own_attention=True)

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        assert meshes.context is not None
        with raise_on_all_ranks(ConfigError, "--context-parallel-size"):
            check_context_parallel(model, self._config, tensor_size=self._tensor_size)
        self.attach(UlyssesGroup.of(meshes.context))

    def attach(self, group: UlyssesGroup) -> None:
        """Distribute tokens over `group`."""
        self._group = group

    def allows(self, layout: Layout, attention: str) -> bool:
        return attention in PACKAGE_ATTENTION

    def rows(self, batch: PackedBatch, layout: Layout, attention: str) -> UlyssesRows | None:
        """Return this rank's rows. Stock attention, the reference of the probes, gets whole rows on every rank."""
        assert self._group is not None
        return UlyssesRows(batch, layout, self._group) if attention in PACKAGE_ATTENTION else None
