"""Weight transfer between the trainer and one engine: safetensors files over a separate process group.

Trainer and engine import this in different environments: it needs only torch, numpy and safetensors. The trainer is
rank 0 of the group, the workers of the engine follow.
"""

import json
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import _TYPES
from torch import Tensor

_JOINED = "joined"  # counts the ranks but 0 that are creating their `WeightGroup`


def tensors_of(file: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a safetensors file, as views of its bytes, on their device. [bytes] u8

    The format: 8 bytes with the length of the header, the header in JSON, and the tensors, aligned by their dtype.
    """
    start = 8 + int(file[:8].cpu().view(torch.int64))
    header = json.loads(bytes(file[8:start].cpu().numpy()))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            yield name, file[begin:end].view(_TYPES[entry["dtype"]]).view(entry["shape"])


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
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(
        address, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=handle
    )


def join_store(host: str, port: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """The same store, for the other ranks."""
    store = dist.TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s))
    store.add(_JOINED, 1)
    return store


def all_joined(store: dist.TCPStore, world_size: int) -> bool:
    """Whether all ranks but 0 are creating their `WeightGroup`: rank 0 should not block before."""
    return store.add(_JOINED, 0) == world_size - 1


class WeightGroup:
    """A process group of the trainer (rank 0) and the workers of one engine, separate from the default group."""

    def __init__(self, store: dist.TCPStore, *, rank: int, world_size: int, timeout_s: float, address: str) -> None:
        """Blocks until all ranks have joined; torch raises an error after `timeout_s`.

        address: of this machine, that the others can reach. Torch would resolve the host name, which is the loopback
        interface on some machines.
        """
        self._store = store  # the group needs it as long as it lives
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname=address)], timedelta(seconds=timeout_s)
        self._group = gloo(dist.PrefixStore("weights", store), rank, world_size, options)

    def send(self, file: Tensor) -> None:
        """Broadcast from rank 0. [bytes] u8"""
        self._group.broadcast([file], dist.BroadcastOptions()).wait()

    def receive(self, nbytes: int) -> Tensor:
        """The next file of rank 0. [nbytes] u8"""
        file = torch.empty(nbytes, dtype=torch.uint8)
        self.send(file)  # every rank makes the same call
        return file
