"""The newest weights as files: servers load them, or the trainer sends them.

All files are written before any server is told, so that no rank is inside a collective while it waits for a server.
They stay until the next version, so that a restarted server can load them at any time.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import _TYPES
from torch import Tensor

from fsdptrain import platform
from fsdptrain.vllm.worker.sparse_delta import Bytes, sparse_delta

SHARED_MEMORY = Path("/dev/shm")
FULL_EVERY = 50  # versions: servers get all weights then
_NAMES = {dtype: name for name, dtype in _TYPES.items()}  # of dtypes in safetensors' files


class WeightFolder:
    """Holds the files of the newest version. Deletes what lay at `path` before."""

    def __init__(self, path: Path, *, max_file_bytes: int, with_deltas: bool = False) -> None:
        self.path = path
        self.base: str | None = None  # tag of the version that `deltas` are against
        self.deltas: list[Bytes | None] = []  # of the files; None: send the file
        self._tag: str | None = None  # of the files; None: a write has failed
        self._with_deltas = with_deltas
        self._max_file_bytes = max_file_bytes
        self._num_files = 0  # of all versions: a name is never used twice
        self._num_versions = 0
        self._files: list[Path] = []
        self._sizes: list[int] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)  # holds the tensors of one file
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, mode=0o700)

    def write(self, weights: Iterable[tuple[str, Tensor]], tag: str) -> list[Path]:
        """Replace the files by `weights` of version `tag`, in files of at most `max_file_bytes` or of one tensor.

        Reads `weights` to its end even after an error, because iterating it is collective; then raises an OSError.
        """
        previous, self._files, self.deltas = self._files, [], []
        last, self._sizes = self._sizes, []
        self.base, self._tag = self._tag, None
        compares = self._with_deltas and self.base is not None and self._num_versions % FULL_EVERY > 0
        self._num_versions += 1
        error: Exception | None = None
        for parts in self._parts(weights):
            old = previous.pop(0) if previous else None
            try:
                if old is not None and not compares:
                    old.unlink(missing_ok=True)  # makes room
                if error is None:
                    self._save(parts)
                    self.deltas.append(_delta(old, self._files[-1]) if old and compares else None)
            except Exception as caught:  # noqa: BLE001 - raised after the loop
                error = caught
            if old is not None:
                old.unlink(missing_ok=True)
        for path in previous:
            path.unlink(missing_ok=True)
        if error is not None:
            raise error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}") from error
        self._tag, self._sizes = tag, [path.stat().st_size for path in self._files]
        if last != self._sizes:
            self.deltas = [None] * len(self._files)
        return self._files

    def _parts(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[bytes, memoryview]]:
        """The parts of each file: header and data, in memory that the next file overwrites.

        Tensors are aligned by their dtype. One wait for the device per file: safetensors' `save_file` takes 0.1 ms per
        tensor.
        """
        header: dict[str, Any] = {}
        end = 0
        for name, tensor in weights:
            begin, end = end, end + tensor.nbytes
            if header and (end > self._max_file_bytes or begin % tensor.itemsize):
                yield self._finished(header, begin)
                header, begin, end = {}, 0, tensor.nbytes
            if end > len(self._buffer):  # before the first tensor of a file
                size = max(end, self._max_file_bytes)
                self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=platform.has_accelerator())
            place = self._buffer[begin:end].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach(), non_blocking=True)
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
        if header:
            yield self._finished(header, end)

    def _finished(self, header: Mapping[str, Any], size: int) -> tuple[bytes, memoryview]:
        if platform.has_accelerator():
            torch.accelerator.synchronize()
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, self._buffer[:size].numpy().data

    def make_subfolder(self, name: str) -> Path:
        """An empty folder beside the files."""
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _save(self, parts: Sequence[bytes | memoryview]) -> None:
        path = self.path / f"{self._num_files:08d}.safetensors"
        self._num_files += 1
        self._files.append(path)
        with path.open("wb") as file:
            file.writelines(parts)


def _delta(old: Path, new: Path) -> Bytes | None:
    try:
        return sparse_delta(read(old), read(new))
    except MemoryError:
        return None


def read(path: Path) -> Any:
    """Memory-map a file. [bytes] u8"""
    return np.memmap(path, np.uint8, "r")


def folder_name(output_dir: Path) -> str:
    """Depends on `output_dir` only: a run that is resumed after a kill finds and deletes the files of before."""
    name = f"{os.getuid()}/{output_dir.resolve()}"
    return "fsdptrain-" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def shared_memory(num_bytes: int) -> Path | None:
    """The folder of shared memory, if there is one with room for `num_bytes`."""
    if not SHARED_MEMORY.is_dir() or shutil.disk_usage(SHARED_MEMORY).free < num_bytes:
        return None
    return SHARED_MEMORY
