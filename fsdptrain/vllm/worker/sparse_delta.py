"""Sparse deltas of files: positions and values of what has changed, bit by bit.

At the learning rates of reinforcement learning most bfloat16 weights stay the same in a step. Trainer and vLLM's
workers import this in different environments: it needs only numpy.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_BLOCK = 1 << 16  # words of two bytes, as an element of bfloat16: two bytes also hold a position in a block
_LARGEST = 0.75  # of the file: the trainer keeps deltas in memory


def sparse_delta(old: Bytes, new: Bytes) -> Bytes | None:
    """Return the changes from `old` to `new`; None if they are more than three quarters of `new`.

    The number of changed words of each block; then, by block, positions and values, or all words if that is less; then
    an odd last byte.
    """
    if len(old) != len(new):
        return None
    before, after = list(_blocks(old)), list(_blocks(new))
    counts = np.zeros(len(after), np.uint32)
    parts, nbytes = [counts.view(np.uint8)], counts.nbytes
    for i, words in enumerate(after):
        positions = np.flatnonzero(before[i] != words)
        counts[i] = len(positions)
        found = [words] if _is_whole(counts[i], words) else [positions.astype(np.uint16), words[positions]]
        parts += [part.view(np.uint8) for part in found]
        nbytes += sum(part.nbytes for part in found)
        if nbytes > _LARGEST * len(new):
            return None
    return np.concatenate([*parts, new[len(new) // 2 * 2 :]])


def apply_sparse_delta(held: Bytes, delta: Bytes) -> None:
    """Turn `held` into the new bytes, in place. Applying the same delta again changes nothing."""
    blocks = list(_blocks(held))
    at = 4 * len(blocks)
    counts = delta[:at].view(np.uint32)

    def take(count: int) -> Any:
        nonlocal at
        at += 2 * count
        return delta[at - 2 * count : at].view(np.uint16)

    for count, words in zip(counts.tolist(), blocks, strict=True):
        if _is_whole(count, words):
            words[:] = take(len(words))
        else:
            positions = take(count)
            words[positions] = take(count)
    held[len(held) // 2 * 2 :] = delta[at:]


def _is_whole(num_changed: int, words: Any) -> bool:
    """Whether a block is sent whole: at most as many bytes as positions and values."""
    return 2 * num_changed >= len(words)


def _blocks(file: Bytes) -> Iterator[Any]:
    words = file[: len(file) // 2 * 2].view(np.uint16)
    return (words[start : start + _BLOCK] for start in range(0, len(words), _BLOCK))
