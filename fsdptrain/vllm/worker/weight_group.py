"""How weights travel between the trainer and one engine: packed into buckets, over a group of their own.

Trainer and engine import this in different environments: it needs torch and nothing else. The trainer is rank 0 of the
group, the workers of the engine come after it.
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
_ALIGNMENT = 16  # bytes; a view in another dtype must begin at a multiple of its item size


@dataclass(frozen=True)
class Spec:
    """One tensor of a bucket, as it is announced before the bucket is sent."""

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
    """All of `tensors` in one row. [bytes] u8"""
    bucket = torch.zeros(sum(_padded(tensor.nbytes) for tensor in tensors), dtype=torch.uint8, device=device)
    start = 0
    for tensor in tensors:
        bucket[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        start += _padded(tensor.nbytes)
    return bucket


def unpack_bucket(bucket: Tensor, specs: Sequence[Spec]) -> list[tuple[str, Tensor]]:
    """Views of `bucket`, with their names."""
    found, start = [], 0
    for spec in specs:
        part = bucket[start : start + spec.nbytes]
        found.append((spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)))
        start += _padded(spec.nbytes)
    return found


def own_address(host: str) -> str:
    """The address of this machine by which `host` can reach it."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        return probe.getsockname()[0]


def meeting_point(address: str, world_size: int, timeout_s: float) -> dist.TCPStore:
    """A store of rank 0, that listens at `address` and nowhere else."""
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


def all_here(store: dist.TCPStore, world_size: int) -> bool:
    """Whether every rank but 0 has begun to make its `WeightGroup`: then rank 0 does not wait for one that is gone."""
    return store.check([_here(rank) for rank in range(1, world_size)])


def _here(rank: int) -> str:
    return f"here/{rank}"


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class WeightGroup:
    """A group of the trainer (rank 0) and the workers of one engine. It leaves the default group alone."""

    def __init__(
        self, plane: Plane, store: dist.TCPStore, *, rank: int, world_size: int, timeout_s: float, address: str
    ) -> None:
        """Returns when all ranks are there; an error of torch after `timeout_s`.

        address: of this machine, by which the others reach it. Torch would take what the name of the machine stands
        for, on some the loopback interface.
        """
        self._store = store  # the group talks through it: it must live as long
        if rank:
            store.set(_here(rank), "")
        prefixed, timeout = dist.PrefixStore("weights", store), timedelta(seconds=timeout_s)
        self._group: Any  # torch does not declare what both kinds can do
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
        """From rank 0 to all others. Returns when it has gone out, on a GPU when the device has done it.

        `timeout_s` in place of the group's own.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        self._group.broadcast([bucket], options).wait()
        if bucket.is_cuda:
            torch.accelerator.synchronize()

    def receive(self, nbytes: int) -> Tensor:
        """A bucket of rank 0. [nbytes] u8"""
        bucket = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.send(bucket)  # a broadcast is the same call on every rank
        return bucket
