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
    flat = tensor.detach().contiguous().view(-1)
    size = _ROW * _ROWS_AT_ONCE.get(flat.device.type, _MANY_ROWS)  # words
    if kind == "multiset":
        sums = [_hashed(_hashed((part + 0.0).view(torch.int32).long())).sum()[None] for part in flat.split(size)]
    else:
        sums = _sums_by_row(flat, size)
    together = torch.cat(sums) if len(sums) > 1 else sums[0]
    return StartedChecksum(together, tensor.numel(), is_ordered=kind != "multiset")


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


def _hashed(words: Tensor) -> Tensor:
    """A hash of each element; zero stays zero."""
    mixed = words * _ODD
    return mixed ^ (mixed >> 29)


def _sums_by_row(flat: Tensor, size: int) -> list[Tensor]:
    """Sums of the hashes of the words of each row, from memory for `size` words. [rows]

    Words are the bytes of `flat` in order, with positive zeros, padded with zeros.
    """
    memory = torch.empty(2, min(size, -(-flat.nbytes // _WORD)), dtype=torch.int64, device=flat.device)
    sums = []
    for part in flat.split(size * _WORD // flat.itemsize):
        words, scratch = memory[:, : -(-part.nbytes // _WORD)]
        words[-1:].zero_()
        copy = words.view(torch.uint8)[: part.nbytes].view(part.dtype)
        if part.is_floating_point():
            torch.add(part, 0.0, out=copy)
        else:
            copy.copy_(part)
        whole = len(words) // _ROW * _ROW
        if whole:
            sums.append(_hashed_by_position(words[:whole].view(-1, _ROW), scratch[:whole].view(-1, _ROW)).sum(-1))
        if len(words) > whole or not whole:
            sums.append(_hashed_by_position(words[whole:][None], scratch[whole:][None]).sum(-1))
    return sums


def _hashed_by_position(words: Tensor, scratch: Tensor) -> Tensor:
    """[rows, words], in place: each word times the factor of its position. Shifts move differences in high bits to low
    bits.

    The first one is added: with exclusive or, a word and its complement would be equal, as the shift copies the sign.
    """
    torch.bitwise_right_shift(words, 32, out=scratch)
    words.add_(scratch).mul_(_factors(words.device)[: words.shape[-1]])
    torch.bitwise_right_shift(words, 29, out=scratch)
    return words.bitwise_xor_(scratch)


@lru_cache
def _factors(device: torch.device) -> Tensor:
    """[_ROW] i64, random and odd."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator) | 1).to(device)
