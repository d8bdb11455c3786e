"""One row that contains each shared prefix once: C <= T tokens are computed."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fsdptrain.errors import NumericsError
from fsdptrain.features.prefix_sharing.attention import shared_prefix_attention
from fsdptrain.model.attention.attention import OURS, Boundaries
from fsdptrain.model.rows import Layout, WholePack
from fsdptrain.types import PackedBatch, SharedPrefixes


@dataclass(frozen=True)
class SharedPrefixRows(WholePack):
    """The row of a pack with `batch.shared`."""

    @classmethod
    def of(cls, batch: PackedBatch, layout: Layout, attention: str) -> "SharedPrefixRows":
        """Create the rows. Raises NumericsError if the layout or the attention does not support shared prefixes."""
        if layout != "packed" or attention not in OURS:
            raise NumericsError(f"shared prefixes need packs and the attention of fsdptrain, not {layout}, {attention}")
        return cls(batch)

    @property
    def shape(self) -> tuple[int, int]:
        return 1, self._shared.num_tokens

    def inputs(self, *, pad_token_id: int | None) -> dict[str, Any]:
        del pad_token_id
        batch, shared = self.batch, self._shared
        own = tuple(x - y for x, y in zip(batch.seqlens, shared.lengths, strict=True))
        of_keys = Boundaries(batch.seqlens, batch.cu_seqlens, padded=False)
        attention = partial(shared_prefix_attention, shared, of_keys)
        # No standard argument describes shared prefixes: a mixer that ignores `boundaries` fails the probe.
        return {
            "input_ids": batch.input_ids.index_select(0, shared.computed)[None],
            "position_ids": batch.position_ids.index_select(0, shared.computed)[None],
            "use_cache": False,
            "boundaries": Boundaries(own, shared.cu_seqlens, padded=False, attention=attention),
        }

    def scatter(self, values: Tensor, *, fill: int) -> Tensor:
        del fill
        return values.index_select(0, self._shared.computed)

    def gather(self, values: Tensor, positions: Tensor | None = None) -> Tensor:
        rows = self._shared.rows
        return values.index_select(0, rows if positions is None else rows.index_select(0, positions))

    @property
    def _shared(self) -> SharedPrefixes:
        assert self.batch.shared is not None
        return self.batch.shared
