"""All weights in one file: the trainer writes it, in shared memory if it can, and the workers of a server map it.

Workers import this module in their own environment: it needs only torch.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
_ALIGNED = 8  # bytes: each tensor begins at a multiple
_BUFFER_BYTES = 64 * 2**20  # or one tensor


class WeightFile:
    """The newest weights, in a folder that nobody else uses. Deletes what was there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._buffer = torch.empty(0, dtype=torch.uint8)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Replace the weights. Return the arguments of `read`.

        Reads `weights` to its end even after an error, because iterating it is collective; then raises an OSError.
        """
        path, weights, parts = self.folder / "weights", iter(weights), list[tuple[str, str, list[int]]]()
        try:
            path.unlink(missing_ok=True)
            with path.open("wb") as file:
                self._copy(weights, file, parts)
        finally:
            for _ in weights:
                pass
        names, dtypes, shapes = zip(*parts, strict=True)
        return {"path": str(path.resolve()), "names": names, "dtype_names": dtypes, "shapes": shapes}

    def _copy(self, weights: Iterator[tuple[str, Tensor]], file: BinaryIO, parts: list[Any]) -> None:
        """Through a buffer on the host, with one wait for the device each time it is full."""
        end = 0
        for name, tensor in weights:
            begin, end = end, end + _aligned(tensor.nbytes)
            if end > len(self._buffer):
                self._flush(file, begin)
                begin, end = 0, end - begin
                if end > len(self._buffer):
                    pinned = tensor.device.type != "cpu"
                    self._buffer = torch.empty(max(end, _BUFFER_BYTES), dtype=torch.uint8, pin_memory=pinned)
            place = self._buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach(), non_blocking=True)
            parts.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
        self._flush(file, end)

    def _flush(self, file: BinaryIO, num_bytes: int) -> None:
        if num_bytes:
            if self._buffer.is_pinned():
                torch.accelerator.synchronize()
            file.write(self._buffer[:num_bytes].numpy().data)

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def read(
    path: str, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, in the memory of the file."""
    dtypes = [getattr(torch, name) for name in dtype_names]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    aligned = [_aligned(size) for size in sizes]
    places = torch.from_file(path, size=sum(aligned), dtype=torch.uint8).split(aligned)
    for name, dtype, shape, size, place in zip(names, dtypes, shapes, sizes, places, strict=True):
        yield name, place[:size].view(dtype).view(shape)


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNED) * _ALIGNED


def folder_name(output_dir: Path) -> str:
    """Depends on `output_dir` only: a run that is resumed after a kill finds and deletes the files of before."""
    name = f"{os.getuid()}/{output_dir.resolve()}"
    return "fsdptrain-" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
