"""A checkpoint that is written while training goes on: the tensors are copied, and a thread writes the copies.

That is what `torch.distributed.checkpoint.async_save` does; its thread ends with the tensors, while here the reference
and the rename of the folder follow, so the thread is ours. Collectives of that thread go over a group of their own.
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
    """Host memory for copies, pinned where there is an accelerator, which is kept from one checkpoint to the next.

    Not DCP's DefaultStager: it knows copies by the storages that they are of, and the reference is swapped into those
    of the policy to be saved; and on weights that transformers' reader has sliced it fails ("invalid python storage",
    on all ranks but the first, torch 2.13).
    """

    def __init__(self, timeout_s: float) -> None:
        """Collective."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)  # of all ranks
        self.group = group
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._host_meshes: dict[DeviceMesh, DeviceMesh] = {}

    @torch.no_grad()
    def copy(self, purpose: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of this rank's shards, whole when this returns. The next copy for `purpose` takes its place. Collective."""
        for name, tensor in tensors.items():
            part = local_shard(tensor)
            if (purpose, name) not in self._buffers:
                buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=platform.has_accelerator())
                self._buffers[purpose, name] = buffer
            self._buffers[purpose, name].copy_(part, non_blocking=True)
        if platform.has_accelerator():
            torch.accelerator.synchronize()  # the tensors may change from here on
        return {name: self._like(tensor, self._buffers[purpose, name]) for name, tensor in tensors.items()}

    def _like(self, tensor: Tensor, part: Tensor) -> Tensor:
        """`part` as the shard of what `tensor` is a shard of; on a mesh of hosts, where a DTensor keeps it."""
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
    """`work`, in a thread that does not keep the process alive."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._work = work
        self._thread = Thread(target=self._run, daemon=True, name="checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, `check` raises it
            self._error = error

    def check(self) -> None:
        """Raises what went wrong so far."""
        if self._error is not None:
            raise self._error

    def wait(self, timeout_s: float) -> None:
        """Until it has ended. Raises what went wrong, or CheckpointError after `timeout_s`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"--async-save: a checkpoint was not written in {timeout_s:g} s: raise --dist-timeout, or leave it out"
            )
        self.check()
