"""Push one version of the weights to one server: as paths of files, or bucket by bucket over a process group.

Nothing is retried. A server whose update failed half way has layers without weights and must be restarted.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from safetensors.torch import load_file
from torch import Tensor

from fsdptrain.vllm.server.client import (
    Deadline,
    ServerError,
    ServerGoneError,
    ServerRefusedError,
    ServerSilentError,
    VLLMClient,
)
from fsdptrain.vllm.worker.weight_group import (
    Plane,
    WeightGroup,
    all_joined,
    create_store,
    local_address,
    pack_bucket,
    spec_of,
)

_POLL_S = 0.02
T = TypeVar("T")


@dataclass(frozen=True)
class Weights:
    """One version of the weights as files."""

    files: Sequence[Path]
    tag: str  # run id, slash, version
    previous_tag: str | None = None
    adapter: Path | None = None  # folder of a LoRA adapter, instead of `files`


class WeightTransfer(Protocol):
    async def send(self, client: VLLMClient, files: Sequence[Path], deadline: Deadline) -> None:
        """Send `files` between start and finish of an update. Raises ServerError."""
        ...

    def forget(self, client: VLLMClient) -> None:
        """The server was restarted or served another run: drop the connection to it."""
        ...


async def push(
    client: VLLMClient,
    weights: Weights,
    transfer: WeightTransfer,
    deadline: Deadline,
    *,
    keep_requests: bool = False,
) -> None:
    """Pause the engine, load `weights`, reset the prefix cache, check the version. The engine stays paused.

    keep_requests: running requests continue from their last token after the resume, with their cache recomputed under
    the new weights. Otherwise they are aborted.
    """
    await client.post(f"/pause?mode={'keep' if keep_requests else 'abort'}", timeout=deadline.left)
    has_previous = await client.version(timeout=deadline.left) == weights.previous_tag
    if weights.adapter is not None:
        await _load_adapter(client, weights.adapter, weights, deadline, unload_previous=has_previous)
    else:
        await _load_weights(client, weights, transfer, deadline, is_new=not has_previous)
    await client.reset_prefix_cache(timeout=deadline.left)
    version = await client.version(timeout=deadline.left)
    if version != weights.tag:
        raise ServerRefusedError(f"{client.url} holds version {version!r} after the update to {weights.tag!r}")


async def _load_weights(
    client: VLLMClient, weights: Weights, transfer: WeightTransfer, deadline: Deadline, *, is_new: bool
) -> None:
    if is_new:
        transfer.forget(client)
        await client.call_workers("fsdptrain_abort_update", timeout=deadline.left)
    await client.post("/start_weight_update", timeout=deadline.left)
    await transfer.send(client, weights.files, deadline)
    await client.post("/finish_weight_update", {"weight_version": weights.tag}, timeout=deadline.left)


async def _load_adapter(
    client: VLLMClient, folder: Path, weights: Weights, deadline: Deadline, *, unload_previous: bool
) -> None:
    """Under the name of its version."""
    if unload_previous:
        await client.post("/v1/unload_lora_adapter", {"lora_name": weights.previous_tag}, timeout=deadline.left)
    body = {"lora_name": weights.tag, "lora_path": str(folder.resolve())}
    await client.post("/v1/load_lora_adapter", body, timeout=deadline.left)
    await client.post("/update_weight_version", {"new_version": weights.tag}, timeout=deadline.left)


class FileTransfer:
    """--weight-transfer file: the server reads the files itself."""

    async def send(self, client: VLLMClient, files: Sequence[Path], deadline: Deadline) -> None:
        paths = [str(path.resolve()) for path in files]
        await client.post("/update_weights", {"update_info": {"paths": paths}}, timeout=deadline.left)

    def forget(self, client: VLLMClient) -> None: ...


class GroupTransfer:
    """--weight-transfer gloo|nccl: the trainer sends each file as one bucket to the workers of a server.

    Each server has its own group, so that one that dies does not affect the others.
    """

    def __init__(self, plane: Literal["gloo", "nccl"], timeout_s: float) -> None:
        """`timeout_s`: how long workers wait for a bucket."""
        self._plane: Plane = plane
        self._timeout_s = timeout_s
        self._groups: dict[str, WeightGroup] = {}  # by URL

    async def send(self, client: VLLMClient, files: Sequence[Path], deadline: Deadline) -> None:
        try:
            group = self._groups.pop(client.url, None) or await self._join(client, deadline)
            for path in files:
                tensors = await asyncio.to_thread(load_file, path)
                await self._send_bucket(client, group, tensors, deadline)
        except RuntimeError as error:  # torch's, about a peer that is gone or silent
            kind = ServerSilentError if "imed out" in str(error) or "imeout" in str(error) else ServerGoneError
            raise kind(f"{client.url} broke off a transfer over {self._plane}: {_first_line(error)}") from None
        self._groups[client.url] = group  # reused only after a transfer without errors

    def forget(self, client: VLLMClient) -> None:
        self._groups.pop(client.url, None)

    async def _join(self, client: VLLMClient, deadline: Deadline) -> WeightGroup:
        world_size = 1 + await client.world_size(timeout=deadline.left)
        address = local_address(client.host)
        store = create_store(address, world_size, deadline.left)
        join = {
            "plane": self._plane,
            "host": address,
            "port": store.port,
            "world_size": world_size,
            "timeout_s": self._timeout_s,
        }
        body = {"init_info": join}
        answer = asyncio.ensure_future(client.post("/init_weight_transfer_engine", body, timeout=deadline.left))
        try:
            while not all_joined(store, world_size) and not deadline.is_over and not answer.done():
                await asyncio.sleep(_POLL_S)
            if answer.done():  # too early: an error that says why its workers do not join
                answer.result()
            options = {"rank": 0, "world_size": world_size, "timeout_s": deadline.left, "address": address}
            return await _with_answer(asyncio.to_thread(WeightGroup, self._plane, store, **options), answer)
        finally:
            answer.cancel()

    async def _send_bucket(
        self, client: VLLMClient, group: WeightGroup, tensors: dict[str, Tensor], deadline: Deadline
    ) -> None:
        specs = [asdict(spec_of(name, tensor)) for name, tensor in tensors.items()]
        body = {"update_info": {"bucket": specs}}
        bucket = await asyncio.to_thread(pack_bucket, list(tensors.values()), group.device)
        answer = asyncio.ensure_future(client.post("/update_weights", body, timeout=deadline.left))
        try:
            await _with_answer(asyncio.to_thread(group.send, bucket, timeout_s=deadline.left), answer)
        finally:
            answer.cancel()


async def _with_answer(work: Coroutine[Any, Any, T], answer: "asyncio.Future[Any]") -> T:
    """The result of `work`, once the server has answered too. The server's error is the clearer one, if it has one."""
    task = asyncio.ensure_future(work)
    await asyncio.wait((task, answer), return_when=asyncio.FIRST_EXCEPTION)
    if not task.done():
        answer.result()  # raises: the server will not take part in `work`
    if isinstance(task.exception(), RuntimeError):
        await asyncio.wait((answer,))
        if isinstance(answer.exception(), ServerError):
            answer.result()
    elif task.exception() is None:
        await answer
    return task.result()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
