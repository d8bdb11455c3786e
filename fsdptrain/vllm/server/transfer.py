"""How weights reach servers, in vLLM's protocol of weight updates.

file: rank 0 writes all weights to a file, which the servers read.
nccl: rank 0 broadcasts them from its GPU to those of the servers, over one group for the whole run.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.vllm.server.checks import is_local
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.event_loop import EventLoop, all_of
from fsdptrain.vllm.weight_file import WeightFile

Weights = Iterable[tuple[str, Tensor]]
Update = tuple[dict[str, Any], Callable[[], None]]  # what `update_weights` takes, and what to do while servers take it
_PART_BYTES = 2**30  # of one broadcast


class Transfer(Protocol):
    """Of every rank; rank 0 sends."""

    def updates(self, weights: Weights) -> Iterable[Update]:
        """Iterate `weights` to the end, at once or as the result is iterated. No updates on ranks that do not send."""
        ...


class FileTransfer:
    """All weights are gathered and written before any server is paused."""

    def __init__(self, file: WeightFile | None) -> None:
        """file: None on ranks that do not send"""
        self._file = file

    def updates(self, weights: Weights) -> list[Update]:
        if self._file is None:
            return _take_part(weights)
        try:
            return [(self._file.write(weights), lambda: None)]
        except OSError as error:
            raise RolloutError(f"--weight-sync-dir: cannot write the weights, use another one: {error}") from error


class NcclTransfer:
    """From GPU to GPU, in parts, each when it is gathered. Not yet run: it needs two GPUs."""

    def __init__(self, servers: Sequence[VLLMClient], loop: EventLoop, timeout: float) -> None:
        """servers: none on ranks that do not send"""
        self._group: Any = _join(servers, loop, timeout) if servers else None
        self._stream = torch.cuda.Stream()  # so that a broadcast that hangs holds up nothing else

    def updates(self, weights: Weights) -> Iterator[Update]:
        if self._group is None:
            yield from _take_part(weights)
            return
        from vllm.distributed.weight_transfer.packed_tensor import (  # pyright: ignore[reportMissingImports]
            pack_tensors,
        )

        weights = iter(weights)
        try:
            while (part := pack_tensors(weights, itemgetter(1), _PART_BYTES)) is not None:
                dtypes = [str(dtype).removeprefix("torch.") for dtype in part.dtypes]
                info = {"names": part.names, "dtype_names": dtypes, "shapes": part.shapes}
                yield info, lambda packed=part.packed_tensor: self._broadcast(packed)
        finally:
            for _ in weights:  # the other ranks take part in every gather
                pass

    def _broadcast(self, packed: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        packed.record_stream(self._stream)
        self._group.broadcast(packed, src=0, stream=self._stream)


def _take_part(weights: Weights) -> list[Update]:
    """Iterating is collective."""
    for _ in weights:
        pass
    return []


def _join(servers: Sequence[VLLMClient], loop: EventLoop, timeout: float) -> Any:
    """vLLM's communicator of this rank and all workers of all servers."""
    try:
        from vllm.distributed.weight_transfer.nccl_common import (  # pyright: ignore[reportMissingImports] - an extra
            trainer_init,
        )
        from vllm.utils.network_utils import get_open_port  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"--weight-transfer nccl: the trainer cannot import vLLM ({error}); in the clone, pip install "
            "'.[vllm]', or use --weight-transfer file"
        ) from error
    sizes = loop.run(all_of(server.world_size(timeout=timeout) for server in servers))
    group = {"master_address": _address(servers), "master_port": get_open_port(), "world_size": 1 + sum(sizes)}
    infos = [
        {**group, "rank_offset": 1 + sum(sizes[:i]), "packed": True, "packed_buffer_size_bytes": _PART_BYTES}
        for i in range(len(servers))
    ]
    path = "/init_weight_transfer_engine"
    posts = [
        server.post(path, {"init_info": info}, timeout=timeout) for server, info in zip(servers, infos, strict=True)
    ]
    joined = loop.start(all_of(posts))
    communicator = trainer_init(group)  # waits for the workers
    joined.result()
    return communicator


def _address(servers: Sequence[VLLMClient]) -> str:
    """The address of this machine that the servers can reach."""
    far = next((server for server in servers if not is_local(server.host)), servers[0])
    family, kind, proto, _, address = socket.getaddrinfo(far.host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)  # a datagram socket sends nothing here
        return probe.getsockname()[0]
