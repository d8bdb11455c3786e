"""The columns of a pack's rows, distributed round-robin over the ranks of a context-parallel group.

Rank r of N has columns r, r + N, r + 2N, ... of the rows, which are padded to a multiple of N columns.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdptrain.features.context_parallel.ulysses import UlyssesGroup, ulysses_attention
from fsdptrain.model.attention.attention import SEGMENTS
from fsdptrain.model.rows import Layout, PackedRows, PaddedRows, core_rows, zeros_with
from fsdptrain.types import PackedBatch


@dataclass(frozen=True)
class UlyssesRows:
    """This rank's columns of the rows of a pack."""

    batch: PackedBatch
    layout: Layout
    group: UlyssesGroup

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self._whole.shape
        return rows, width // self.group.size

    @property
    def tokens(self) -> Tensor:
        return self._tokens

    @property
    def loss_positions(self) -> Tensor:
        return self._loss_positions

    @cached_property
    def _tokens(self) -> Tensor:
        every = torch.arange(self.batch.num_tokens, device=self.batch.input_ids.device)
        return self._on_this_rank(every, np.arange(self.batch.num_tokens))

    @cached_property
    def _loss_positions(self) -> Tensor:
        return self._on_this_rank(self.batch.loss_positions, self.batch.loss_places)

    def inputs(self, *, pad_token_id: int | None) -> dict[str, Any]:
        found = self._whole.inputs(pad_token_id=pad_token_id)
        if self.layout == "padded":  # the model would number only this rank's columns
            rows, width = self._whole.shape
            columns = torch.arange(width, device=self.batch.input_ids.device).clamp(max=self.batch.max_seqlen - 1)
            found["position_ids"] = columns.expand(rows, -1)
            found["boundaries"] = replace(found["boundaries"], seqlens=(width,) * rows)
        found["boundaries"] = replace(found["boundaries"], attention=partial(ulysses_attention, self.group))
        return found | {name: self.group.own_columns(found[name]) for name in ("input_ids", "position_ids")}

    def scatter(self, values: Tensor, *, fill: int) -> Tensor:
        columns = self._whole.scatter(values, fill=fill).unflatten(0, self._whole.shape)
        return self.group.own_columns(columns).flatten(0, 1)

    def gather(self, values: Tensor, positions: Tensor | None = None) -> Tensor:
        places = self._whole.places(self.tokens if positions is None else positions)
        return values.index_select(0, places // self.group.size)  # N divides the number of columns

    def to_pack(self, values: Tensor, positions: Tensor) -> Tensor:
        return self.group.total(zeros_with(values, positions, self.batch.num_tokens))

    def total(self, value: Tensor) -> Tensor:
        return self.group.total(value)

    @property
    def _whole(self) -> PackedRows | PaddedRows:
        """The rows of all ranks."""
        return core_rows(self.batch, self.layout, SEGMENTS, multiple=self.group.size)

    def _on_this_rank(self, positions: Tensor, on_host: np.ndarray) -> Tensor:
        """Return the `positions` on this rank, in order. Counts them on the host, without a device sync."""
        if self.layout == "padded":
            ends = np.cumsum(self.batch.seqlens)
            on_host = on_host - (ends - self.batch.seqlens)[np.searchsorted(ends, on_host, side="right")]
        count = np.count_nonzero(on_host % self.group.size == self.group.rank)
        places = self._whole.places(positions)
        own_first = (places % self.group.size != self.group.rank).int().argsort(stable=True)
        return positions.index_select(0, own_first[:count])
