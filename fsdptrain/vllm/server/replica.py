"""What --sync-check asks of one server: checksums of its weights, and whether it forgot its cached prefixes."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from fsdptrain.errors import RolloutError
from fsdptrain.protocols import ReplicaGoneError
from fsdptrain.types import ChecksumKind, Completion, Prompt, SamplingParams
from fsdptrain.vllm.server.client import ServerGoneError, ServerRefusedError, ServerSilentError, VLLMClient
from fsdptrain.vllm.server.push import Deadline

_HEALTH_S = 5.0

Ask = Callable[..., tuple[list[Completion], list[Any]]]


class ServerCopy:
    """The copy of the model that one server holds."""

    def __init__(self, client: VLLMClient, ask: Ask, deadline: Deadline, *, reads_weights: bool) -> None:
        """`ask` is `VLLMServerEngine.ask`; `deadline` is that of `checksums`. reads_weights: False where another rank
        does."""
        self.name = client.url
        self._client = client
        self._ask = ask
        self._deadline = deadline
        self._reads_weights = reads_weights
        self._cached_tokens = 0

    def checksums(self, names: Collection[str], kind: ChecksumKind = "bits") -> dict[str, int] | None:
        """None where another rank looks at it. CopyGoneError of a server that does not answer to anything; RolloutError
        of one that is slow, or that somebody between keeps from us."""
        if not self._reads_weights:
            return None
        try:
            return read_checksums(self._client, names, kind, self._deadline)
        except ServerGoneError as error:
            if not self._client.is_healthy(timeout=_HEALTH_S):
                raise ReplicaGoneError(str(error)) from None
            way_out = "its weights cannot be looked at: --sync-check off goes on all the same"
            if isinstance(error, ServerSilentError):
                way_out = "--sync-timeout is too short for its weights"
            raise RolloutError(f"{error}, though it is well: {way_out}") from None
        except ServerRefusedError as error:
            raise RolloutError(str(error)) from None

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        completions, usages = self._ask(prompts, sampling, preferred=self._client.url)
        details = [usage.get("prompt_tokens_details") for usage in usages]
        if None in details:
            raise RolloutError(
                f"{self.name} does not say which prompts it has cached: start it with --enable-prompt-tokens-details, "
                "or leave the proof of hand-overs out by --sync-check off"
            )
        self._cached_tokens = sum(found["cached_tokens"] for found in details)
        return completions

    def cached_tokens(self) -> int:
        return self._cached_tokens


def read_checksums(
    client: VLLMClient, names: Collection[str], kind: ChecksumKind, deadline: Deadline
) -> dict[str, int]:
    """Of the layers that answer, of those of `names` that can be read. ServerError. With pipeline parallelism each
    worker has layers of its own."""
    body = {"method": "fsdptrain_checksums", "args": [sorted(names), kind]}
    workers = client.post("/collective_rpc", body, timeout=deadline.left)["results"]
    found = {name for worker in workers for name in worker}
    return {name: _merged([worker[name] for worker in workers if name in worker]) for name in found}


def _merged(sums: Sequence[int]) -> int:
    """Of the workers of a server that have a tensor: what they agree on, else a number that is no checksum."""
    return sums[0] if len(set(sums)) == 1 else -1
