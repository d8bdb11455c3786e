"""How a tensor of megatron-core is made of tensors of the files, and taken apart again: pure moves of numbers.

Each conversion reads only the slices that one tensor-parallel rank owns, and joins the parts of all ranks. Since no
number is changed, both ways together are bitwise exact, for weights as for anything of their shape (Adam's moments).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# From the name of a tensor of the files to something that can be sliced: a tensor, or what safetensors reads lazily.
Source = Callable[[str], Any]


class Conversion(Protocol):
    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        """The part of tensor-parallel rank `rank` of `size`."""
        ...

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """From the parts of all tensor-parallel ranks to the whole tensors of the files."""
        ...


@dataclass(frozen=True)
class Copy:
    """One tensor, the same on each rank."""

    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        return source(names[0])[:]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0]]


@dataclass(frozen=True)
class Columns:
    """[D, F], each rank has its columns: the second matrix of a pair."""

    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        whole = source(names[0])
        width = _shape(whole)[1] // size
        return whole[:, rank * width : (rank + 1) * width]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(parts), 1)]


@dataclass(frozen=True)
class Stacked:
    """Tensors [F, D] one above the other, such as gate and up: each rank has its rows of each of them."""

    count: int

    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        return torch.cat([_rows(source(name), rank, size) for name in names])

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        chunks = [part.chunk(self.count) for part in parts]
        return [torch.cat([chunk[i] for chunk in chunks]) for i in range(self.count)]


@dataclass(frozen=True)
class QKV:
    """Queries, keys and values by groups: of each key-value head first its queries, then its key, then its value."""

    num_groups: int  # key-value heads, of all ranks
    head_dim: int

    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        parts = [_rows(source(name), rank, size) for name in names]
        groups = self.num_groups // size
        return torch.cat([p.reshape(groups, -1, *p.shape[1:]) for p in parts], 1).flatten(0, 1)

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        whole = torch.cat(list(parts))
        groups = whole.view(self.num_groups, -1, *whole.shape[1:])
        queries = groups.shape[1] - 2 * self.head_dim
        return [p.flatten(0, 1) for p in groups.split([queries, self.head_dim, self.head_dim], 1)]


@dataclass(frozen=True)
class Vocabulary:
    """[V, D] with zeros below, so that each rank has as many rows."""

    size: int  # V
    padded: int

    def read(self, source: Source, names: Sequence[str], rank: int, size: int) -> Tensor:
        height = self.padded // size
        start = rank * height
        found = source(names[0])[min(start, self.size) : min(start + height, self.size)]
        return F.pad(found, (0, 0, 0, height - len(found)))

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(parts))[: self.size]]


def _rows(whole: Any, rank: int, size: int) -> Tensor:
    height = _shape(whole)[0] // size
    return whole[rank * height : (rank + 1) * height]


def _shape(whole: Any) -> Sequence[int]:
    return whole.shape if isinstance(whole, Tensor) else whole.get_shape()
