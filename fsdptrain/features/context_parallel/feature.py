"""The context parallel feature: distribute the tokens of a pack over a group of ranks."""

from pathlib import Path

from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError, NumericsError
from fsdptrain.feature import Feature
from fsdptrain.features.context_parallel.checks import check_context_parallel
from fsdptrain.features.context_parallel.rows import UlyssesRows
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.features.meta import meta_model_of
from fsdptrain.features.sections import ContextParallelConfig
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.attention.attention import PACKAGE_ATTENTION
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.model.rows import Layout
from fsdptrain.model.structure import stock_class
from fsdptrain.types import PackedBatch


class ContextParallelFeature(Feature):
    def __init__(self, group: UlyssesGroup | None = None) -> None:
        """group: the ranks to distribute tokens over; None: those of the meshes."""
        self._group = group

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "ContextParallelFeature":
        model = meta_model_of(checkpoint, config)
        with raise_on_all_ranks(ConfigError, "--context-parallel-size"):
            section, tensor_size = config.section(ContextParallelConfig), config.ranks_along("tensor")
            check_context_parallel(model, section, tensor_size=tensor_size)
        return cls()

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        assert meshes.context is not None
        self._group = UlyssesGroup.of(meshes.context)

    def verify(self, model: PreTrainedModel, probe: LayoutProbe, vocab_size: int) -> None:
        """Refuse what every rank computes whole: stock attention, and padded rows."""
        if not _is_split(probe.layout, probe.attention):
            raise NumericsError(
                f"--context-parallel-size: {stock_class(model).__name__} is not computed exactly over multiple "
                f"processes: {probe.reason}; leave it out"
            )

    def rows(self, batch: PackedBatch, layout: Layout, attention: str) -> UlyssesRows | None:
        """Return this rank's rows. Stock attention, the reference of the probes, gets whole rows on every rank."""
        assert self._group is not None
        return UlyssesRows(batch, self._group) if _is_split(layout, attention) else None


def _is_split(layout: Layout, attention: str) -> bool:
    return layout == "packed" and attention in PACKAGE_ATTENTION
