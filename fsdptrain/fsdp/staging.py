"""Write a checkpoint while training continues: copy the tensors, then write the copies in a thread.

This is similar to `torch.distributed.checkpoint.async_save`, but its thread ends after the tensors. Here the thread
also writes the reference and renames the folder. Its collectives use a separate process group.
"""

from collections.abc import Callable
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdptrain import platform
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.shards import local_shard


class Staging:
    """Host buffers for copies, pinned if there is an accelerator, reused for every checkpoint.

    DCP's DefaultStager does not work here. It identifies copies by the storages of their sources, and the reference is
    saved while swapped into the storages of the policy. It also fails on weights sliced by transformers' reader
    ("invalid python storage", on all ranks but the first, torch 2.13).
    """

    def __init__(self, timeout_s: float) -> None:
        """Create the process group for background writes. Collective."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)  # the group of all ranks
        self.group = group
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._host_meshes: dict[DeviceMesh, DeviceMesh] = {}

    @torch.no_grad()
    def copy(self, purpose: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's shards and wait for the copies. Overwrites the last copy for `purpose`. Collective."""
        for name, tensor in tensors.items():
            part = local_shard(tensor)
            if (purpose, name) not in self._buffers:
                buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=platform.has_accelerator())
                self._buffers[purpose, name] = buffer
            self._buffers[purpose, name].copy_(part, non_blocking=True)
        if platform.has_accelerator():
            torch.accelerator.synchronize()  # the caller may change the tensors from here on
        return {name: self._like(tensor, self._buffers[purpose, name]) for name, tensor in tensors.items()}

    def _like(self, tensor: Tensor, part: Tensor) -> Tensor:
        """Wrap `part` as a shard like `tensor`, a DTensor on a CPU mesh if `tensor` is one."""
        if not isinstance(tensor, DTensor):
            return part
        mesh = tensor.device_mesh
        if mesh not in self._host_meshes:
            on_host = mesh.device_type == "cpu"
            host_mesh = mesh if on_host else init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.mesh_dim_names)
            self._host_meshes[mesh] = host_mesh
        shape, stride = tensor.shape, tensor.stride()
        placements = tensor.placements
        return DTensor.from_local(
            part, self._host_meshes[mesh], placements, run_check=False, shape=shape, stride=stride
        )


class Background:
    """Run `work` in a daemon thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._work = work
        self._thread = Thread(target=self._run, daemon=True, name="checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            platform.use_local_device()
            self._work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, `check` raises it
            self._error = error

    def check(self) -> None:
        """Raise the error of `work`, if any."""
        if self._error is not None:
            raise self._error

    def wait(self, timeout_s: float) -> None:
        """Wait for the thread. Raises its error, or CheckpointError after `timeout_s` [s]."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"--async-save: a checkpoint was not written in {timeout_s:g} s: raise --dist-timeout, or remove it"
            )
        self.check()
