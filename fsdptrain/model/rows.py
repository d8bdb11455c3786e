"""Arrange a pack as the rows of one call of a transformers model, and map results back to the pack.

Two layouts hold the same tokens. `packed`: one row of T tokens, with boundaries between segments. `padded`: N rows of S
tokens, where S is the longest segment; padding is on the right, so a causal model never sees it and needs no mask.
Features may arrange rows differently (`Feature.rows`): tokens split over ranks, or shared prefixes stored once.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptrain.model.attention.attention import PACKAGE_ATTENTION, Boundaries, attention_kwargs
from fsdptrain.types import PackedBatch

Layout = Literal["packed", "padded"]


def core_rows(batch: PackedBatch, layout: Layout, attention: str) -> "PackedRows | PaddedRows":
    """Return the default rows of a pack. attention: that of the model."""
    return PackedRows(batch) if layout == "packed" else PaddedRows(batch, attention=attention)


@dataclass(frozen=True)
class _WholeRows:
    """Rows of which this rank computes all tokens."""

    batch: PackedBatch
    multiple: int = 1  # of the number of columns

    @property
    def tokens(self) -> Tensor:
        return torch.arange(self.batch.num_tokens, device=self.batch.input_ids.device)

    @property
    def loss_positions(self) -> Tensor:
        return self.batch.loss_positions

    def to_pack(self, values: Tensor, positions: Tensor) -> Tensor:
        return zeros_with(values, positions, self.batch.num_tokens)

    def _width(self, longest: int) -> int:
        return longest + -longest % self.multiple


@dataclass(frozen=True)
class PackedRows(_WholeRows):
    """One row of T tokens. Padding is one more segment."""

    @property
    def shape(self) -> tuple[int, int]:
        return 1, self._width(self.batch.num_tokens)

    def inputs(self, *, pad_token_id: int | None) -> dict[str, Any]:
        batch, more = self.batch, self.shape[1] - self.batch.num_tokens
        ids, positions, seqlens, ends = batch.input_ids, batch.position_ids, batch.seqlens, batch.cu_seqlens
        if more:
            ids = F.pad(ids, (0, more), value=padding_token(pad_token_id))
            positions = torch.cat([positions, torch.arange(more, device=positions.device)])
            seqlens, ends = (*seqlens, more), F.pad(ends, (0, 1), value=self.shape[1])
        tokens = {"input_ids": ids[None], "position_ids": positions[None]}
        return {**tokens, "use_cache": False, **attention_kwargs(seqlens, ends)}

    def scatter(self, values: Tensor, *, fill: int) -> Tensor:
        more = self.shape[1] - len(values)
        return torch.cat([values, values.new_full((more, *values.shape[1:]), fill)]) if more else values

    def gather(self, values: Tensor, positions: Tensor | None = None) -> Tensor:
        return values if positions is None else values.index_select(0, positions)


@dataclass(frozen=True)
class PaddedRows(_WholeRows):
    """N rows of S tokens, one segment each."""

    attention: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.batch.seqlens), self._width(self.batch.max_seqlen)

    def inputs(self, *, pad_token_id: int | None) -> dict[str, Any]:
        ids = self.scatter(self.batch.input_ids, fill=padding_token(pad_token_id)).view(self.shape)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self.attention in PACKAGE_ATTENTION:
            inputs["boundaries"] = Boundaries(self.batch.seqlens, self.batch.cu_seqlens, padded=True)
        return inputs

    def scatter(self, values: Tensor, *, fill: int) -> Tensor:
        num_rows, width = self.shape
        rows = values.new_full((num_rows * width, *values.shape[1:]), fill)
        return rows.index_copy(0, self.places(self.tokens), values)

    def gather(self, values: Tensor, positions: Tensor | None = None) -> Tensor:
        return values.index_select(0, self.places(self.tokens if positions is None else positions))

    def places(self, positions: Tensor) -> Tensor:
        """Indices in the flattened rows."""
        row = torch.searchsorted(self.batch.cu_seqlens[1:], positions.to(torch.int32), right=True)
        return row * self.shape[1] + positions - self.batch.cu_seqlens[row]


def zeros_with(values: Tensor, positions: Tensor, length: int) -> Tensor:
    """Map [m, ...] to [length, ...] with `values` at `positions`, zero elsewhere."""
    zeros = torch.zeros(length, *values.shape[1:], dtype=values.dtype, device=values.device)
    return zeros.index_copy(0, positions, values)


def padding_token(pad_token_id: int | None) -> int:
    """Return a token for padding. transformers warns about the model's pad token, so this is another one."""
    return int(pad_token_id == 0)
