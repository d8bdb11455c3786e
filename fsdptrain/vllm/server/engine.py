"""The rollout engine of vLLM servers, over HTTP: docs/rollouts.md.

Rank 0 pushes new weights to all servers; every rank generates completions of its prompts. A server that fails
or does not answer ends the run.
"""

import asyncio
import resource
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.protocols import Naming
from fsdptrain.types import Completion, Prompt, SamplingParams
from fsdptrain.vllm.config import ServerConfig, VllmConfig
from fsdptrain.vllm.options import completion_of, sampling_options
from fsdptrain.vllm.server.client import VLLMClient, shown
from fsdptrain.vllm.server.event_loop import EventLoop
from fsdptrain.vllm.server.transfer import Transfer, Update

T = TypeVar("T")

_FLAG = "--rollout-engine vllm-server"
_GENERATE = "/inference/v1/generate"
_MAX_IN_FLIGHT = 512  # requests of one rank to one server


class VLLMServerEngine:
    """Generates with the servers of `clients`. Has no weights until `update_weights`.

    Logprobs are of the sampling distribution (vLLM's `processed_logprobs`).
    """

    weight_naming: Naming = "hub"

    def __init__(
        self,
        config: Config,
        clients: Sequence[VLLMClient],
        run_id: str,
        *,
        loop: EventLoop,
        transfer: Transfer,
        stop_token_ids: Sequence[int],
        cleanup: ExitStack,
    ) -> None:
        """
        run_id: part of each version tag, so that weights of another run are never used.
        cleanup: ends the servers that the run has started, and deletes the weights.
        """
        self.clients = clients
        self.policy_version = 0
        self.response_timeout = config.section(ServerConfig).weight_sync_timeout
        self.request_timeout = config.section(VllmConfig).timeout
        self._keeps_requests = config.sync.max_staleness > 0  # running requests continue after a weight sync
        self._loop = loop
        self._run_id, self._stop_token_ids = run_id, stop_token_ids
        self._transfer, self._cleanup = transfer, cleanup
        self._has_weights = self._is_checked = False
        self._is_open = asyncio.Event()  # clear during a weight sync, which holds new requests
        self._is_open.set()
        self._checksums: dict[str, dict[str, int]] = {}  # by URL, of the last update; on rank 0
        self._num_in_flight = Counter[str]()  # requests by URL; only the event loop changes it
        hard, most = resource.getrlimit(resource.RLIMIT_NOFILE)[1], _MAX_IN_FLIGHT * len(clients)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a request opens a connection
        self._slots = asyncio.Semaphore(most if hard == resource.RLIM_INFINITY else min(most, hard // 2))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Push the tensors of a checkpoint, by the names of its files, to all servers. Collective."""
        with raise_on_all_ranks(RolloutError, _FLAG):
            updates = self._transfer(weights)
        self._is_open.clear()
        is_updated = False
        try:
            with raise_on_all_ranks(RolloutError, _FLAG):
                if dist.get_rank() == 0:
                    self._push(iter(updates), self._tag_of(policy_version))
                else:
                    list(updates)
            self.policy_version, is_updated, self._is_checked = policy_version, True, False
        finally:
            self._loop.run(self._open(has_weights=is_updated))

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Return `num_samples` completions per prompt, in the order of the prompts. Each request has another seed."""
        options = {"priority": -1} if self._keeps_requests else {}
        return self._loop.run(self._generate_all(prompts, sampling, options))

    def generate_in_flight(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Like `generate`, from any thread. A weight sync pauses the requests; they keep their tokens and continue."""
        return self._loop.run(self._generate_all(prompts, sampling, {}))

    def expect_checksums(self) -> None:
        self._is_checked = True

    def checksums(self) -> dict[str, dict[str, int]]:
        return self._checksums

    def sleep(self) -> None:
        """Do nothing: servers use other devices and keep weights and cache."""

    def wake_up(self) -> None: ...

    def close(self) -> None:
        """Cancel requests in flight and stop the servers that this run has started."""
        self._loop.close()
        self._cleanup.close()

    def _tag_of(self, policy_version: int) -> str:
        return f"{self._run_id}/{policy_version}"

    def _push(self, updates: Iterator[Update], tag: str) -> None:
        """Pause all servers, which empties their caches, load all weights, check the versions, and resume all.

        Nothing is retried. After an update that failed half way a server has layers without weights and stays paused,
        until the next one.
        """
        end = time.monotonic() + self.response_timeout

        def left() -> float:
            return max(0.01, end - time.monotonic())

        def post(path: str, body: Any = None) -> Coroutine[Any, Any, list[Any]]:
            return self._all_of(client.post(path, body, timeout=left()) for client in self.clients)

        try:
            self._loop.run(post(f"/pause?mode={'keep' if self._keeps_requests else 'abort'}"))
            if self._is_checked:
                self._loop.run(post("/collective_rpc", {"method": "fsdptrain_expect_checksums"}))
            self._loop.run(post("/start_weight_update"))
            for info, meanwhile in updates:
                taken = self._loop.start(post("/update_weights", {"update_info": info}))
                meanwhile()
                taken.result()
            self._loop.run(post("/finish_weight_update", {"weight_version": tag}))
            found = self._loop.run(self._all_of(client.require_updated(tag, timeout=left()) for client in self.clients))
            self._checksums = {client.url: sums for client, sums in zip(self.clients, found, strict=True)}
            self._loop.run(post("/resume"))
        finally:
            for _ in updates:  # iterating is collective
                pass

    async def _all_of(self, works: Iterable[Awaitable[T]]) -> list[T]:
        """Wait for all servers, also after an error, so that no transfer continues in the background."""
        tasks = [asyncio.ensure_future(work) for work in works]
        await asyncio.wait(tasks)
        if errors := [error for task in tasks if (error := task.exception())]:
            raise RolloutError(
                f"not all servers took the new weights in {self.response_timeout:g} s (--weight-sync-timeout): "
                f"{'; '.join(map(str, errors))}"
            ) from errors[0]
        return [task.result() for task in tasks]

    async def _open(self, *, has_weights: bool) -> None:
        """Continue the requests that a weight sync held."""
        self._has_weights = has_weights
        self._is_open.set()

    async def _generate_all(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, options: dict[str, Any]
    ) -> list[Completion]:
        await self._is_open.wait()
        if not self._has_weights:
            raise RolloutError("the servers have no weights: call update_weights first")
        version = self.policy_version
        tasks: list[asyncio.Task[Completion]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    client = self._choose(prompt)  # the same for all samples, which share the cached prompt
                    self._num_in_flight[client.url] += sampling.num_samples
                    for index in range(sampling.num_samples):
                        params = sampling_options(prompt, index, sampling, self._stop_token_ids)
                        body = {"token_ids": prompt.token_ids, "sampling_params": params, **options}
                        task = group.create_task(self._complete(client, prompt, body, version, sampling.with_routes))
                        task.add_done_callback(lambda _, url=client.url: self._num_in_flight.subtract([url]))
                        tasks.append(task)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _choose(self, prompt: Prompt) -> VLLMClient:
        """Return the server with the fewest requests of this rank; on ties, the same for all calls of an episode."""
        episode = prompt.id.rpartition("@")[0] or prompt.id  # ROW@EPOCH#SAMPLE@CALL
        return min(self.clients, key=lambda x: (self._num_in_flight[x.url], zlib.crc32(f"{x.url} {episode}".encode())))

    async def _complete(
        self, client: VLLMClient, prompt: Prompt, body: dict[str, Any], version: int, with_routes: bool
    ) -> Completion:
        """Raises RolloutError if the answer has tokens of weights before `version`, or of another run."""
        async with self._slots:
            answer = await self._ask(client, body)
        try:
            choice = answer[0]
            token_ids, spans = choice["token_ids"], choice["weight_versions"] or []
            logprobs = [float(found["logprob"]) for found in choice["logprobs"]["content"]]
            tags = [str(s["version"]) for s in spans for _ in range(s["start"], min(s["end"], len(token_ids)))]
            if not 0 < len(token_ids) == len(logprobs) == len(tags):
                raise ValueError(f"a logprob and a version of each of {len(token_ids)} tokens")
        except (LookupError, TypeError, ValueError) as error:
            raise RolloutError(f"{client.url} answered POST {_GENERATE} without {error!r}: {shown(answer)}") from None
        for tag in sorted(set(tags)):
            run_id, _, number = tag.rpartition("/")
            if run_id != self._run_id or int(number) < version:
                raise RolloutError(
                    f"{client.url} answered with weights {tag}, not {self._tag_of(version)}: it was restarted, or "
                    "another run uses it"
                )
        experts = choice.get("routed_experts") if with_routes else None
        versions = [int(tag.rpartition("/")[2]) for tag in tags]
        return completion_of(prompt, token_ids, logprobs, choice["finish_reason"], versions, experts, source=client.url)

    async def _ask(self, client: VLLMClient, body: dict[str, Any]) -> Any:
        """Send a request. While the server does not answer, check its health. Raises RolloutError if it fails."""
        hint = "; raise --rollout-timeout, or generate fewer tokens per call"
        request = client.post(_GENERATE, body, "choices", timeout=self.request_timeout, hint=hint)
        answer = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait([answer], timeout=self.response_timeout))[0]:
                await client.version(timeout=self.response_timeout)
            return await answer
        finally:
            answer.cancel()
