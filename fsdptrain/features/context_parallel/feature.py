"""The context parallel feature: distribute the tokens of a pack over a group of ranks."""

from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, NumericsError
from fsdptrain.feature import Feature
from fsdptrain.features.context_parallel.rows import UlyssesRows
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.attention.attention import PACKAGE_ATTENTION
from fsdptrain.model.loading.meta import model_config
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.model.rows import Layout
from fsdptrain.model.structure import stock_class
from fsdptrain.types import PackedBatch

# Layers that mix tokens by attention over the whole sequence or a window, or not at all.
_SPLIT_KINDS = {"full_attention", "sliding_attention", "attention", "moe", "mlp"}


class ContextParallelFeature(Feature):
    def __init__(self, group: UlyssesGroup | None = None) -> None:
        """group: the ranks to distribute tokens over; None: those of the meshes."""
        self._group = group

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "ContextParallelFeature":
        check_model(model_config(checkpoint, trust_remote_code=config.model.trust_remote_code), config)
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


def check_model(model: PreTrainedConfig, config: Config) -> None:
    """Raise ConfigError for layers that may be exact in the short sequences of the probe and not in long ones.

    Also if the heads are not divisible, which would otherwise be known after the weights are loaded.
    """
    text, ranks = model.get_text_config(), config.ranks_along("context") * config.ranks_along("tensor")
    if kinds := sorted(set(getattr(text, "layer_types", None) or ()) - _SPLIT_KINDS):
        raise ConfigError(f"--context-parallel-size: layers of {', '.join(kinds)} need whole sequences: leave it out")
    if (heads := getattr(text, "num_attention_heads", None) or ranks) % ranks:
        raise ConfigError(
            f"--context-parallel-size, times --tensor-parallel-size, is {ranks} and must divide the {heads} attention "
            "heads: choose a divisor"
        )


def _is_split(layout: Layout, attention: str) -> bool:
    return layout == "packed" and attention in PACKAGE_ATTENTION
