"""The files of the newest version in host memory, to which sparse deltas are applied.

vLLM stores weights in layouts of its own, so that a delta cannot be applied to its layers.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
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
    """One copy for all workers of this machine: they write the same bytes. It ends with the last of them.

    Without room for it every push is a full one.
    """

    def __init__(self, name: str, sizes: Sequence[int]) -> None:
        """Open the memory `name` for files of `sizes` [bytes]. Nothing is allocated yet."""
        self.tag: str | None = None  # of the version, once all its files have been loaded
        self._sizes = sizes
        self._path = _SHARED_MEMORY / name
        *self._starts, self._total = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        self._memory: Tensor | None = None
        self._file: int | None = None
        if self._total < _SHARE * host_memory()[0]:
            with suppress(OSError):
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def unlink(self) -> None:
        """Call when every worker of this machine has opened the memory: it then ends with them."""
        self._path.unlink(missing_ok=True)

    def allocate(self) -> None:
        if self._file is None:
            return
        with suppress(OSError), os.fdopen(self._file, "r+b") as file:
            os.posix_fallocate(self._file, 0, self._total)
            self._memory = torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(self._total,)))
        self._file = None

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
