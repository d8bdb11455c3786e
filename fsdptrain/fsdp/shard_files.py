"""The tensors of a checkpoint as safetensors, by torch.distributed.checkpoint: at once, or while training continues.

No file is a pickle. The native file format of torch.distributed.checkpoint stores `.metadata` as a pickle and loads it
with `pickle.load` (torch 2.13, filesystem.py), which can run arbitrary code from an untrusted folder. Its safetensors
format, used here, has only JSON headers.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from fsdptrain import platform
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.shards import local_shard

_FILE_BYTES = 1 << 28  # per rank; a file passes through host memory whole, twice


def with_shard(tensor: Tensor, part: Tensor) -> Tensor:
    """Return `part` as the shard of a tensor that is sharded like `tensor`. `part` may be on another device."""
    return DTensor(part, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else part  # pyright: ignore


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


def write_shards(folder: Path, tensors: dict[str, Tensor], stager: HostStager | None = None) -> Future[Any] | None:
    """Write `tensors`; with a `stager` copy them, and return the write of the copies in a thread. Collective."""
    plan = _file_plan(tensors)
    writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=plan, save_distributed=True)
    writer.per_thread_copy_ahead = 0  # its other loader opens a stream on the first device
    with _errors(f"--output-dir: checkpoint {folder} cannot be written"):
        if stager is None:
            dcp.save(tensors, storage_writer=writer)
            return None
        future = dcp.async_save(tensors, storage_writer=writer, process_group=stager.group, async_stager=stager)
    assert isinstance(future, Future)
    return future


def finish_write(pending: Future[Any], folder: Path, timeout_s: float) -> None:
    """Wait for a write in a thread; on rank 0 it ends with those of all ranks. Raises CheckpointError."""
    with _errors(f"--output-dir: checkpoint {folder} cannot be written"):
        try:
            pending.result(timeout_s)
        except TimeoutError:
            raise CheckpointError(
                f"--async-save: a checkpoint was not written in {timeout_s:g} s: raise --dist-timeout, or remove it"
            ) from None


def read_shards(folder: Path, tensors: dict[str, Tensor], *, remedy: str) -> None:
    """Read `tensors` in place. Collective. Raises CheckpointError."""
    with _errors(f"checkpoint {folder} cannot be read", f": {remedy}"):
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


@contextmanager
def _errors(what: str, remedy: str = "") -> Iterator[None]:
    """Raise CheckpointError for an error of DCP, which also catches Ctrl-C."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if interrupts := [cause for cause in causes if isinstance(cause, KeyboardInterrupt)]:
            raise interrupts[0] from error
        reasons = "; ".join(sorted({f"{type(cause).__name__}: {cause}" for cause in causes}))
        raise CheckpointError(f"{what} ({reasons}){remedy}") from error


def _file_plan(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Map each tensor to its file number, from 1, with about `_FILE_BYTES` per file and rank."""
    plan: dict[str, int] = {}
    written = 0
    for name, tensor in tensors.items():
        plan[name] = 1 + written // _FILE_BYTES
        written += tensor.numel() * tensor.element_size() // dist.get_world_size()
    numbers = {number: i for i, number in enumerate(sorted(set(plan.values())), start=1)}
    return {name: numbers[number] for name, number in plan.items()}
