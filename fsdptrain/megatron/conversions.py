"""Convert tensors of the files to tensors of megatron-core and back. Conversions only rearrange values.

`read` returns the part of tensor-parallel rank `rank` of `size` and reads only its slices. `join` returns the full
tensors of the files from the parts of all these ranks. The round trip is bitwise exact, for weights and for tensors of
the same shape (Adam's moments).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from fsdptrain.model.loading.shard_reader import conversions_of

# Maps the name of a tensor in the files to a sliceable object: a tensor, or a lazy safetensors slice.
Source = Callable[[str], Any]


@dataclass(frozen=True)
class Copy:
    """One tensor, replicated on all ranks."""

    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        return source(names[0])[...]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0]]


@dataclass(frozen=True)
class Columns:
    """[D, F], sharded by columns: the second matrix of a pair."""

    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        whole = source(names[0])
        width = _shape(whole)[1] // size
        return whole[:, rank * width : (rank + 1) * width]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(parts), 1)]


@dataclass(frozen=True)
class Interleaved:
    """Tensors [F, ...] stacked along the rows in groups, and sharded by groups: gate and up, or query, key and value.

    Each group has `weights[i]` parts of tensor i. num_groups: over all ranks; None: one group on each rank. gated: the
    heads of the first tensor in a group, each a query and its gate, of which all queries come first; 1: no gates.
    """

    weights: tuple[int, ...]
    num_groups: int | None = None
    gated: int = 1

    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        parts = [_rows(source(name), rank, size) for name in names]
        groups = (self.num_groups or size) // size
        first, *others = (p.reshape(groups, -1, *p.shape[1:]) for p in parts)
        return torch.cat([_transposed(first, self.gated, 2), *others], 1).flatten(0, 1)

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        whole = torch.cat(list(parts))
        groups = whole.view(self.num_groups or len(parts), -1, *whole.shape[1:])
        unit = groups.shape[1] // sum(self.weights)
        first, *others = groups.split([unit * weight for weight in self.weights], 1)
        return [p.flatten(0, 1) for p in (_transposed(first, 2, self.gated), *others)]


@dataclass(frozen=True)
class Vocabulary:
    """[V, D], zero-padded to the same number of rows on each rank."""

    size: int  # V
    padded: int

    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        height = self.padded // size
        start = rank * height
        found = source(names[0])[min(start, self.size) : min(start + height, self.size)]
        return F.pad(found, (0, 0, 0, height - len(found)))

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(parts))[: self.size]]


@dataclass(frozen=True)
class Stored:
    """One tensor of a module of `model`, possibly on meta, that files store otherwise, such as single experts."""

    model: PreTrainedModel
    name: str

    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        """Convert as transformers' reader does."""
        mapping = conversions_of(self.model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        made: Any = {}
        for part in names:
            _, pattern = rename_source_key(part, renamings, converters)
            made = next(entry for entry in converters if pattern in entry.source_patterns)
            made.add_tensor(self.name, part, pattern, source(part)[:])
        joined = made.convert(self.name, model=self.model, config=self.model.config)[self.name]
        return joined[0] if isinstance(joined, list) else joined

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(revert_weight_conversion(self.model, {self.name: parts[0]}).values())


@dataclass(frozen=True)
class Bridged:
    """One tensor, converted and sharded by a bridge of mbridge."""

    bridge: Any  # of the model
    name: str  # in Transformer Engine layers
    own: Tensor  # of this rank: shape and attributes tell mbridge how the tensor is sharded

    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        """Read full tensors, unlike the others."""
        whole = self.bridge._weight_to_mcore_format(self.name, [source(name)[...] for name in names])
        return self.bridge._weight_split_across_tp(self.name, whole, self.own, size)[rank]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        whole = parts[0]
        if getattr(self.own, "tensor_model_parallel", False):
            whole = self.bridge._weight_merge_across_tp(self.name, list(parts), self.own)
        return self.bridge._weight_to_hf_format(self.name, whole)[1]


Conversion = Copy | Columns | Interleaved | Vocabulary | Stored | Bridged


def _transposed(x: Tensor, rows: int, columns: int) -> Tensor:
    """Reorder the parts of each group, [G, rows * columns * N, ...], from row by row to column by column."""
    if min(rows, columns) == 1:
        return x
    return x.unflatten(1, (rows, columns, -1)).transpose(1, 2).flatten(1, 3)


def _rows(whole: Any, rank: int, size: int) -> Tensor:
    height = _shape(whole)[0] // size
    return whole[rank * height : (rank + 1) * height]


def _shape(whole: Any) -> Sequence[int]:
    return whole.shape if isinstance(whole, Tensor) else whole.get_shape()
