"""Write the safetensors files of a checkpoint from a stream of tensors, on one rank."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError

INDEX = "model.safetensors.index.json"
FILE_BYTES = 2_000_000_000


def write_stream(
    folder: Path, stream: Iterable[tuple[str, Tensor]], *, failure: str, max_bytes: int = FILE_BYTES
) -> None:
    """Write the tensors of a collective `stream` to `folder` on rank 0, replacing its contents. Collective.

    If rank 0 cannot write, it reads the stream to its end, because the other ranks are in its collectives. Then all
    ranks raise CheckpointError with the text `failure`.
    """
    error: Exception | None = None
    writer: HubWriter | None = None
    with raise_on_all_ranks(CheckpointError, failure):
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            writer = HubWriter(folder, max_bytes=max_bytes)
    for name, tensor in stream:
        if writer is not None and error is None:
            try:
                writer.add(name, tensor)
            except (OSError, SafetensorError) as caught:
                error = caught
    with raise_on_all_ranks(CheckpointError, failure):
        if error is not None:
            raise error
        if writer is not None:
            writer.finish()


class HubWriter:
    """Writes tensors to files of at most `max_bytes`, in order, with an index if there are several.

    Holds the tensors of one file in host memory. A larger tensor gets a separate file.
    """

    def __init__(self, folder: Path, *, max_bytes: int = FILE_BYTES) -> None:
        self.num_bytes = 0
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # of the tensors of each written file

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; it may change afterwards. Raises OSError or SafetensorError if a file cannot be written."""
        pending = sum(other.nbytes for other in self._pending.values())
        if self._pending and pending + tensor.nbytes > self._max_bytes:
            self._write_file()
        self._pending[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.num_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last file, give all files their names, and write the index."""
        self._write_file()
        count = len(self._names)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        names = names if count > 1 else ["model.safetensors"]
        for number, name in enumerate(names):
            self._part(number).rename(self._folder / name)
        if count > 1:
            weight_map = {tensor: name for tensors, name in zip(self._names, names, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2))

    def _write_file(self) -> None:
        save_file(self._pending, self._part(len(self._names)), metadata={"format": "pt"})
        self._names.append(list(self._pending))
        self._pending = {}

    def _part(self, number: int) -> Path:
        return self._folder / f".part-{number:05d}"
