"""The rollout engine of vLLM servers, over HTTP: docs/vllm_servers.md.

Rank 0 pushes new weights to all servers (fleet.py); every rank generates the completions of its own prompts
(dispatcher.py). No rank waits for a server while another rank waits for it in a collective.
"""

import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.protocols import Naming
from fsdptrain.rollout.stacks import StackDump
from fsdptrain.types import ChecksumKind, Completion, Prompt, SamplingParams
from fsdptrain.vllm.adapter import write_adapter
from fsdptrain.vllm.config import ServerConfig, VllmConfig
from fsdptrain.vllm.options import routes_of, sampling_options
from fsdptrain.vllm.server.client import Deadline, Generation, VLLMClient
from fsdptrain.vllm.server.dispatcher import Dispatcher
from fsdptrain.vllm.server.event_loop import EventLoop
from fsdptrain.vllm.server.fleet import Fleet
from fsdptrain.vllm.server.push import Weights
from fsdptrain.vllm.server.replica import checksums_of
from fsdptrain.vllm.server.weight_files import WeightFolder

_FLAG = "--rollout-engine vllm-server"


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
        stop_token_ids: Sequence[int],
        stacks: StackDump,
        fleet: Fleet | None,
        folder: WeightFolder | None,
    ) -> None:
        """
        run_id: part of each version tag, so that weights of another run are never used.
        fleet, folder: on rank 0; None on other ranks.
        """
        vllm, servers = config.section(VllmConfig), config.section(ServerConfig)
        self.clients = clients
        self.policy_version = 0
        self.response_timeout = servers.weight_sync_timeout
        self.replacement_timeout = servers.weight_sync_timeout + (0.0 if vllm.urls else servers.server_start_timeout)
        self.request_timeout = vllm.timeout
        self.fleet = fleet
        self.loop = loop
        self._stop_token_ids = tuple(stop_token_ids)
        self._run_id = run_id
        self._min_servers = servers.min_servers
        self._stacks = stacks
        self._folder = folder
        self._prioritize = config.sync.max_staleness > 0  # `generate` precedes requests in flight
        self._tag: str | None = None  # of the servers' weights; None: no weights, or during a sync
        self._ready: list[str] = []  # URLs of servers that hold them
        self._takes_adapters = False
        self._num_adapters = 0
        self._num_in_flight = 0
        self._shared: Dispatcher | None = None  # of the requests in flight that start with the current weights
        self._is_syncing = self._is_closed = False
        self._changed = threading.Condition()  # guards `_tag`, `_num_in_flight`, `_is_syncing` and `_is_closed`

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Push the tensors of a checkpoint, by the names of its files, to all servers. Collective.

        First all ranks gather all weights and rank 0 stores them; then rank 0 pushes them.
        """
        self._stacks.arm(self.response_timeout)
        files, error = self._store(weights, self._tag_of(policy_version))
        with raise_on_all_ranks(RolloutError, "--weight-sync-dir: cannot write the weights, use another one"):
            if error is not None:
                raise error
        self._switch(policy_version, files)

    def update_adapter(
        self, weights: Iterable[tuple[str, Tensor]], write_config: Callable[[Path], None], policy_version: int
    ) -> None:
        """Push a LoRA adapter that replaces the previous one; the base weights are the checkpoint's. Collective."""
        self._takes_adapters = True
        tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
        adapter = None
        with raise_on_all_ranks(RolloutError, "--lora-sync adapter"):
            if self._folder is not None:
                self._num_adapters += 1
                adapter = self._folder.make_subfolder(f"adapter{self._num_adapters % 2}")  # the previous one is in use
                write_adapter(adapter, tensors, write_config)
        self._switch(policy_version, [], adapter)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """`num_samples` completions of each prompt, prompt by prompt, in order; each request has its own seed."""
        dispatcher = self._dispatcher()
        self._show_progress()  # stays armed: if this rank hangs later, its stacks show where
        return self._run(dispatcher, prompts, sampling, **({"priority": -1} if self._prioritize else {}))

    def generate_in_flight(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Like `generate`, from any thread. A weight sync pauses the requests; they keep their tokens and continue."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._is_syncing)
            if self._is_closed:
                raise RolloutError("the engine is closed")
            # calls of one episode go to the same server, which caches their common prefix
            first = zlib.crc32(prompts[0].id.partition("@")[0].encode()) if len(prompts) == 1 else _rank()
            dispatcher = self._shared
            if dispatcher is None or dispatcher.tag != self._tag:
                dispatcher = self._dispatcher(newest=lambda: self._tag, progress=lambda: None)
                self._shared = dispatcher
            self._num_in_flight += 1
        try:
            return self._run(dispatcher, prompts, sampling, first=first)
        finally:
            with self._changed:
                self._num_in_flight -= 1

    def checksums(self, names: Collection[str], kind: ChecksumKind = "values") -> dict[str, dict[str, int]]:
        """By URL, of the servers that this rank reads: ranks share them. A server that is dead is left out."""
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        clients = [client for client in self.clients if client.url in self._ready]
        deadline = Deadline(self.response_timeout)
        read = {
            client.url: checksums_of(client, self.loop, names, kind, deadline) for client in clients[rank::num_ranks]
        }
        return {url: sums for url, sums in read.items() if sums is not None}

    def sleep(self) -> None:
        """Servers have their own devices and keep weights and cache."""
        self._stacks.disarm()

    def wake_up(self) -> None: ...

    def close(self) -> None:
        """Cancel requests in flight and stop the servers that this run has started."""
        with self._changed:
            if self._is_closed:
                return
            if self._num_in_flight:  # the run ends early: show where every rank is
                self._stacks.dump()
            self._is_closed = True
            self._changed.notify_all()
        self._stacks.close()
        self.loop.cancel_all()
        if self.fleet is not None:
            self.loop.run(self.fleet.close())
        self.loop.close()
        if self._folder is not None:
            self._folder.delete()

    def _tag_of(self, policy_version: int) -> str:
        return f"{self._run_id}/{policy_version}"

    def _store(self, weights: Iterable[tuple[str, Tensor]], tag: str) -> tuple[list[Path], OSError | None]:
        """Rank 0 writes the weights to files; the other ranks only take part in gathering them."""
        if self._folder is None or self.fleet is None:
            for _ in weights:
                pass
            return [], None
        self.loop.run(self.fleet.forget_weights())
        try:
            return self._folder.write(weights, tag), None
        except OSError as error:
            return [], error

    def _switch(self, policy_version: int, files: Sequence[Path], adapter: Path | None = None) -> None:
        """Rank 0 pushes weights to all servers. Collective."""
        tag, ready = self._tag_of(policy_version), []
        with self._syncing() as previous_tag:
            with raise_on_all_ranks(RolloutError, _FLAG), self._pointing_to_stacks():
                if self.fleet is not None and self._folder is not None:
                    self._stacks.arm(self.response_timeout)
                    folder = self._folder
                    if adapter is None:
                        weights = Weights(files, tag, folder.deltas, folder.base)
                    else:
                        weights = Weights([], tag, previous_tag=previous_tag, adapter=adapter)
                    ready = self.loop.run(self.fleet.switch(weights))
                    folder.deltas.clear()  # of `weights` too: frees them
            self._ready = gather(ready)[0]
            self._stacks.disarm()
            self.policy_version, self._tag = policy_version, tag

    @contextmanager
    def _syncing(self) -> Iterator[str | None]:
        """Clear the tag of the weights, which the caller sets after a successful sync. Yields the previous tag."""
        with self._changed:
            previous_tag, self._tag, self._is_syncing = self._tag, None, True
        try:
            yield previous_tag
        finally:
            with self._changed:
                self._is_syncing = False
                self._changed.notify_all()

    def _run(
        self,
        dispatcher: Dispatcher,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        first: int | None = None,
        **options: Any,
    ) -> list[Completion]:
        """first: see `Dispatcher.run`."""
        rows = [(prompt, index) for prompt in prompts for index in range(sampling.num_samples)]
        if not rows:
            return []
        if self._takes_adapters:
            options["model"] = dispatcher.tag
        requests = [
            {
                "token_ids": prompt.token_ids,
                "sampling_params": sampling_options(prompt, index, sampling, self._stop_token_ids),
                **options,
            }
            for prompt, index in rows
        ]
        with self._pointing_to_stacks():
            work = dispatcher.run(requests, per_group=sampling.num_samples, first=_rank() if first is None else first)
            generations = self.loop.run(work)
        return [
            _completion(prompt, generation, with_routes=sampling.with_routes)
            for (prompt, _), generation in zip(rows, generations, strict=True)
        ]

    def _dispatcher(self, **options: Any) -> Dispatcher:
        if self._tag is None:
            raise RolloutError("the servers have no weights: call update_weights first")
        return Dispatcher(
            self.clients,
            ready=self._ready,
            tag=self._tag,
            response_timeout=self.response_timeout,
            replacement_timeout=self.replacement_timeout,
            min_servers=self._min_servers,
            request_timeout=self.request_timeout,
            check=self.fleet.raise_if_unrecoverable if self.fleet else lambda: None,
            **{"progress": self._show_progress, **options},
        )

    def _show_progress(self) -> None:
        self._stacks.arm(self.response_timeout)

    @contextmanager
    def _pointing_to_stacks(self) -> Iterator[None]:
        """Add the location of the stacks of all ranks to an error after a long wait."""
        start = time.monotonic()
        try:
            yield
        except RolloutError as error:
            if time.monotonic() - start >= self.response_timeout:
                self._stacks.dump()  # in flight they are not armed
                self._stacks.point_out(error)
            raise


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _completion(prompt: Prompt, generation: Generation, *, with_routes: bool) -> Completion:
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
