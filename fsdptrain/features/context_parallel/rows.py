"""The tokens of a pack, distributed round-robin over the ranks of a context-parallel group.

Rank r of N has tokens r, r + N, r + 2N, ... of the row, which is padded to a multiple of N tokens.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdptrain.features.context_parallel.ulysses import UlyssesGroup, ulysses_attention
from fsdptrain.model.rows import PackedRows, zeros_with
from fsdptrain.types import PackedBatch


@dataclass(frozen=True)
class UlyssesRows:
    """This rank's columns of the row of a pack."""

    batch: PackedBatch
    group: UlyssesGroup

    @property
    def shape(self) -> tuple[int, int]:
        return 1, self._whole.shape[1] // self.group.size

    @property
    def tokens(self) -> Tensor:
        every = torch.arange(self.batch.num_tokens, device=self.batch.input_ids.device)
        return every[self.group.rank :: self.group.size]

    @property
    def loss_positions(self) -> Tensor:
        return self._loss_positions

    @cached_property
    def _loss_positions(self) -> Tensor:
        """The loss positions on this rank, in order. They are counted on the host, without a device sync."""
        count = np.count_nonzero(self.batch.loss_places % self.group.size == self.group.rank)
        positions = self.batch.loss_positions
        own_first = (positions % self.group.size != self.group.rank).int().argsort(stable=True)
        return positions.index_select(0, own_first[:count])

    def inputs(self, *, pad_token_id: int | None) -> dict[str, Any]:
        found = self._whole.inputs(pad_token_id=pad_token_id)
        found["boundaries"] = replace(found["boundaries"], attention=partial(ulysses_attention, self.group))
        return found | {name: self.group.own_columns(found[name]) for name in ("input_ids", "position_ids")}

    def scatter(self, values: Tensor, *, fill: int) -> Tensor:
        return self.group.own_columns(self._whole.scatter(values, fill=fill)[None])[0]

    def gather(self, values: Tensor, positions: Tensor | None = None) -> Tensor:
        return values.index_select(0, (self.tokens if positions is None else positions) // self.group.size)

    def to_pack(self, values: Tensor, positions: Tensor) -> Tensor:
        return self.group.total(zeros_with(values, positions, self.batch.num_tokens))

    @property
    def _whole(self) -> PackedRows:
        """The row of all ranks."""
        return PackedRows(self.batch, multiple=self.group.size)
