"""The rollout engine of vLLM servers, over HTTP: docs/rollouts.md.

Rank 0 pushes new weights to all servers; every rank generates the completions of its own prompts. A server that fails
or does not answer ends the run.
"""

import asyncio
import resource
import threading
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.protocols import Naming
from fsdptrain.types import Completion, Prompt, SamplingParams
from fsdptrain.vllm.config import ServerConfig, VllmConfig
from fsdptrain.vllm.options import routes_of, sampling_options
from fsdptrain.vllm.server.client import Deadline, Generation, VLLMClient
from fsdptrain.vllm.server.event_loop import EventLoop, all_of
from fsdptrain.vllm.server.transfer import Transfer, Update

_FLAG = "--rollout-engine vllm-server"
_MAX_IN_FLIGHT = 512  # requests of one rank to one server


class VLLMServerEngine:
    """Generates with the servers of `clients`. Has no weights until `update_weights`.

    Logprobs are those of the distribution that was sampled from (vLLM's `processed_logprobs`).
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
        self._stop_token_ids = tuple(stop_token_ids)
        self._run_id = run_id
        self._transfer, self._cleanup = transfer, cleanup
        self._has_weights = False  # nor during a sync
        self._num_in_flight = Counter[str]()  # requests by URL; only the event loop changes it
        self._slots = asyncio.Semaphore(_max_connections(len(clients)))
        self._is_syncing = self._is_closed = self._is_checked = False
        self._changed = threading.Condition()  # guards `_has_weights`, `_is_syncing` and `_is_closed`

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Push the tensors of a checkpoint, by the names of its files, to all servers. Collective."""
        with raise_on_all_ranks(RolloutError, _FLAG):
            updates = self._transfer.updates(weights)
        with self._syncing():
            with raise_on_all_ranks(RolloutError, _FLAG):
                if dist.get_rank() == 0:
                    self._push(iter(updates), self._tag_of(policy_version))
                else:
                    list(updates)
            self.policy_version, self._has_weights, self._is_checked = policy_version, True, False

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Return `num_samples` completions per prompt, in the order of the prompts. Each request has another seed."""
        options = {"priority": -1} if self._keeps_requests else {}
        return self._loop.run(self._generate_all(prompts, sampling, self._version(), options))

    def generate_in_flight(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Like `generate`, from any thread. A weight sync pauses the requests; they keep their tokens and continue."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._is_syncing)
            if self._is_closed:
                raise RolloutError("the engine is closed")
            version = self._version()
        return self._loop.run(self._generate_all(prompts, sampling, version, {}))

    def expect_checksums(self) -> None:
        self._is_checked = True

    def checksums(self) -> dict[str, dict[str, int]]:
        """By URL. Ranks share the servers: each asks some."""
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        clients, deadline = self.clients[rank::num_ranks], Deadline(self.response_timeout)
        found = self._loop.run(all_of(client.checksums(timeout=deadline.left) for client in clients))
        return {client.url: sums for client, sums in zip(clients, found, strict=True)}

    def sleep(self) -> None:
        """Do nothing: servers use other devices and keep weights and cache."""

    def wake_up(self) -> None: ...

    def close(self) -> None:
        """Cancel requests in flight and stop the servers that this run has started."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._loop.close()
        self._cleanup.close()

    def _tag_of(self, policy_version: int) -> str:
        return f"{self._run_id}/{policy_version}"

    def _version(self) -> int:
        if not self._has_weights:
            raise RolloutError("the servers have no weights: call update_weights first")
        return self.policy_version

    def _push(self, updates: Iterator[Update], tag: str) -> None:
        """Pause all servers, load all weights, reset the prefix caches, check the versions, and resume all.

        Nothing is retried. After an update that failed half way a server has layers without weights and stays paused,
        until the next one.
        """
        deadline = Deadline(self.response_timeout)

        def post(path: str, body: Any = None) -> Coroutine[Any, Any, None]:
            return self._by_all(lambda client: client.post(path, body, timeout=deadline.left))

        try:
            self._loop.run(post(f"/pause?mode={'keep' if self._keeps_requests else 'abort'}"))
            if self._is_checked:
                self._loop.run(self._by_all(lambda client: client.expect_checksums(timeout=deadline.left)))
            self._loop.run(post("/start_weight_update"))
            for info, meanwhile in updates:
                taken = self._loop.start(post("/update_weights", {"update_info": info}))
                meanwhile()
                taken.result()
            self._loop.run(post("/finish_weight_update", {"weight_version": tag}))
            self._loop.run(self._by_all(lambda client: client.require_updated(tag, deadline)))
            self._loop.run(post("/resume"))
        finally:
            for _ in updates:  # iterating is collective
                pass

    async def _by_all(self, do: Callable[[VLLMClient], Awaitable[None]]) -> None:
        """Wait for all servers, also after an error, so that no transfer continues in the background."""
        results = await asyncio.gather(*map(do, self.clients), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, RolloutError):
                raise error
        if errors:
            raise RolloutError(
                f"not all servers took the new weights in {self.response_timeout:g} s (--weight-sync-timeout): "
                f"{'; '.join(map(str, errors))}"
            )

    @contextmanager
    def _syncing(self) -> Iterator[None]:
        """Hold requests within the context. They fail after it unless the caller sets `_has_weights` again."""
        with self._changed:
            self._has_weights, self._is_syncing = False, True
        try:
            yield
        finally:
            with self._changed:
                self._is_syncing = False
                self._changed.notify_all()

    async def _generate_all(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, version: int, options: dict[str, Any]
    ) -> list[Completion]:
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
        start = first_choice(prompt.id, len(self.clients))
        rotated = [*self.clients[start:], *self.clients[:start]]
        return min(rotated, key=lambda client: self._num_in_flight[client.url])

    async def _complete(
        self, client: VLLMClient, prompt: Prompt, body: dict[str, Any], version: int, with_routes: bool
    ) -> Completion:
        """Raises RolloutError if the answer has tokens of weights before `version`, or of another run."""
        async with self._slots:
            generation = await self._ask(client, body)
        for tag in sorted(set(generation.versions)):
            run_id, _, number = tag.rpartition("/")
            if run_id != self._run_id or int(number) < version:
                raise RolloutError(
                    f"{client.url} answered with weights {tag}, not {self._tag_of(version)}: it was restarted, or "
                    "another run uses it"
                )
        versions = [int(tag.rpartition("/")[2]) for tag in generation.versions]
        return Completion(
            prompt.id,
            generation.token_ids,
            generation.logprobs,
            generation.finish_reason,
            versions[0],
            routes=routes_of(generation.routed_experts) if with_routes else None,
            versions=versions if versions[0] != versions[-1] else None,
        )

    async def _ask(self, client: VLLMClient, body: dict[str, Any]) -> Generation:
        """Send a request. While the server does not answer, check its health. Raises RolloutError if it fails."""
        answer = asyncio.ensure_future(client.generate(body, timeout=self.request_timeout))
        try:
            while not (await asyncio.wait([answer], timeout=self.response_timeout))[0]:
                await client.version(timeout=self.response_timeout)
            return await answer
        finally:
            answer.cancel()


def _max_connections(num_servers: int) -> int:
    """Raise the soft limit of open files to the hard limit. Return how many connections this rank may open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = _MAX_IN_FLIGHT * num_servers
    return wanted if hard == resource.RLIM_INFINITY else max(1, min(wanted, hard // 2))


def first_choice(prompt_id: str, num_servers: int) -> int:
    """Return the index of a server, equal for all calls of an episode, ROW@EPOCH#SAMPLE@CALL."""
    return zlib.crc32((prompt_id.rpartition("@")[0] or prompt_id).encode()) % num_servers
