"""Weight transfer between the trainer and one engine: packed buckets over a separate process group.

Trainer and engine import this in different environments: it needs only torch. The trainer is rank 0 of the group, the
workers of the engine follow.
"""

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Plane = Literal["gloo", "nccl"]
_ALIGNMENT = 16  # bytes; a view in another dtype must start at a multiple of its item size


@dataclass(frozen=True)
class Spec:
    """One tensor of a bucket; sent before the bucket."""

    name: str
    dtype: str  # float32, bfloat16, ...
    shape: list[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


def spec_of(name: str, tensor: Tensor) -> Spec:
    return Spec(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


def bucket_size(specs: Sequence[Spec]) -> int:
    """[bytes]"""
    return sum(_padded(spec.nbytes) for spec in specs)


def pack_bucket(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """All `tensors` in one buffer. [bytes] u8"""
    bucket = torch.zeros(sum(_padded(tensor.nbytes) for tensor in tensors), dtype=torch.uint8, device=device)
    start = 0
    for tensor in tensors:
        bucket[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        start += _padded(tensor.nbytes)
    return bucket


def unpack_bucket(bucket: Tensor, specs: Sequence[Spec]) -> list[tuple[str, Tensor]]:
    """Names and tensors, which are views of `bucket`."""
    found, start = [], 0
    for spec in specs:
        part = bucket[start : start + spec.nbytes]
        found.append((spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)))
        start += _padded(spec.nbytes)
    return found


def local_address(host: str) -> str:
    """The address of this machine that `host` can reach."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)  # a datagram socket sends nothing here
        return probe.getsockname()[0]


def create_store(address: str, world_size: int, timeout_s: float) -> dist.TCPStore:
    """The store of rank 0. It listens at `address` only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        port, handle = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=handle,
    )


def all_joined(store: dist.TCPStore, world_size: int) -> bool:
    """Whether all ranks but 0 are creating their `WeightGroup`: rank 0 should not block before."""
    return store.check([_joined(rank) for rank in range(1, world_size)])


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class WeightGroup:
    """A process group of the trainer (rank 0) and the workers of one engine, separate from the default group."""

    def __init__(
        self, plane: Plane, store: dist.TCPStore, *, rank: int, world_size: int, timeout_s: float, address: str
    ) -> None:
        """Blocks until all ranks have joined; torch raises an error after `timeout_s`.

        address: of this machine, that the others can reach. Torch would resolve the host name, which is the loopback
        interface on some machines.
        """
        self._store = store  # the group needs it as long as it lives
        if rank:
            store.set(_joined(rank), "")
        prefixed, timeout = dist.PrefixStore("weights", store), timedelta(seconds=timeout_s)
        self._group: Any  # torch declares no common base
        self.device = torch.device("cpu")
        if plane == "nccl":
            self.device = torch.device("cuda", torch.accelerator.current_device_index())
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(prefixed, rank, world_size, options)
        else:
            kind: Any = dist.ProcessGroupGloo
            own = kind._Options()
            own._devices, own._timeout = [kind.create_device(hostname=address)], timeout
            self._group = kind(prefixed, rank, world_size, own)

    def send(self, bucket: Tensor, *, timeout_s: float | None = None) -> None:
        """Broadcast from rank 0. Returns when `bucket` has been sent, on a GPU when the device is done.

        `timeout_s` replaces the group's timeout.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        self._group.broadcast([bucket], options).wait()
        if bucket.is_cuda:
            torch.accelerator.synchronize()

    def receive(self, nbytes: int) -> Tensor:
        """The next bucket of rank 0. [nbytes] u8"""
        bucket = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.send(bucket)  # every rank makes the same call
        return bucket
