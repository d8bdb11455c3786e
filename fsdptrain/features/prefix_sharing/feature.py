"""The prefix sharing feature: compute the prompt of a group once for all its samples in a pack."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from fsdptrain.data.packing.pack import PackPlan
from fsdptrain.data.packing.prefixes import share_prefixes
from fsdptrain.errors import NumericsError
from fsdptrain.feature import Feature
from fsdptrain.features.prefix_sharing.attention import SharedPrefixRows
from fsdptrain.features.prefix_sharing.plan import plan_shared
from fsdptrain.features.prefix_sharing.probe import probe_prefixes, require_structure
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.attention.attention import PACKAGE_ATTENTION
from fsdptrain.model.probes.layout import LayoutProbe, probe_segments
from fsdptrain.model.rows import Layout
from fsdptrain.types import PackedBatch

log = logging.getLogger(__name__)


class PrefixSharingFeature(Feature):
    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        require_structure(model)

    def verify(self, model: PreTrainedModel, probe: LayoutProbe, vocab_size: int) -> None:
        difference = probe_prefixes(model, probe_segments(model, vocab_size), probe)
        log.info("prompts of a group: computed once (probe: %.2g <= %g)", difference, probe.tolerance)

    def plan_packs(
        self, lengths: Sequence[int], prompts: Sequence[tuple[int, int]], *, num_ranks: int, max_tokens: int
    ) -> PackPlan:
        plan = plan_shared(lengths, prompts, num_ranks=num_ranks, max_tokens=max_tokens)
        if plan.shared == 0:
            return plan
        return replace(plan, finish=lambda batch, samples: replace(batch, shared=share_prefixes(samples)))

    def rows(self, batch: PackedBatch, layout: Layout, attention: str) -> SharedPrefixRows | None:
        if batch.shared is None:
            return None
        if layout != "packed" or attention not in PACKAGE_ATTENTION:
            raise NumericsError(f"shared prefixes need packs and the attention of fsdptrain, not {layout}, {attention}")
        return SharedPrefixRows(batch)
