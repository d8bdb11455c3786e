"""The prefix sharing feature: compute the prompt of a group once for all its samples in a pack."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.data.packing.pack import PackPlan
from fsdptrain.data.packing.prefixes import share_prefixes
from fsdptrain.feature import Feature, Packer
from fsdptrain.features.prefix_sharing.attention import SharedPrefixRows
from fsdptrain.features.prefix_sharing.config import PrefixSharingConfig
from fsdptrain.features.prefix_sharing.plan import plan_shared
from fsdptrain.features.prefix_sharing.probe import (
    PrefixProbe,
    probe_prefixes,
    require_prefixes,
    structural_obstacle,
)
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.probes.layout import LayoutProbe, probe_segments
from fsdptrain.model.rows import Layout
from fsdptrain.types import PackedBatch, Sample

log = logging.getLogger(__name__)


class PrefixSharingFeature(Feature):
    def __init__(self, *, required: bool = False) -> None:
        """required: raise ConfigError if the model does not support it, and share all equal prompts."""
        self._required = required
        self.probe: PrefixProbe | None = None

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "PrefixSharingFeature":
        del checkpoint
        return cls(required=config.section(PrefixSharingConfig).prefix_sharing == "on")

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        del meshes
        if self._required:
            require_prefixes(structural_obstacle(model))

    def verify(self, model: PreTrainedModel, probe: LayoutProbe, vocab_size: int) -> None:
        self.probe = probe_prefixes(
            model,
            probe_segments(model, vocab_size),
            layout=probe.layout,
            attention=probe.attention,
            tolerance=probe.tolerance,
        )
        if self._required:
            require_prefixes(self.probe.reason)
        log.info("%s", self.probe.line)

    @property
    def packer(self) -> Packer | None:
        return self if self.probe is not None and self.probe.shares else None

    def plan(
        self, lengths: Sequence[int], prompts: Sequence[tuple[int, int]], *, num_ranks: int, max_tokens: int
    ) -> PackPlan | None:
        return plan_shared(lengths, prompts, num_ranks=num_ranks, max_tokens=max_tokens, always=self._required)

    def finish(self, batch: PackedBatch, samples: Sequence[Sample], plan: PackPlan) -> PackedBatch:
        return replace(batch, shared=share_prefixes(samples)) if plan.shared > 0 else batch

    def rows(self, batch: PackedBatch, layout: Layout, attention: str) -> SharedPrefixRows | None:
        return None if batch.shared is None else SharedPrefixRows.of(batch, layout, attention)
