"""The newest weights as files: servers load them, or the trainer sends them.

All files are written before any server is told, so that no rank is inside a collective while it waits for a server.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from fsdptrain import platform

SHARED_MEMORY = Path("/dev/shm")
_NAMES = {dtype: name for name, dtype in _TYPES.items()}  # of dtypes in safetensors' files


class WeightFolder:
    """Holds the files of the newest version. Deletes what lay at `path` before."""

    def __init__(self, path: Path, *, max_file_bytes: int) -> None:
        self.path = path
        self._max_file_bytes = max_file_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)  # holds the tensors of one file
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, mode=0o700)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> list[Path]:
        """Replace the files by `weights`, in files of at most `max_file_bytes` or of one tensor.

        Reads `weights` to its end even after an error, because iterating it is collective; then raises an OSError.
        """
        files: list[Path] = []
        error: OSError | None = None
        try:
            for path in self.path.glob("*.safetensors"):
                path.unlink()
        except OSError as caught:
            error = caught
        for parts in self._parts(weights):
            if error is None:
                path = self.path / f"{len(files):05d}.safetensors"
                try:
                    with path.open("wb") as file:
                        file.writelines(parts)
                except OSError as caught:
                    error = caught
                files.append(path)
        if error is not None:
            raise error
        return files

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

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def folder_name(output_dir: Path) -> str:
    """Depends on `output_dir` only: a run that is resumed after a kill finds and deletes the files of before."""
    name = f"{os.getuid()}/{output_dir.resolve()}"
    return "fsdptrain-" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
