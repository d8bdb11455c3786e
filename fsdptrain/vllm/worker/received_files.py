"""The files of the newest version in host memory, to which sparse deltas are applied.

vLLM stores weights in layouts of its own, so that a delta cannot be applied to its layers.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
        with suppress(OSError):
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            found = os.fstat(file)
            if found.st_uid == os.geteuid() and not found.st_mode & 0o077:  # no other user can change the weights
                self._file = file
            else:
                os.close(file)

    def allocate(self) -> None:
        """Call when every worker of this machine has opened the memory: it then ends with them."""
        if self._file is None:
            return
        self._path.unlink(missing_ok=True)
        with suppress(OSError), _one_at_a_time():
            is_shared = os.fstat(self._file).st_blocks > 0  # another worker has allocated it
            if is_shared or self._total < _SHARE * host_memory()[0]:
                os.posix_fallocate(self._file, 0, self._total)
                with os.fdopen(os.dup(self._file), "r+b") as file:
                    self._memory = torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(self._total,)))

    def close(self) -> None:
        """Close what was opened. Memory that is allocated stays."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
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


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Workers of several servers of a machine measure its memory and allocate one after the other."""
    folder = os.open(_SHARED_MEMORY, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
