"""Push one version of the weights to one server: as paths of files, or file by file over a process group.

Nothing is retried. After an update that failed half way a server has layers without weights, until the next one.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server.client import Deadline, VLLMClient
from fsdptrain.vllm.worker.weight_group import WeightGroup, all_joined, create_store, local_address

_POLL_S = 0.02


async def push(
    client: VLLMClient,
    files: Sequence[Path],
    tag: str,
    deadline: Deadline,
    *,
    transfer: Literal["file", "gloo"] = "file",
    keep_requests: bool = False,
) -> None:
    """Pause the engine, load all weights, reset the prefix cache, check the version. The engine stays paused.

    tag: of the version: run id, slash, number
    keep_requests: running requests continue from their last token after the resume, with their cache recomputed under
    the new weights. Otherwise they are aborted.
    """
    await client.post(f"/pause?mode={'keep' if keep_requests else 'abort'}", timeout=deadline.left)
    if transfer == "file":  # the server reads the files itself
        await _load(client, "fsdptrain_load_files", [str(path.resolve()) for path in files], timeout=deadline.left)
    else:
        await send_files(client, files, deadline)
    await client.post("/update_weight_version", {"new_version": tag}, timeout=deadline.left)
    await client.reset_prefix_cache(timeout=deadline.left)
    version = await client.version(timeout=deadline.left)
    if version != tag:
        raise RolloutError(f"{client.url} holds version {version!r} after the update to {tag!r}")


async def _load(client: VLLMClient, method: str, *args: Any, timeout: float) -> None:
    """Call a method of all workers that loads weights. RolloutError with the errors of those that could not."""
    errors = {error for error in await client.call_workers(method, *args, timeout=timeout) if error is not None}
    if errors:
        raise RolloutError(f"{client.url} could not load the weights: {'; '.join(sorted(map(str, errors)))}")


async def send_files(client: VLLMClient, files: Sequence[Path], deadline: Deadline) -> None:
    """--weight-transfer gloo: the trainer broadcasts each file to the workers of the server."""
    world_size, address = 1 + await client.world_size(timeout=deadline.left), local_address(client.host)
    store = create_store(address, world_size, deadline.left)
    sizes = [path.stat().st_size for path in files]
    join = (address, store.port, world_size, deadline.left, sizes)
    answer = asyncio.ensure_future(_load(client, "fsdptrain_receive_weights", *join, timeout=deadline.left))
    groups: list[WeightGroup] = []  # until the server has answered: what was sent last may still be on its way

    def broadcast() -> RuntimeError | None:
        try:
            group = WeightGroup(store, rank=0, world_size=world_size, timeout_s=deadline.left, address=address)
            for path in files:
                group.send(torch.from_numpy(np.fromfile(path, np.uint8)))
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
    except RuntimeError as error:  # torch's, about a peer that is gone or silent
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RolloutError(f"{client.url} broke off a transfer over gloo: {why}") from None
    finally:
        answer.cancel()
