"""Access the shards of an FSDP2 model from outside without leaving stale gathered copies.

After a forward pass without gradient the root group stays gathered, as does every group without reshard-after-forward:
its parameters are plain tensors, and the next gather is a no-op. The next forward does not see writes to the shards,
such as an optimizer step, a load or a swap. Call `model.structure.reshard` before such writes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdptrain import platform
from fsdptrain.model.loading.materialize import local_part
from fsdptrain.model.structure import reshard


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself, without copy or gradient. [local shape]"""
    return local_part(tensor.detach())


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) for each buffer in the state dict, once."""
    seen: set[Tensor] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer not in seen:
                seen.add(buffer)
                yield f"{prefix}.{name}" if prefix else name, buffer


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint of `model` by name: parameters (tied ones once) and persistent buffers."""
    return dict(model.named_parameters()) | dict(persistent_buffers(model))


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Identify a model by its class and the names, shapes and dtypes of its tensors."""
    tensors = {name: [list(t.shape), str(t.dtype)] for name, t in model_tensors(model).items()}
    return {
        "class": type(model).__name__.removeprefix("FSDP"),  # fully_shard creates a class FSDP<Name>
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "tensors": sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()[:16],
    }


@torch.no_grad()
def content_digest(model: nn.Module) -> str:
    """Hash the weights. The result does not depend on the number of ranks. Collective.

    Sums the bits of each tensor as integers, which does not depend on the sharding. All tensors must be sharded over
    the last axis of one mesh.
    """
    reshard(model)
    tensors = model_tensors(model)
    sums = {name: _bit_sum(local_shard(tensor)).to(platform.local_device()) for name, tensor in tensors.items()}
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    if sharded:
        mesh = next(iter(sharded.values())).device_mesh
        total = torch.stack([sums[name] for name in sharded])
        dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
        sums |= dict(zip(sharded, total, strict=True))
    return sha256(repr([(name, int(value)) for name, value in sums.items()]).encode()).hexdigest()[:16]


def _bit_sum(tensor: Tensor) -> Tensor:
    """Sum the bits of `tensor` as integers: [] int64, may wrap around."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(bits).sum(dtype=torch.int64)


def describe(model: Mapping[str, Any]) -> str:
    """Format a fingerprint for messages."""
    words = f"{model['class']}, {model['num_parameters']:,} parameters, tensors {model['tensors']}"
    return f"{words}, {model['adapter']}" if "adapter" in model else words


class HostStash:
    """Moves device storages to the host and back. Every tensor, view and DTensor on them keeps its identity.

    The storages are resized to zero in place, as FSDP2 does for gathered parameters, so references to them (the
    optimizer, FSDP's buffers) stay valid.
    """

    def __init__(self) -> None:
        self._stashed: list[tuple[torch.UntypedStorage, Tensor]] = []

    def stash(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of `tensors` to the host (pinned if there is an accelerator) and free them.

        On a CPU, storages of memory-mapped files stay: they cannot be resized.
        """
        assert not self._stashed, "stashed already"
        storages = {storage.data_ptr(): storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}
        for storage in filter(torch.UntypedStorage.resizable, storages.values()):
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=platform.has_accelerator())
            host.copy_(_bytes(storage), non_blocking=True)
            self._stashed.append((storage, host))
        _synchronize()  # the copies must end before their sources are freed
        for storage, _ in self._stashed:
            storage.resize_(0)
        if platform.has_accelerator():
            torch.accelerator.empty_cache()

    def restore(self) -> None:
        """Refill the storages and free the host memory."""
        for storage, host in self._stashed:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        _synchronize()  # the copies must end before the host memory is freed
        self._stashed = []

    def __bool__(self) -> bool:
        return bool(self._stashed)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if platform.has_accelerator():
        torch.accelerator.synchronize()
