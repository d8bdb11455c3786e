"""64-bit checksums of tensors, the same on every device.

vLLM's workers import this module in their own environment: it needs only torch.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fsdptrain.types import ChecksumKind

_WORD = 8  # bytes
_ROW = 1 << 15  # words; one block fits a CPU's cache
_ROWS_AT_ONCE = {"cpu": 1}  # other devices: few and large kernels
_MANY_ROWS = 128  # 32 MiB
_ODD = -7046029254386353131  # 2^64 / golden ratio, as int64
_MASK = (1 << 64) - 1


@torch.no_grad()
def checksum(tensor: Tensor, kind: "ChecksumKind" = "bits") -> int:
    """64 bits that depend on every element and its position. Zeros of both signs are equal.

    kind: "bits"; "values", the same for all dtypes up to float32 that hold the same numbers; "multiset", like "values"
    and independent of order and of additional zeros.
    """
    if kind != "bits":
        tensor = tensor.float()
    if tensor.is_floating_point():
        tensor = tensor + 0.0
    if kind == "multiset":
        return _unordered(tensor)
    words = _words(tensor)
    whole = len(words) // _ROW * _ROW
    blocks = words[:whole].view(-1, _ROW).split(_ROWS_AT_ONCE.get(words.device.type, _MANY_ROWS))
    sums = [_hashed_by_position(block).sum(-1) for block in [*blocks, words[whole:][None]]]
    total = tensor.numel()
    for row in torch.cat(sums).tolist():  # waits for the device once
        total = (total * (_ODD & _MASK) + row) & _MASK
    return total


def _unordered(values: Tensor) -> int:
    """The sum of the hashes of the elements. `values` is float32."""
    parts = (
        values.detach().reshape(-1).view(torch.int32).split(_ROW * _ROWS_AT_ONCE.get(values.device.type, _MANY_ROWS))
    )
    sums = [_hashed(_hashed(part.long())).sum() for part in parts]
    return int(torch.stack(sums).sum().item()) & _MASK if sums else 0


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
