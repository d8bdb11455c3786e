"""Distributes the requests of one rank over all servers, and resends those of a server that dies.

Several calls of `run` at the same time share what is known of the servers.

Resending is safe: a request counts as answered when its whole answer has arrived, and it carries its own seed, so that
another server samples with the same numbers.
"""

import asyncio
import logging
import math
import resource
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server.client import (
    Deadline,
    Generation,
    ServerError,
    ServerGoneError,
    ServerRefusedError,
    ServerSilentError,
    VLLMClient,
)
from fsdptrain.vllm.server.event_loop import race

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 512  # requests of one rank to one server
_MAX_TRIES = 5  # per request
_PROBE_INTERVAL_S = 2.0
_POLL_S = 0.5
_OTHER_FILES = 256  # open files of data, logs and collectives
_MAX_ROLLOUTS = 3  # rollouts and evaluations at the same time

Request = Mapping[str, Any]
Chunk = tuple[int, int, int]  # call of `run`, group, part of it


@dataclass(eq=False)
class _Server:
    """One server as this rank sees it while it generates."""

    client: VLLMClient
    is_up: bool
    why: str = "it was not up at the weight sync"  # it is down
    num_in_flight: int = 0
    down: asyncio.Event = field(default_factory=asyncio.Event)  # set when it goes down; a new one when it comes back


@dataclass(eq=False)
class Dispatcher:
    """Sends requests to the servers that hold the weights `tag`; with `newest`, these or newer ones."""

    clients: Sequence[VLLMClient]
    ready: Sequence[str]  # URLs of servers that are known to hold the weights
    tag: str  # run id, slash, version
    response_timeout: float  # of a health check [s]
    replacement_timeout: float  # with fewer than `min_servers` [s]
    min_servers: int
    request_timeout: float = math.inf  # for one request (--rollout-timeout) [s]
    newest: Callable[[], str | None] | None = None
    """For requests that outlive a weight sync: the servers' current tag, or None during a sync."""
    preferred: str | None = None  # URL of the server to use while it is up
    progress: Callable[[], None] = lambda: None  # called when an answer has arrived
    check: Callable[[], None] = lambda: None  # called every _POLL_S; its error ends the rollout

    def __post_init__(self) -> None:
        self._servers = [_Server(client, is_up=client.url in self.ready) for client in self.clients]
        self._slots = asyncio.Semaphore(min(_MAX_IN_FLIGHT * len(self._servers), max_connections()))
        self._chosen: dict[Chunk, _Server] = {}
        self._num_calls = 0  # of `run`
        self._num_running = 0  # of them, those that have not ended
        self._num_requests = 0  # of these
        self._watching: asyncio.Task[None] | None = None  # while any of them runs

    async def run(self, requests: Sequence[Request], *, per_group: int, first: int = 0) -> list[Generation]:
        """The answer to each request, in order. RolloutError if too few servers are left.

        The requests of a group of `per_group` share a prompt. They go to the same server, which caches it, unless there
        are fewer groups than servers.

        first: number of the server to start with, modulo the number of servers
        """
        self._num_calls += 1
        self._num_requests += len(requests)
        call, chunk_size = self._num_calls, max(1, min(per_group, -(-self._num_requests // len(self._servers))))
        chunks = [(call, i // per_group, i % per_group // chunk_size) for i in range(len(requests))]
        try:
            async with self._watched() as watching, asyncio.TaskGroup() as group:
                failing = group.create_task(_result_of(watching))
                tasks = [
                    group.create_task(self._answer(request, chunk, first))
                    for request, chunk in zip(requests, chunks, strict=True)
                ]
                answers = [await task for task in tasks]
                failing.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._num_requests -= len(requests)
            for chunk in set(chunks):
                self._chosen.pop(chunk, None)
        return answers

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator["asyncio.Task[None]"]:
        """Watch the servers while any call runs. The task ends only with an error."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch_all())
        watching, self._num_running = self._watching, self._num_running + 1
        try:
            yield watching
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._watching = None
                watching.cancel()
                await asyncio.wait([watching])

    async def _watch_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for server in self._servers:
                    group.create_task(self._watch(server))
                group.create_task(self._require_servers())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, request: Request, chunk: Chunk, first: int) -> Generation:
        async with self._slots:
            return await self._try_servers(request, chunk, first)

    async def _try_servers(self, request: Request, chunk: Chunk, first: int) -> Generation:
        errors: list[str] = []
        while len(errors) < _MAX_TRIES:
            server = await self._take(chunk, first)
            server.num_in_flight += 1
            try:
                work = server.client.generate(_as_retry(request, len(errors)), timeout=self.request_timeout)
                generation = await race(work, server.down, ServerGoneError(f"{server.client.url} went down"))
                self._require_usable(server, generation)
                self.progress()
                return generation
            except ServerGoneError as error:
                if isinstance(error, ServerSilentError):
                    raise RolloutError(
                        f"{server.client.url} took more than --rollout-timeout, {self.request_timeout:g} s, for one "
                        "request: raise it, or generate fewer tokens at once"
                    ) from None
                if server.is_up:  # otherwise `_watch` knows the reason
                    self._mark_down(server, str(error))
                errors.append(server.why)
            except ServerRefusedError as error:
                raise RolloutError(str(error)) from None
            finally:
                server.num_in_flight -= 1
        raise RolloutError(f"a request failed {_MAX_TRIES} times: {errors[-1]}")

    async def _take(self, chunk: Chunk, first: int) -> _Server:
        """The server of this chunk, or else the one with the fewest requests; waits until one is up."""
        while not any(server.is_up for server in self._servers):
            await asyncio.sleep(_POLL_S)
        preferred = next((server for server in self._servers if server.client.url == self.preferred), None)
        server = self._chosen.get(chunk, preferred)
        if server is None or not server.is_up:
            start = first % len(self._servers)
            rotated = self._servers[start:] + self._servers[:start]
            server = min((server for server in rotated if server.is_up), key=lambda server: server.num_in_flight)
        self._chosen[chunk] = server
        return server

    def _require_usable(self, server: _Server, generation: Generation) -> None:
        """ServerGoneError if somebody restarted the server or pushed other weights."""
        versions = set(generation.versions)
        if not versions or not all(map(self._is_current, versions)):
            found = ", ".join(sorted(versions)) or "without a version"
            raise ServerGoneError(f"{server.client.url} answered with weights {found}, not {self.tag}")

    def _is_current(self, tag: str) -> bool:
        if self.newest is None:
            return tag == self.tag
        run, _, version = self.tag.rpartition("/")
        other_run, _, other = tag.rpartition("/")
        return run == other_run and int(other) >= int(version)

    async def _watch(self, server: _Server) -> None:
        """Check the health of `server` while requests are out; use it again when it comes back with the weights."""
        if server.is_up:  # it was at the weight sync
            await asyncio.sleep(_PROBE_INTERVAL_S)
        while True:
            before = self._expected_tag()
            problem = await self._problem_of(server, before)
            if before is not None and before == self._expected_tag():  # else a weight sync came: the fleet watches it
                if problem is None:
                    self._mark_up(server)
                else:
                    self._mark_down(server, problem)
            await asyncio.sleep(_PROBE_INTERVAL_S)

    def _expected_tag(self) -> str | None:
        return self.tag if self.newest is None else self.newest()

    async def _problem_of(self, server: _Server, tag: str | None) -> str | None:
        if tag is None:
            return None
        deadline = Deadline(self.response_timeout)
        try:
            version = await server.client.version(timeout=deadline.left)
            is_paused = await server.client.is_paused(timeout=deadline.left)
        except ServerError as error:
            return str(error)
        if version != tag:
            return f"{server.client.url} holds weights {version}, not {tag}"
        return f"{server.client.url} was paused by another client" if is_paused else None

    def _mark_up(self, server: _Server) -> None:
        if not server.is_up:
            server.is_up, server.down = True, asyncio.Event()

    def _mark_down(self, server: _Server, why: str) -> None:
        if server.is_up:
            log.warning("%s; its requests go to other servers", why)
        server.is_up, server.why = False, why
        server.down.set()

    async def _require_servers(self) -> None:
        """RolloutError once fewer than `min_servers` have been up for `replacement_timeout`."""
        scarce: Deadline | None = None
        while True:
            self.check()
            down = [server for server in self._servers if not server.is_up]
            num_up = len(self._servers) - len(down)
            if num_up >= self.min_servers:
                scarce = None
            else:
                scarce = scarce or Deadline(self.replacement_timeout)
                if scarce.is_over:
                    raise RolloutError(
                        f"{num_up} of {len(self._servers)} servers are up after {self.replacement_timeout:.0f} s, and "
                        f"--min-servers is {self.min_servers}: {'; '.join(server.why for server in down)}"
                    )
            await asyncio.sleep(_POLL_S)


async def _result_of(task: "asyncio.Task[None]") -> None:
    """Wait for a task without canceling it."""
    await asyncio.shield(task)


def max_connections() -> int:
    """How many connections one rollout may open. Raises the soft limit of open files to the hard limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else max(1, (hard - _OTHER_FILES) // _MAX_ROLLOUTS)


def _as_retry(request: Request, num_tries: int) -> Request:
    """A request with its own cache salt gets another one, so that it does not find its own prompt in the cache."""
    salt = request.get("cache_salt")
    return request if salt is None or not num_tries else {**request, "cache_salt": f"{salt}-{num_tries}"}
