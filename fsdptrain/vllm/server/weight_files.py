"""The newest weights as files: what servers load, or what is sent to them bucket by bucket.

All of them are written before any server is told, so that no rank is ever inside a collective while it waits for a
server; and they stay until newer ones come, so that a server that takes the place of another can have them at once.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")


def folder_name(output_dir: Path) -> str:
    """Follows from `output_dir`: a run that goes on after it was killed finds, and clears, what it left."""
    name = f"{os.getuid()}/{output_dir.resolve()}"
    return "fsdptrain-" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def shared_memory(num_bytes: int) -> Path | None:
    """Where shared memory is a folder, if it has room for `num_bytes`."""
    if not SHARED_MEMORY.is_dir() or shutil.disk_usage(SHARED_MEMORY).free < num_bytes:
        return None
    return SHARED_MEMORY


class WeightFolder:
    """Holds the newest version. What lay at `path` before is deleted."""

    def __init__(self, path: Path, *, max_file_bytes: int) -> None:
        self.path = path
        self._max_file_bytes = max_file_bytes
        self._count = 0  # files of all versions
        self._files: list[Path] = []
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, mode=0o700)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> list[Path]:
        """Replace the version before by `weights`, in files of at most `max_file_bytes` or of one tensor.

        `weights` is read to its end even after an OSError, because iterating it is collective; then the error is
        raised.
        """
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files = []
        pending: dict[str, Tensor] = {}
        error: OSError | None = None

        def flush() -> None:
            nonlocal error
            if pending and error is None:
                try:
                    self._save(pending)
                except OSError as caught:
                    error = caught
            pending.clear()

        for name, tensor in weights:
            if sum(t.nbytes for t in pending.values()) + tensor.nbytes > self._max_file_bytes:
                flush()
            if error is None:
                pending[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        flush()
        if error is not None:
            raise error
        return self._files

    def make_room(self, name: str) -> Path:
        """An empty folder beside the files."""
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _save(self, tensors: dict[str, Tensor]) -> None:
        path = self.path / f"{self._count:08d}.safetensors"
        self._count += 1
        self._files.append(path)
        try:
            save_file(tensors, path)
        except SafetensorError as error:  # includes a full disk
            raise OSError(str(error)) from error
