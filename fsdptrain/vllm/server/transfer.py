"""How weights reach servers, in vLLM's protocol of weight updates.

file: rank 0 writes all weights to a file, which the servers read.
nccl: rank 0 broadcasts them from its GPU to the servers' GPUs, over one group for the whole run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.rendezvous import address_towards
from fsdptrain.vllm.server.checks import is_local
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.event_loop import EventLoop, all_of
from fsdptrain.vllm.weight_file import WeightFile

Weights = Iterable[tuple[str, Tensor]]
Update = tuple[dict[str, Any], Callable[[], None]]  # what `update_weights` takes, and what to do while servers take it
# Called on every rank; rank 0 sends. Iterates all weights, immediately or while its result is iterated. On other ranks
# the result is empty.
Transfer = Callable[[Weights], Iterable[Update]]
_PART_BYTES = 2**30  # of one broadcast


def over_file(file: WeightFile | None, weights: Weights) -> list[Update]:
    """Write all weights before any server is paused. file: None on ranks that do not send."""
    if file is None:
        return list(take_part(weights))
    try:
        return [(file.write(weights), lambda: None)]
    except OSError as error:
        raise RolloutError(f"--weight-sync-dir: cannot write the weights, use another one: {error}") from error


def take_part(weights: Weights) -> Iterator[Update]:
    """Iterate the weights, which is collective, on a rank that does not send."""
    for _ in weights:
        yield from ()


class NcclTransfer:
    """Sends weights from the GPU of rank 0 to the servers' GPUs, part by part. Not yet run: it needs two GPUs."""

    def __init__(self, servers: Sequence[VLLMClient], loop: EventLoop, timeout: float) -> None:
        self._group = _join(servers, loop, timeout)
        self._stream = torch.cuda.Stream()  # a hanging broadcast blocks nothing else

    def __call__(self, weights: Weights) -> Iterator[Update]:
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


def _join(servers: Sequence[VLLMClient], loop: EventLoop, timeout: float) -> Any:
    """Return a communicator of vLLM with this rank and all workers of all servers."""
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
    sizes = loop.run(all_of(server.get("/get_world_size", "world_size", timeout=timeout) for server in servers))
    far = next((server.url for server in servers if not is_local(server.url)), servers[0].url)
    address = address_towards(urlsplit(far).hostname)  # of servers here the loopback: the store trusts who connects
    group = {"master_address": address, "master_port": get_open_port(), "world_size": 1 + sum(sizes)}
    group |= {"packed": True, "packed_buffer_size_bytes": _PART_BYTES}
    infos = [{"init_info": group | {"rank_offset": 1 + sum(sizes[:i])}} for i in range(len(servers))]
    path, pairs = "/init_weight_transfer_engine", zip(servers, infos, strict=True)
    joined = loop.start(all_of(server.post(path, info, timeout=timeout) for server, info in pairs))
    communicator = trainer_init(group)  # waits for the workers
    joined.result()
    return communicator
