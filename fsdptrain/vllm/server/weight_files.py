"""The newest weights as files: servers load them, or the trainer sends them.

All files are written before any server is told, so that no rank is inside a collective while it waits for a server.
They stay until the next version, so that a restarted server can load them at any time.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")


class WeightFolder:
    """Holds the files of the newest version. Deletes what lay at `path` before."""

    def __init__(self, path: Path, *, max_file_bytes: int) -> None:
        self.path = path
        self._max_file_bytes = max_file_bytes
        self._num_files = 0  # of all versions: a name is never used twice
        self._files: list[Path] = []
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, mode=0o700)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> list[Path]:
        """Replace the files by `weights`, in files of at most `max_file_bytes` or of one tensor.

        Reads `weights` to its end even after an OSError, because iterating it is collective; then raises the error.
        """
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files = []
        error: OSError | None = None
        for part in self._parts(weights):
            try:
                if error is None:
                    self._save(part)
            except OSError as caught:
                error = caught
            part.clear()
        if error is not None:
            raise error
        return self._files

    def _parts(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        part: dict[str, Tensor] = {}
        for name, tensor in weights:
            if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > self._max_file_bytes:
                yield part
                part = {}
            part[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if part:
            yield part

    def make_subfolder(self, name: str) -> Path:
        """An empty folder beside the files."""
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _save(self, tensors: dict[str, Tensor]) -> None:
        path = self.path / f"{self._num_files:08d}.safetensors"
        self._num_files += 1
        self._files.append(path)
        try:
            save_file(tensors, path)
        except SafetensorError as error:  # includes a full disk
            raise OSError(str(error)) from error


def folder_name(output_dir: Path) -> str:
    """Depends on `output_dir` only: a run that is resumed after a kill finds and deletes the files of before."""
    name = f"{os.getuid()}/{output_dir.resolve()}"
    return "fsdptrain-" + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def shared_memory(num_bytes: int) -> Path | None:
    """The folder of shared memory, if there is one with room for `num_bytes`."""
    if not SHARED_MEMORY.is_dir() or shutil.disk_usage(SHARED_MEMORY).free < num_bytes:
        return None
    return SHARED_MEMORY
