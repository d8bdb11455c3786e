"""A number that tells a tensor from others of its shape, on whatever device it lies.

Imported in vLLM's own processes too: it needs torch and little else.
"""

from functools import lru_cache

import torch
from torch import Tensor

from fsdptrain.types import ChecksumKind

_WORD = 8  # bytes
_ROW = 1 << 15  # words; on a CPU what is mixed at one time stays in its cache
_ROWS_AT_ONCE = {"cpu": 1}  # elsewhere few and large kernels
_MANY_ROWS = 128  # 32 MiB
_ODD = -7046029254386353131  # 2^64 / golden ratio, as int64
_MASK = (1 << 64) - 1


@torch.no_grad()
def checksum(tensor: Tensor, kind: ChecksumKind = "bits") -> int:
    """64 bits that depend on each element and on its place. Both zeros count as one, as in a product.

    `values`: the same for all dtypes that hold the same numbers, up to float32. `multiset`: so too, and whatever their
    order, and however many zeros there are beside them.
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
    sums = [_mixed(block).sum(-1) for block in [*blocks, words[whole:][None]]]
    total = tensor.numel()
    for row in torch.cat(sums).tolist():  # waits for the device once
        total = (total * (_ODD & _MASK) + row) & _MASK
    return total


def bit_checksum(tensor: Tensor) -> int:
    """As `checksum`, of the bits: two zeros of different sign differ."""
    return checksum(_words(tensor))


def _unordered(values: Tensor) -> int:
    """Of float32: the sum of what each element is mixed to, by itself."""
    parts = (
        values.detach().reshape(-1).view(torch.int32).split(_ROW * _ROWS_AT_ONCE.get(values.device.type, _MANY_ROWS))
    )
    sums = [_shuffled(_shuffled(part.long())).sum() for part in parts]
    return int(torch.stack(sums).sum().item()) & _MASK if sums else 0


def _shuffled(words: Tensor) -> Tensor:
    """Zero stays zero."""
    mixed = words * _ODD
    return mixed ^ (mixed >> 29)


def _words(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` in order, [words] i64, with zeros at the end where they do not fill the last one."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % _WORD or flat.storage_offset() % _WORD:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % _WORD)).clone()
    return flat.view(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    """[rows, words]: each word with the factor of its place. Shifts bring what differs in high bits to the low ones."""
    mixed = (words >> 32).bitwise_xor_(words).mul_(_factors(words.device)[: words.shape[-1]])
    return mixed.bitwise_xor_(mixed >> 29).mul_(_ODD)


@lru_cache
def _factors(device: torch.device) -> Tensor:
    """[row] i64, random and odd."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator) | 1).to(device)
