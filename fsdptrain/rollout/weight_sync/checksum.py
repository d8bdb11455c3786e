"""64-bit checksums of tensors, the same on every device.

vLLM's workers import this module in their own environment: it needs only torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fsdptrain.types import ChecksumKind

_K = TypeVar("_K")
_WORD = 8  # bytes
_ROW = 1 << 15  # words; one block fits a CPU's cache
_ROWS_AT_ONCE = {"cpu": 1}  # other devices: few and large kernels
_MANY_ROWS = 128  # 32 MiB
_ODD = -7046029254386353131  # 2^64 / golden ratio, as int64
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class StartedChecksum:
    """A checksum that its device computes; the host has not waited for it."""

    sums: Tensor  # [rows] i64
    numel: int
    is_ordered: bool


@torch.no_grad()
def start_checksum(tensor: Tensor, kind: "ChecksumKind" = "bits") -> StartedChecksum:
    """Start a checksum: 64 bits that depend on every element and its position. Zeros of both signs are equal.

    The tensor may be overwritten afterwards on the same stream.

    kind: "bits"; "values", the same for all dtypes up to float32 that hold the same numbers; "multiset", like "values"
    and independent of order and of additional zeros.
    """
    if kind != "bits":
        tensor = tensor.float()
    if tensor.is_floating_point():
        tensor = tensor + 0.0
    if kind == "multiset":
        return StartedChecksum(_unordered(tensor), tensor.numel(), is_ordered=False)
    words = _words(tensor)
    whole = len(words) // _ROW * _ROW
    blocks = words[:whole].view(-1, _ROW).split(_ROWS_AT_ONCE.get(words.device.type, _MANY_ROWS))
    sums = [_hashed_by_position(block).sum(-1) for block in [*blocks, words[whole:][None]]]
    return StartedChecksum(torch.cat(sums), tensor.numel(), is_ordered=True)


def finish_checksums(started: Mapping[_K, StartedChecksum]) -> dict[_K, int]:
    """Return the checksums, after one wait for each device."""
    by_device: dict[torch.device, list[_K]] = {}
    for key, one in started.items():
        by_device.setdefault(one.sums.device, []).append(key)
    found = {}
    for keys in by_device.values():
        sums = iter(torch.cat([started[key].sums for key in keys]).tolist())
        for key in keys:
            one = started[key]
            found[key] = _total(list(islice(sums, len(one.sums))), one)
    return {key: found[key] for key in started}


def _total(sums: Sequence[int], started: StartedChecksum) -> int:
    if not started.is_ordered:
        return sum(sums) & _MASK
    total = started.numel
    for row in sums:
        total = (total * (_ODD & _MASK) + row) & _MASK
    return total


def _unordered(values: Tensor) -> Tensor:
    """Sums of the hashes of the elements, [blocks]. `values` is float32."""
    size = _ROW * _ROWS_AT_ONCE.get(values.device.type, _MANY_ROWS)
    parts = values.detach().reshape(-1).view(torch.int32).split(size)
    return torch.stack([_hashed(_hashed(part.long())).sum() for part in parts])


def _hashed(words: Tensor) -> Tensor:
    """A hash of each element; zero stays zero."""
    mixed = words * _ODD
    return mixed ^ (mixed >> 29)


def _words(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` in order, padded with zeros to whole words. [words] i64"""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % _WORD or flat.storage_offset() % _WORD:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % _WORD)).clone()
    return flat.view(torch.int64)


def _hashed_by_position(words: Tensor) -> Tensor:
    """[rows, words]: each word times the factor of its position. Shifts move differences in high bits to low bits."""
    mixed = (words >> 32).bitwise_xor_(words).mul_(_factors(words.device)[: words.shape[-1]])
    return mixed.bitwise_xor_(mixed >> 29).mul_(_ODD)


@lru_cache
def _factors(device: torch.device) -> Tensor:
    """[_ROW] i64, random and odd."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator) | 1).to(device)
