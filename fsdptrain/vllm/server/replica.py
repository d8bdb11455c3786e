"""What the verification of a weight sync reads from one server: checksums of its weights, and its prefix cache."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open

from fsdptrain.errors import RolloutError
from fsdptrain.protocols import ReplicaGoneError
from fsdptrain.rollout.weight_sync.storage_mismatch import CHECKSUM_KINDS, SentTensor, SentTensors, classify
from fsdptrain.types import ChecksumKind, Completion, Prompt, SamplingParams
from fsdptrain.vllm.server.client import (
    Deadline,
    Generation,
    ServerGoneError,
    ServerRefusedError,
    ServerSilentError,
    VLLMClient,
)
from fsdptrain.vllm.server.event_loop import EventLoop
from fsdptrain.vllm.server.push import Weights

_HEALTH_S = 5.0

Generate = Callable[..., tuple[list[Completion], list[Generation]]]


class ServerReplica:
    """The copy of the model that one server holds."""

    def __init__(self, client: VLLMClient, loop: EventLoop, generate: Generate, deadline: Deadline | None) -> None:
        """`deadline` is that of `checksums`; None if another rank reads them."""
        self.name = client.url
        self._client = client
        self._loop = loop
        self._generate = generate
        self._deadline = deadline
        self._cached_tokens = 0

    def checksums(self, names: Collection[str], kind: ChecksumKind = "bits") -> dict[str, int] | None:
        """None if another rank reads them. ReplicaGoneError if the server is dead; RolloutError if it is healthy, but
        too slow or not reachable on this route."""
        if self._deadline is None:
            return None
        try:
            return self._loop.run(read_checksums(self._client, names, kind, self._deadline))
        except ServerGoneError as error:
            if not self._loop.run(self._client.is_healthy(timeout=_HEALTH_S)):
                raise ReplicaGoneError(str(error)) from None
            hint = "its weights cannot be read; --verify-weight-sync off continues without verification"
            if isinstance(error, ServerSilentError):
                hint = "raise --weight-sync-timeout"
            raise RolloutError(f"{error}, though it is healthy: {hint}") from None
        except ServerRefusedError as error:
            raise RolloutError(str(error)) from None

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        completions, generations = self._generate(prompts, sampling, preferred=self._client.url)
        if others := {generation.url for generation in generations} - {self._client.url}:
            self.name = f"{self._client.url} (it went down: {', '.join(sorted(others))} answered the probe)"
        cached = [generation.cached_tokens for generation in generations]
        if None in cached:
            raise RolloutError(
                f"{self.name} does not report cached tokens: start it with --enable-prompt-tokens-details, or skip the "
                "verification with --verify-weight-sync off"
            )
        self._cached_tokens = sum(filter(None, cached))
        return completions

    def cached_tokens(self) -> int:
        return self._cached_tokens


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
    sent = await asyncio.to_thread(_checksums_of_files, weights.files, ["bits"])
    if not sent:
        return
    held = await read_checksums(client, list(sent), "bits", deadline)
    wrong = [name for name in sent if name in held and held[name] != sent[name].checksums["bits"]]
    if wrong:
        expected = await asyncio.to_thread(_checksums_of_files, weights.files, CHECKSUM_KINDS, only=wrong)
        found = {kind: await read_checksums(client, wrong, kind, deadline) for kind in CHECKSUM_KINDS if kind != "bits"}
        mismatches = classify(wrong, list(held), expected, lambda _, kind: found[kind])
        wrong = [name for name in wrong if name not in mismatches]
    if wrong:
        raise ServerGoneError(
            f"--verify-weight-sync: {client.url} was restarted and does not hold {wrong[0]} as it was sent, the first "
            f"of {len(wrong)} tensors of {len(sent)} that differ"
        )


def _checksums_of_files(
    files: Sequence[Path], kinds: Sequence[ChecksumKind], only: Collection[str] | None = None
) -> Mapping[str, SentTensor]:
    found = SentTensors()
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if only is None or name in only:
                    found.add(name, file.get_tensor(name), kinds)
    return found.finish()
