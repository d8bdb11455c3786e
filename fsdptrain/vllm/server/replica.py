"""What the verification of a weight sync reads from one server: checksums of its weights."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from safetensors import safe_open

from fsdptrain.errors import RolloutError
from fsdptrain.rollout.weight_sync.checksum import finish_checksums, start_checksum
from fsdptrain.types import ChecksumKind
from fsdptrain.vllm.server.client import (
    Deadline,
    ServerGoneError,
    ServerRefusedError,
    ServerSilentError,
    VLLMClient,
)
from fsdptrain.vllm.server.event_loop import EventLoop
from fsdptrain.vllm.server.push import Weights

log = logging.getLogger(__name__)

_HEALTH_S = 5.0


def checksums_of(
    client: VLLMClient, loop: EventLoop, names: Collection[str], kind: ChecksumKind, deadline: Deadline
) -> dict[str, int] | None:
    """None if the server is dead. RolloutError if it is healthy, but too slow or not reachable on this route."""
    try:
        return loop.run(read_checksums(client, names, kind, deadline))
    except ServerGoneError as error:
        if not loop.run(client.is_healthy(timeout=_HEALTH_S)):
            log.warning("%s; its weights are not verified", error)
            return None
        hint = "its weights cannot be read; --no-verify-weight-sync continues without verification"
        if isinstance(error, ServerSilentError):
            hint = "raise --weight-sync-timeout"
        raise RolloutError(f"{error}, though it is healthy: {hint}") from None
    except ServerRefusedError as error:
        raise RolloutError(str(error)) from None


async def read_checksums(
    client: VLLMClient, names: Collection[str], kind: ChecksumKind, deadline: Deadline
) -> dict[str, int]:
    """Checksums of the engine's own layers; tensors that cannot be read are left out. Raises ServerError.

    With pipeline parallelism each worker has other layers. Workers that share a tensor must agree: -1 if they do not.
    """
    workers = await client.call_workers("fsdptrain_checksums", sorted(names), kind, timeout=deadline.left)
    merged: dict[str, int] = {}
    for worker in workers:
        for name, value in worker.items():
            merged[name] = value if merged.get(name, value) == value else -1
    return merged


async def require_weights(client: VLLMClient, weights: Weights, deadline: Deadline) -> None:
    """ServerGoneError if a restarted server holds other weights than the files. Adapters cannot be read back.

    --verify-weight-sync covers servers that are up at a sync; this one would join later without verification.
    """
    sent = await asyncio.to_thread(_checksums_of_files, weights.files, "values")
    if not sent:
        return
    held = await read_checksums(client, list(sent), "values", deadline)
    wrong = [name for name in sent if name in held and held[name] != sent[name]]
    if wrong:  # or stored in another layout
        expected = await asyncio.to_thread(_checksums_of_files, weights.files, "multiset")
        found = await read_checksums(client, wrong, "multiset", deadline)
        wrong = [name for name in wrong if found.get(name) != expected[name]]
    if wrong:
        raise ServerGoneError(
            f"--verify-weight-sync: {client.url} was restarted and does not hold {wrong[0]} as it was sent, the first "
            f"of {len(wrong)} tensors of {len(sent)} that differ"
        )


def _checksums_of_files(files: Sequence[Path], kind: ChecksumKind) -> dict[str, int]:
    started = {}
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                started[name] = start_checksum(file.get_tensor(name), kind)
    return finish_checksums(started)
