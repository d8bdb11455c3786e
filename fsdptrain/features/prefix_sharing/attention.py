"""Attention of segments that share a prefix: queries of own tokens over keys of the prefix and of own tokens.

A pack becomes one row that contains each shared prefix once: C <= T tokens are computed. Keys and values are copied to
each segment for attention only.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fsdptrain.data.packing.prefixes import SharedPrefixes
from fsdptrain.model.attention.attention import (
    AttentionOptions,
    Boundaries,
    attention_by_segment,
    segment_spans,
    takes_flash,
)
from fsdptrain.model.attention.varlen import varlen_attention
from fsdptrain.model.rows import PackedRows


def shared_prefix_attention(
    shared: SharedPrefixes,
    of_keys: Boundaries,
    query: Tensor,  # [1, H, C, D]
    key: Tensor,  # [1, HK, C, D]
    value: Tensor,  # [1, HK, C, DV]
    boundaries: Boundaries,
    options: AttentionOptions,
) -> Tensor:  # [1, C, H, DV]
    """Compute attention of segments whose shared prefixes are computed once.

    of_keys: boundaries of the whole segments.
    """
    spans = segment_spans(query, boundaries)
    key, value = (x.index_select(2, shared.rows) for x in (key, value))
    if takes_flash(query, value, options):
        return varlen_attention(query, key, value, boundaries, options.scale, options.window, of_keys)
    return attention_by_segment(query, key, value, spans, list(of_keys.seqlens), options)


@dataclass(frozen=True)
class SharedPrefixRows(PackedRows):
    """The row of a pack with `batch.shared`."""

    @property
    def shape(self) -> tuple[int, int]:
        return 1, self._shared.num_tokens

    def inputs(self, *, pad_token_id: int | None) -> dict[str, Any]:
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
        return values.index_select(0, self._shared.computed)

    def gather(self, values: Tensor, positions: Tensor | None = None) -> Tensor:
        rows = self._shared.rows
        return values.index_select(0, rows if positions is None else rows.index_select(0, positions))

    @property
    def _shared(self) -> SharedPrefixes:
        assert self.batch.shared is not None
        return self.batch.shared
