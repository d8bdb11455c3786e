"""The columns of a pack's rows, distributed round-robin over the ranks of a context-parallel group.

Rank r of N has columns r, r + N, r + 2N, ... of the rows, which are padded to a multiple of N columns.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptrain.features.context_parallel.ulysses import UlyssesGroup, ulysses_attention
from fsdptrain.model.attention.attention import Boundaries, attention_kwargs
from fsdptrain.model.rows import Layout, cells, padding_token, zeros_with
from fsdptrain.types import PackedBatch


@dataclass(frozen=True)
class UlyssesRows:
    """This rank's columns of the rows of a pack."""

    batch: PackedBatch
    layout: Layout
    group: UlyssesGroup

    @property
    def shape(self) -> tuple[int, int]:
        return self._num_rows, self._width // self.group.size

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
        fill = padding_token(pad_token_id)
        if self.layout == "packed":
            batch = self._lengthened(fill)
            tokens = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
            rest = attention_kwargs(batch)
            rest["boundaries"] = replace(rest["boundaries"], attention=self._attention)
        else:
            batch = self.batch
            columns = torch.arange(self._width, device=batch.input_ids.device).clamp(max=batch.max_seqlen - 1)
            tokens = {
                "input_ids": self._all_columns(batch.input_ids, fill).view(-1, self._width),
                "position_ids": columns.expand(self._num_rows, -1),  # the model would number only this rank's columns
            }
            seqlens = (self._width,) * self._num_rows
            rest = {"boundaries": Boundaries(seqlens, batch.cu_seqlens, padded=True, attention=self._attention)}
        return {**{name: self.group.own_columns(x) for name, x in tokens.items()}, "use_cache": False, **rest}

    def scatter(self, values: Tensor, *, fill: int) -> Tensor:
        columns = self._all_columns(values, fill).unflatten(0, (-1, self._width))
        return self.group.own_columns(columns).flatten(0, 1)

    def gather(self, values: Tensor, positions: Tensor | None = None) -> Tensor:
        row, column = self._cells(self.tokens if positions is None else positions)
        return values.index_select(0, (row * self._width + column) // self.group.size)

    def to_pack(self, values: Tensor, positions: Tensor) -> Tensor:
        return self.group.total(zeros_with(values, positions, self.batch.num_tokens))

    def total(self, value: Tensor) -> Tensor:
        return self.group.total(value)

    @property
    def _num_rows(self) -> int:
        return 1 if self.layout == "packed" else len(self.batch.seqlens)

    @property
    def _width(self) -> int:
        """Number of columns of all ranks."""
        columns = self.batch.num_tokens if self.layout == "packed" else self.batch.max_seqlen
        return columns + -columns % self.group.size

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        return ulysses_attention(self.group, *args, **kwargs)

    def _on_this_rank(self, positions: Tensor, on_host: np.ndarray) -> Tensor:
        """Return the `positions` on this rank, in order. Counts them on the host, without a device sync."""
        if self.layout == "padded":
            ends = np.cumsum(self.batch.seqlens)
            on_host = on_host - (ends - self.batch.seqlens)[np.searchsorted(ends, on_host, side="right")]
        count = np.count_nonzero(on_host % self.group.size == self.group.rank)
        _, column = self._cells(positions)
        own_first = (column % self.group.size != self.group.rank).int().argsort(stable=True)
        return positions.index_select(0, own_first[:count])

    def _lengthened(self, fill: int) -> PackedBatch:
        """Return the pack with an extra segment that fills the row to its width."""
        batch, more = self.batch, self._width - self.batch.num_tokens
        if not more:
            return batch
        return replace(
            batch,
            input_ids=F.pad(batch.input_ids, (0, more), value=fill),
            position_ids=torch.cat([batch.position_ids, torch.arange(more, device=batch.position_ids.device)]),
            cu_seqlens=F.pad(batch.cu_seqlens, (0, 1), value=self._width),
            seqlens=(*batch.seqlens, more),
        )

    def _all_columns(self, values: Tensor, fill: int) -> Tensor:
        """Arrange [T, ...] as [rows x width, ...], the columns of all ranks."""
        rows = values.new_full((self._num_rows * self._width, *values.shape[1:]), fill)
        row, column = self._cells(torch.arange(self.batch.num_tokens, device=values.device))
        return rows.index_copy(0, row * self._width + column, values)

    def _cells(self, positions: Tensor) -> tuple[Tensor | int, Tensor]:
        return (0, positions) if self.layout == "packed" else cells(self.batch, positions)
