"""vLLM over HTTP: many servers, each with an environment and devices of its own. docs/rollouts.md says how to use it.

Rank 0 gives new weights to all servers (vllm_fleet.py); every rank asks for the completions of its own prompts
(vllm_requests.py). No rank speaks with a server before the collectives of all ranks are over.
"""

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import RolloutError
from fsdptrain.protocols import Naming
from fsdptrain.rollout.sampling import seed_of
from fsdptrain.rollout.stacks import StackDump
from fsdptrain.types import Completion, Prompt, SamplingParams
from fsdptrain.vllm.adapter import write_adapter
from fsdptrain.vllm.options import routes_of
from fsdptrain.vllm.server.client import VLLMClient
from fsdptrain.vllm.server.dispatcher import Dispatcher
from fsdptrain.vllm.server.fleet import Fleet
from fsdptrain.vllm.server.push import Deadline, Weights
from fsdptrain.vllm.server.replica import ServerCopy
from fsdptrain.vllm.server.weight_files import WeightFolder


@dataclass(frozen=True)
class Endpoints:
    """What every rank must know to speak with the servers."""

    urls: tuple[str, ...]
    run: str  # part of the tag of weights: nobody else's are taken for this run's
    api_key: str | None = field(repr=False)


@dataclass(frozen=True)
class Timeouts:
    """How long anyone waits. [s]"""

    silence: float  # for a sign of life of a server
    replacement: float  # while fewer than `min_servers` are there
    min_servers: int
    answer: float = math.inf  # for the answer to one request


class VLLMServerEngine:
    """Generates with the servers of `contact`. Holds no weights until `update_weights`.

    Logprobs are those of the distribution that was sampled from (vLLM's `processed_logprobs`).
    """

    weight_naming: Naming = "hub"

    def __init__(
        self,
        contact: Endpoints,
        *,
        stop_token_ids: Sequence[int],
        patience: Timeouts,
        stacks: StackDump,
        fleet: Fleet | None,
        folder: WeightFolder | None,
        overtakes: bool = False,
    ) -> None:
        """`fleet` and `folder` are rank 0's; the others have none. overtakes: what the trainer waits for goes before
        what is in flight, which servers with --scheduling-policy priority know how to do."""
        self.clients = [VLLMClient(url, contact.api_key) for url in contact.urls]
        self.stop_token_ids = tuple(stop_token_ids)
        self.policy_version = 0
        self._run = contact.run
        self._patience = patience
        self._stacks = stacks
        self.fleet = fleet
        self._folder = folder
        self._overtakes = overtakes
        self._tag: str | None = None  # of the weights that the servers hold
        self._ready: list[str] = []
        self._takes_adapters = False
        self._num_adapters = 0
        self._in_flight: set[Dispatcher] = set()
        self._switching = self._closed = False
        self._changed = threading.Condition()  # held while these, or `_tag`, or `_in_flight` change

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Take the tensors of a checkpoint, by the names of its files, on all servers at one time. Collective.

        First all of `weights` are gathered and stored, by all ranks; then rank 0 speaks with the servers.
        """
        self._stacks.arm(self._patience.silence)
        stored, error = self._store(weights)

        def pack(before: str | None, tag: str) -> Weights:
            if error is not None:
                raise RolloutError(f"--weight-folder: the weights cannot be stored: {error}; choose another") from error
            return Weights(stored, tag, before)

        self._switch(pack, policy_version)

    def update_adapter(
        self, weights: Iterable[tuple[str, Tensor]], write_config: Callable[[Path], None], policy_version: int
    ) -> None:
        """Take an adapter in place of the one before; the weights that it stands beside are the checkpoint's."""
        self._takes_adapters = True
        tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}

        def pack(before: str | None, tag: str) -> Weights:
            assert self._folder is not None, "rank 0 has one"
            assert self.fleet is not None
            self.fleet.forget_weights()
            self._num_adapters += 1
            folder = self._folder.make_room(f"adapter{self._num_adapters % 2}")  # the one before is still in use
            write_adapter(folder, tensors, write_config)
            return Weights([], tag, before=before, adapter=folder)

        self._switch(pack, policy_version)

    def _switch(self, pack: Callable[[str | None, str], Weights], policy_version: int) -> None:
        """Rank 0 gives all servers what `pack`(tag before, tag) has made, when the collectives before are over."""
        tag, ready = f"{self._run}/{policy_version}", []
        with self._no_weights() as before:
            with raise_on_all_ranks(RolloutError, "--rollout-engine vllm-server"), self._with_stacks():
                if self.fleet is not None:
                    weights = pack(before, tag)
                    self._stacks.arm(self._patience.silence)
                    ready = self.fleet.switch(weights)
            self._ready = gather(ready)[0]
            self._stacks.disarm()
            self.policy_version, self._tag = policy_version, tag

    @contextmanager
    def _no_weights(self) -> Iterator[str | None]:
        """Half an update must not answer: who would ask in flight waits for its end. Yields the tag before."""
        with self._changed:
            before, self._tag, self._switching = self._tag, None, True
        try:
            yield before
        finally:
            with self._changed:
                self._switching = False
                self._changed.notify_all()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """`num_samples` completions for each prompt, prompt by prompt, in order; each request has its own seed."""
        return self.ask(prompts, sampling)[0]

    def ask(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        preferred: str | None = None,
        cache_salt: str | None = None,
    ) -> tuple[list[Completion], list[Any]]:
        """As `generate`, of the server at `preferred` as long as it is up; and what servers say besides. Prefixes that
        they have cached are those of requests with the same `cache_salt`."""
        dispatcher = replace(self._dispatcher(), preferred=preferred)
        if not prompts:
            return [], []
        asked = [(prompt, k) for prompt in prompts for k in range(sampling.num_samples)]
        self._go_on()  # until the next call: where this rank waits for others, it may be asked where it stands
        with self._with_stacks():
            urgent = {"cache_salt": cache_salt, **({"priority": -1} if self._overtakes else {})}
            requests = [self._request(*row, sampling, dispatcher.tag) | urgent for row in asked]
            answers = dispatcher.run(requests, per_group=sampling.num_samples)
        return self._completions(asked, answers, sampling), [answer["usage"] for answer in answers]

    def copies(self) -> list[ServerCopy]:
        """Ranks share the servers among them: each is looked at by one rank, or by more where ranks are more. From now
        on all of a rank's have one deadline to tell of their weights.

        What is asked of one shares no cached prefix with what is asked of another, or by another rank; with what was
        asked of it under the weights before it does, if the server has kept that.
        """
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        clients = [client for client in self.clients if client.url in self._ready]
        deadline = Deadline(self._patience.silence)
        return [
            ServerCopy(
                client := clients[i % len(clients)],
                partial(self.ask, cache_salt=f"sync-check-{rank}-{self.clients.index(client)}"),
                deadline,
                reads_weights=i < len(clients),
            )
            for i in range(rank, rank + num_ranks * -(-len(clients) // num_ranks), num_ranks)
        ]

    def generate_in_flight(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """As `generate`, from any thread: when new weights come, servers keep what they have sampled, and go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._switching)
            if self._closed:
                raise RolloutError("the engine is closed")
            dispatcher = replace(self._dispatcher(), newest=lambda: self._tag, progress=lambda: None)
            self._in_flight.add(dispatcher)
        asked = [(prompt, k) for prompt in prompts for k in range(sampling.num_samples)]
        requests = [self._request(*row, sampling, dispatcher.tag) for row in asked]
        try:
            with self._with_stacks():
                answers = dispatcher.run(requests, per_group=sampling.num_samples) if requests else []
        finally:
            with self._changed:
                self._in_flight.discard(dispatcher)
        return self._completions(asked, answers, sampling)

    def sleep(self) -> None:
        """Servers have devices of their own: they keep weights and cache."""
        self._stacks.disarm()

    def wake_up(self) -> None: ...

    def close(self) -> None:
        """End what is in flight, and the servers that this run has started; others are left as they are."""
        with self._changed:
            # the run ends before its time: on all ranks, whichever has waited in vain
            if self._in_flight and not self._closed:
                self._stacks.dump()
            self._closed = True
            self._changed.notify_all()
            for dispatcher in self._in_flight:
                dispatcher.stop()
        self._stacks.close()
        if self.fleet is not None:
            self.fleet.close()
        if self._folder is not None:
            self._folder.delete()

    def _store(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[list[Path], OSError | None]:
        """Rank 0 writes them to files; the others take part in the gathering."""
        if self._folder is None or self.fleet is None:
            for _ in weights:
                pass
            return [], None
        self.fleet.forget_weights()
        try:
            return self._folder.write(weights), None
        except OSError as error:
            return [], error

    def _request(self, prompt: Prompt, index: int, sampling: SamplingParams, tag: str) -> dict[str, Any]:
        adapter = {"model": tag} if self._takes_adapters else {}
        return {
            **adapter,
            "token_ids": prompt.token_ids,
            "sampling_params": {
                "max_tokens": sampling.limit_of(prompt),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": max(sampling.top_k, 0),  # vLLM: 0 is off
                "min_p": sampling.min_p,
                "stop_token_ids": sorted({*self.stop_token_ids, *sampling.stop_token_ids}),
                "ignore_eos": True,  # which ids end a response is said by `stop_token_ids` alone
                "logprobs": 0,  # of the sampled token only
                "seed": seed_of(sampling.seed, prompt.id, index),
                "detokenize": False,
            },
        }

    def _dispatcher(self) -> Dispatcher:
        if self._tag is None:
            raise RolloutError("the servers have no weights: call update_weights first")
        return Dispatcher(
            self.clients,
            ready=self._ready,
            tag=self._tag,
            silence=self._patience.silence,
            patience=self._patience.replacement,
            min_servers=self._patience.min_servers,
            longest=self._patience.answer,
            first=dist.get_rank() if dist.is_initialized() else 0,
            progress=self._go_on,
            check=self._check,
        )

    def _completions(
        self, asked: Sequence[tuple[Prompt, int]], answers: Sequence[Any], sampling: SamplingParams
    ) -> list[Completion]:
        return [
            self._completion(prompt, answer["choices"][0], sampling.with_routes)
            for (prompt, _), answer in zip(asked, answers, strict=True)
        ]

    def _completion(self, prompt: Prompt, choice: Any, with_routes: bool) -> Completion:
        """The dispatcher has checked its version and how it ended."""
        tokens = choice["token_ids"]
        logprobs = [found["logprob"] for found in choice["logprobs"]["content"]]
        assert len(logprobs) == len(tokens)
        versions = token_versions(choice["weight_versions"])
        assert len(versions) == len(tokens)
        mixed = versions if versions[0] != versions[-1] else None
        routes = routes_of(choice["routed_experts"]) if with_routes else None
        return Completion(
            prompt.id, tokens, logprobs, choice["finish_reason"], versions[0], routes=routes, versions=mixed
        )

    def _check(self) -> None:
        """Rank 0 knows of servers that will not come back; the others would wait for them to the end of patience."""
        if self.fleet is not None:
            self.fleet.raise_if_unrecoverable()

    def _go_on(self) -> None:
        self._stacks.arm(self._patience.silence)

    @contextmanager
    def _with_stacks(self) -> Iterator[None]:
        """An error that came of a long wait says where the stacks of all ranks are."""
        start = time.monotonic()
        try:
            yield
        except RolloutError as error:
            if time.monotonic() - start >= self._patience.silence:
                self._stacks.dump()  # as far as nobody has armed them: in flight
                self._stacks.point_out(error)
            raise


def token_versions(spans: Sequence[Mapping[str, Any]]) -> list[int]:
    """The version that made each token, from vLLM's {"version": run/number, "start", "end"}."""
    return [int(s["version"].rpartition("/")[2]) for s in spans for _ in range(s["start"], s["end"])]


def new_run() -> str:
    """A name that no other run has."""
    return secrets.token_hex(4)
