"""The files of the newest version in host memory, to which sparse deltas are applied.

vLLM stores weights in layouts of its own, so that a delta cannot be applied to its layers.
"""

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fsdptrain.platform import host_memory
from fsdptrain.vllm.worker.sparse_delta import apply_sparse_delta

_SHARED_MEMORY = Path("/dev/shm")
_ALIGNMENT = 8  # bytes
_SHARE = 0.5  # of the available memory


class ReceivedFiles:
    """One copy for all workers of this machine: they write the same bytes. It ends with the last of them."""

    def __init__(self, name: str, sizes: Sequence[int]) -> None:
        """`sizes` of the files [bytes]. Every worker opens the memory `name` before one of them calls `unlink`."""
        self.tag: str | None = None  # of the version, once all files have been loaded
        self._sizes = sizes
        self._path = _SHARED_MEMORY / name
        *self._starts, total = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        self._memory = _shared_memory(self._path, total)

    def unlink(self) -> None:
        self._path.unlink(missing_ok=True)

    def update(self, index: int, sent: Tensor) -> Tensor:
        """File `index`, from the whole file or its sparse delta. [bytes] u8"""
        if self._memory is None:
            return sent
        start, size = self._starts[index], self._sizes[index]
        held = self._memory[start : start + size]
        if len(sent) == size:
            held.copy_(sent)
            return sent
        apply_sparse_delta(held.numpy(), sent.cpu().numpy())
        return held

    def finish(self, tag: str) -> None:
        self.tag = None if self._memory is None else tag


def _shared_memory(path: Path, nbytes: int) -> Tensor | None:
    """[nbytes] u8. None without room: then every push is a full one."""
    if not path.exists() and nbytes > _SHARE * host_memory()[0]:
        return None
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(file, 0, nbytes)
            with os.fdopen(file, "r+b", closefd=False) as opened:
                return torch.from_numpy(np.memmap(opened, np.uint8, "r+", shape=(nbytes,)))
        finally:
            os.close(file)
    except OSError:
        path.unlink(missing_ok=True)
        return None
