"""64-bit checksums of the values of tensors, the same on every device and for every dtype up to float32.

vLLM's workers import this module in their own environment: it needs only torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

_K = TypeVar("_K")
_BLOCK = 1 << 18  # elements
_ODD = -7046029254386353131  # 2^64 / golden ratio, as int64
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class StartedChecksum:
    """A checksum that its device computes; the host has not waited for it."""

    sums: Tensor  # [blocks] i64
    numel: int


@torch.no_grad()
def start_checksum(tensor: Tensor) -> StartedChecksum:
    """Start a checksum of `tensor` as float32. Zeros of both signs are equal.

    The tensor may be overwritten afterwards on the same stream.
    """
    flat = tensor.detach().reshape(-1)
    sums = []
    for part in flat.split(_BLOCK):
        words = (part.float() + 0.0).view(torch.int32).long()
        words *= _factors(words.device)[: len(words)]
        sums.append(_hashed(_hashed(words)).sum())
    return StartedChecksum(torch.stack(sums), tensor.numel())


def finish_checksums(started: Mapping[_K, StartedChecksum]) -> dict[_K, int]:
    """Return the checksums, after one wait for each device."""
    by_device: dict[torch.device, list[_K]] = {}
    for key, one in started.items():
        by_device.setdefault(one.sums.device, []).append(key)
    found = {}
    for keys in by_device.values():
        sums = iter(torch.cat([started[key].sums for key in keys]).tolist())
        for key in keys:
            total = started[key].numel
            for block in islice(sums, len(started[key].sums)):
                total = (total * (_ODD & _MASK) + block) & _MASK
            found[key] = total
    return {key: found[key] for key in started}


def _hashed(words: Tensor) -> Tensor:
    """A hash of each element; zero stays zero."""
    mixed = words * _ODD
    return mixed ^ (mixed >> 29)


@lru_cache
def _factors(device: torch.device) -> Tensor:
    """[_BLOCK] i64, random and odd, by position."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (_BLOCK,), generator=generator) | 1).to(device)
