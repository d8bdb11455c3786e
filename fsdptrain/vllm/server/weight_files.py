"""The newest weights as files: what servers load, or what is sent to them bucket by bucket.

All of them are written before any server is told, so that no rank is ever inside a collective while it waits for a
server; and they stay until newer ones come, so that a server that takes the place of another can have them at once.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
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


@dataclass(frozen=True)
class Stored:
    """Where weights lie after one call of `WeightFolder.write`."""

    new: Sequence[Path]  # what was written
    whole: Sequence[Path]  # the newest value of each tensor


class WeightFolder:
    """Holds the newest value of each tensor, once. What lay at `path` before is deleted."""

    def __init__(self, path: Path, *, max_file_bytes: int) -> None:
        self.path = path
        self._max_file_bytes = max_file_bytes
        self._names: dict[Path, set[str]] = {}  # whose newest value a file holds; in the order of writing
        self._place: dict[str, Path] = {}
        self._count = 0  # files
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, mode=0o700)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> Stored:
        """In place of what was held of the same names. Files of at most `max_file_bytes`, or of one tensor.

        `weights` is read to its end even after an OSError, because making it is collective; then that error is raised.
        """
        before, new = list(self._names), []
        pending: dict[str, Tensor] = {}
        error: OSError | None = None

        def flush() -> None:
            nonlocal error
            if pending and error is None:
                try:
                    new.append(self._save(pending))
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
        self._tidy(before)
        return Stored(new, list(self._names))

    def make_room(self, name: str) -> Path:
        """An empty folder beside the files."""
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _save(self, tensors: Mapping[str, Tensor]) -> Path:
        """A file of its own; those that hold nothing else any more go at once."""
        path = self.path / f"{self._count:08d}.safetensors"
        self._count += 1
        try:
            save_file(dict(tensors), path)
        except SafetensorError as error:  # also where the disk is full
            raise OSError(str(error)) from error
        for name in tensors:
            old = self._place.get(name)
            if old is not None:
                self._names[old].discard(name)
                if not self._names[old]:
                    del self._names[old]
                    old.unlink()
            self._place[name] = path
        self._names[path] = set(tensors)
        return path

    def _tidy(self, before: Sequence[Path]) -> None:
        """What is left of a file of which a part is old moves to one of its own: nothing is held twice."""
        for path in before:
            left = self._names.get(path)
            if left is None:
                continue
            with safe_open(path, "pt") as file:
                if len(left) < len(file.keys()):
                    self._save({name: file.get_tensor(name) for name in file.keys() if name in left})  # noqa: SIM118 - not a dict
