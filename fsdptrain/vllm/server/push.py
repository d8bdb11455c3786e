"""Push one version of the weights to one server: as paths of files, or file by file over a process group.

Nothing is retried. A server whose update failed half way has layers without weights and must be restarted.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fsdptrain.vllm.server.client import Deadline, ServerGoneError, ServerRefusedError, ServerSilentError, VLLMClient
from fsdptrain.vllm.worker.sparse_delta import Bytes
from fsdptrain.vllm.worker.weight_group import Plane, WeightGroup, all_joined, create_store, local_address

_POLL_S = 0.02


@dataclass(frozen=True)
class Weights:
    """One version of the weights as files."""

    files: Sequence[Path]
    tag: str  # run id, slash, version
    deltas: Sequence[Bytes | None] = ()  # by file, against those of `previous_tag`; None: send the file
    previous_tag: str | None = None  # of the version that `deltas` are against, or of the previous adapter
    adapter: Path | None = None  # folder of a LoRA adapter, instead of `files`


async def push(
    client: VLLMClient,
    weights: Weights,
    deadline: Deadline,
    *,
    transfer: Literal["file", "gloo", "nccl"] = "file",
    keep_requests: bool = False,
) -> int:
    """Pause the engine, load `weights`, reset the prefix cache, check the version. The engine stays paused.

    Returns the bytes that the server has read or received.

    keep_requests: running requests continue from their last token after the resume, with their cache recomputed under
    the new weights. Otherwise they are aborted.
    """
    await client.post(f"/pause?mode={'keep' if keep_requests else 'abort'}", timeout=deadline.left)
    if weights.adapter is not None:
        nbytes = sum(path.stat().st_size for path in weights.adapter.iterdir())
        await _load_adapter(client, weights.adapter, weights, deadline)
    elif transfer == "file":
        nbytes = sum(path.stat().st_size for path in weights.files)
        await load_files(client, weights.files, deadline)
    else:
        nbytes = await send_files(client, weights, deadline, transfer)
    await client.post("/update_weight_version", {"new_version": weights.tag}, timeout=deadline.left)
    await client.reset_prefix_cache(timeout=deadline.left)
    version = await client.version(timeout=deadline.left)
    if version != weights.tag:
        raise ServerRefusedError(f"{client.url} holds version {version!r} after the update to {weights.tag!r}")
    return nbytes


async def load_files(client: VLLMClient, files: Sequence[Path], deadline: Deadline) -> None:
    """--weight-transfer file: the server reads the files itself."""
    paths = [str(path.resolve()) for path in files]
    await _load(client, "fsdptrain_load_files", paths, timeout=deadline.left)


async def _load(client: VLLMClient, method: str, *args: Any, timeout: float) -> None:
    """Call a method of all workers that loads weights. ServerRefusedError with the errors of those that could not."""
    errors = {error for error in await client.call_workers(method, *args, timeout=timeout) if error is not None}
    if errors:
        raise ServerRefusedError(f"{client.url} could not load the weights: {'; '.join(sorted(map(str, errors)))}")


async def send_files(client: VLLMClient, weights: Weights, deadline: Deadline, plane: Plane) -> int:
    """--weight-transfer gloo|nccl: the trainer broadcasts each file to the workers of the server. Returns the bytes.

    A server whose workers still hold the files of the previous version gets sparse deltas. Each server has its own
    group, so that one that dies does not affect the others.
    """
    parts: list[Path | Bytes] = list(weights.files)
    base = None
    if weights.previous_tag is not None and any(delta is not None for delta in weights.deltas):
        held = await client.call_workers("fsdptrain_last_received", timeout=deadline.left)
        if set(held) == {weights.previous_tag}:
            base = weights.previous_tag
            parts = [path if delta is None else delta for path, delta in zip(parts, weights.deltas, strict=True)]
    world_size, address = 1 + await client.world_size(timeout=deadline.left), local_address(client.host)
    store = create_store(address, world_size, deadline.left)
    sizes = [path.stat().st_size for path in weights.files]
    sent_sizes = [size if isinstance(part, Path) else len(part) for part, size in zip(parts, sizes, strict=True)]
    join = (plane, address, store.port, world_size, deadline.left, sizes, sent_sizes, weights.tag, base)
    answer = asyncio.ensure_future(_load(client, "fsdptrain_receive_weights", *join, timeout=deadline.left))
    groups: list[WeightGroup] = []  # until the server has answered: what was sent last may still be on its way

    def broadcast() -> RuntimeError | None:
        try:
            group = WeightGroup(plane, store, rank=0, world_size=world_size, timeout_s=deadline.left, address=address)
            for part in parts:
                sent = np.fromfile(part, np.uint8) if isinstance(part, Path) else part
                group.send(torch.from_numpy(sent).to(group.device))
        except RuntimeError as error:
            return error.with_traceback(None)  # it would keep the group, in which the other workers wait
        groups.append(group)
        return None

    try:
        while not all_joined(store, world_size) and not answer.done():
            await asyncio.sleep(_POLL_S)
        if answer.done():  # too early: an error that says why its workers do not join
            answer.result()
        sent = asyncio.ensure_future(asyncio.to_thread(broadcast))
        await asyncio.wait((sent, answer), return_when=asyncio.FIRST_EXCEPTION)
        answer.result()  # the clearer error, if there is one
        if (failed := await sent) is not None:
            raise failed
        for group in groups:
            group.close()
    except RuntimeError as error:  # torch's, about a peer that is gone or silent
        kind = ServerSilentError if "imed out" in str(error) or "imeout" in str(error) else ServerGoneError
        raise kind(f"{client.url} broke off a transfer over {plane}: {_first_line(error)}") from None
    finally:
        answer.cancel()
    return sum(sent_sizes)


async def _load_adapter(client: VLLMClient, folder: Path, weights: Weights, deadline: Deadline) -> None:
    """Under the name of its version."""
    if await client.version(timeout=deadline.left) == weights.previous_tag:
        await client.post("/v1/unload_lora_adapter", {"lora_name": weights.previous_tag}, timeout=deadline.left)
    body = {"lora_name": weights.tag, "lora_path": str(folder.resolve())}
    await client.post("/v1/load_lora_adapter", body, timeout=deadline.left)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
