"""The tensors of a checkpoint as safetensors, by torch.distributed.checkpoint: at once, or while training continues.

No file is a pickle. The native file format of torch.distributed.checkpoint stores `.metadata` as a pickle and loads it
with `pickle.load` (torch 2.13, filesystem.py), which can run arbitrary code from an untrusted folder. Its safetensors
format, used here, has only JSON headers.
"""

import io
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.futures
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import AsyncStager

from fsdptrain import platform
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.shards import local_shard, with_shard

FileDigest = tuple[int, str]  # bytes, xxh3_128
_FILE_BYTES = 1 << 28  # per rank; a file passes through host memory whole, twice


class ShardWrite:
    """Shards that were written, or are being written in a thread."""

    def __init__(self, writer: "_ShardWriter", future: "Future[Any] | None" = None) -> None:
        self._writer = writer
        self._future = future

    @property
    def in_background(self) -> bool:
        return self._future is not None

    def digests(self, timeout_s: float) -> Mapping[str, FileDigest]:
        """Wait for the write, and return the digests of all files on rank 0. Raises CheckpointError."""
        if self._future is not None:
            try:
                self._future.result(timeout_s)
            except TimeoutError:
                raise CheckpointError(
                    f"--async-save: a checkpoint was not written in {timeout_s:g} s: raise --dist-timeout, or remove it"
                ) from None
            except CheckpointException as error:
                raise _error_of(error, f"--output-dir: checkpoint {self._writer.path} cannot be written") from error
        return self._writer.digests


class HostStager(AsyncStager):
    """Host buffers for copies, pinned if there is an accelerator, reused for every checkpoint.

    DCP's DefaultStager fails on weights sliced by transformers' reader ("invalid python storage", torch 2.13).
    """

    _synchronize_after_execute = False  # `stage` waits for its copies

    def __init__(self, timeout_s: float) -> None:
        """Create the process group for background writes. Collective."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)  # the group of all ranks
        self.group = group
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy this rank's shards and wait for the copies. Overwrites the last copies."""
        for name, tensor in state_dict.items():
            part = local_shard(tensor)
            if name not in self._buffers:
                pinned = platform.has_accelerator()
                self._buffers[name] = torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned)
            self._buffers[name].copy_(part, non_blocking=True)
        if platform.has_accelerator():
            torch.accelerator.synchronize()  # the caller may change the tensors from here on
        return {name: with_shard(tensor, self._buffers[name]) for name, tensor in state_dict.items()}


def write_shards(folder: Path, tensors: dict[str, Tensor], stager: HostStager | None = None) -> ShardWrite:
    """Write `tensors`, or with a `stager` copy them and write the copies in a thread. Collective."""
    writer = _ShardWriter(folder, tensors)
    try:
        if stager is not None:
            future = dcp.async_save(tensors, storage_writer=writer, process_group=stager.group, async_stager=stager)
            assert isinstance(future, Future)
            return ShardWrite(writer, future)
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as error:
        raise _error_of(error, f"--output-dir: checkpoint {folder} cannot be written") from error
    return ShardWrite(writer)


def read_shards(folder: Path, tensors: dict[str, Tensor], *, remedy: str) -> None:
    """Read `tensors` in place. Collective. Raises CheckpointError."""
    try:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise _error_of(error, f"checkpoint {folder} cannot be read", f": {remedy}") from error


class _ShardWriter(dcp.HuggingFaceStorageWriter):
    """Writer that computes digests as it writes, and collects them on rank 0 with what DCP collects there."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(str(folder), fqn_to_index_mapping=_file_plan(tensors), save_distributed=True)
        self.per_thread_copy_ahead = 0  # its other loader opens a stream on the first device
        self.fs = self._files = _DigestingFileSystem()
        self.digests: dict[str, FileDigest] = {}  # by name below the checkpoint

    def write_data(self, plan: Any, planner: Any) -> torch.futures.Future[list[Any]]:
        super().write_data(plan, planner).wait()
        collected: torch.futures.Future[list[Any]] = torch.futures.Future()
        collected.set_result([self._files.digests])
        return collected

    def finish(self, metadata: Any, results: Any) -> None:
        del metadata
        folder = Path(Path(self.path).name)
        for [of_rank] in results:
            self.digests |= {str(folder / name): digest for name, digest in of_rank.items()}


class _DigestingFileSystem(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, FileDigest] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb"
        with _DigestingFile(path) as file:
            yield file
        self.digests[Path(path).name] = file.num_bytes, file.state.hexdigest()


class _DigestingFile(io.BufferedWriter):
    def __init__(self, path: Any) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.state, self.num_bytes = xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        self.state.update(data)
        self.num_bytes += len(data)
        written = super().write(data)
        self.flush()  # DCP syncs next
        return written


def _file_plan(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Map each tensor to its file number, from 1, with about `_FILE_BYTES` per file and rank."""
    plan: dict[str, int] = {}
    written = 0
    for name, tensor in tensors.items():
        plan[name] = 1 + written // _FILE_BYTES
        written += tensor.numel() * tensor.element_size() // dist.get_world_size()
    numbers = {number: i for i, number in enumerate(sorted(set(plan.values())), start=1)}
    return {name: numbers[number] for name, number in plan.items()}


def _error_of(caught: CheckpointException, what: str, remedy: str = "") -> BaseException:
    """Return the error to raise for one of DCP, which also catches Ctrl-C."""
    causes = [cause for cause, _ in caught.failures.values()]
    if interrupts := [cause for cause in causes if isinstance(cause, KeyboardInterrupt)]:
        return interrupts[0]
    reasons = "; ".join(sorted({f"{type(cause).__name__}: {cause}" for cause in causes}))
    return CheckpointError(f"{what} ({reasons}){remedy}")
