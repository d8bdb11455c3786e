"""Requests of one rank, spread over all servers, and sent again elsewhere when a server dies. Each is answered once.

To send a request again is safe: an answer counts when it has come whole, a request has one place for it, and its seed
is its own, so that another server draws the same numbers.
"""

import logging
import math
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server.client import (
    ServerError,
    ServerGoneError,
    ServerRefusedError,
    ServerSilentError,
    VLLMClient,
)
from fsdptrain.vllm.server.push import Deadline

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 512  # requests of one rank to one server, each with a thread of its own
_MAX_TRIES = 5  # of one request
_PROBE_INTERVAL_S = 2.0
_POLL_S = 0.5
_OTHER_FILES = 256  # that are open besides: of data, logs, collectives
_ROLLOUTS = 3  # that may be out at one time, with evaluations


@dataclass
class _Seen:
    """One server as this rank sees it, while it generates."""

    client: VLLMClient
    is_up: bool
    why: str = "it was not up when the weights were handed over"  # it is not up
    num_in_flight: int = 0


@dataclass(eq=False)
class Dispatcher:
    """Sends requests to the servers that hold the weights named `tag`; with `newest`, those or newer ones."""

    clients: Sequence[VLLMClient]
    ready: Sequence[str]  # addresses of those that are known to hold them
    tag: str  # a run, a slash and a version
    silence: float  # longest time without a sign of life of a server [s]
    patience: float  # longest time with fewer than `min_servers` [s]
    min_servers: int
    longest: float = math.inf  # for one request, from when it was sent: --rollout-timeout [s]
    newest: Callable[[], str | None] | None = None
    """Where requests live on when servers take new weights: what they hold now, or None while that changes."""
    first: int = 0  # where to begin among equals: ranks begin with different servers
    preferred: str | None = None  # address of the one to ask as long as it is up
    progress: Callable[[], None] = lambda: None  # called when an answer has come
    check: Callable[[], None] = lambda: None
    """Called now and then while answers are awaited; its error ends the rollout."""
    _servers: list[_Seen] = field(init=False)
    _changed: threading.Condition = field(init=False, default_factory=threading.Condition)
    _stopped: threading.Event = field(init=False, default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._servers = [_Seen(client, is_up=client.url in self.ready) for client in self.clients]

    def run(self, requests: Sequence[Any], *, per_group: int) -> list[Any]:
        """The answer to each of `requests`, in order. Those of a group of `per_group` share a prompt: a server keeps
        what it has read of it. RolloutError where too few servers are left."""
        chunk = max(1, min(per_group, -(-len(requests) // len(self._servers))))
        chosen: dict[int, _Seen] = {}  # by chunk
        num_servers = len(self._servers)
        at_once = min(len(requests), _MAX_IN_FLIGHT * num_servers, most_connections())
        threads = ThreadPoolExecutor(at_once + num_servers)
        try:
            watches = [threads.submit(self._watch, server) for server in self._servers]
            answers = [
                threads.submit(self._answer, request, (i // per_group, i % per_group // chunk), chosen)
                for i, request in enumerate(requests)
            ]
            pending, scarce = set(answers), None
            while pending:
                done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
                for answer in done:
                    answer.result()
                for watch in watches:
                    if watch.done():  # by an error: nobody else would see that its server hangs
                        watch.result()
                scarce = self._require_servers(scarce)
                self.check()
            return [answer.result() for answer in answers]
        finally:
            self._stopped.set()
            threads.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """From another thread: `run` ends with an error."""
        self._stopped.set()

    def _answer(self, request: Any, chunk: Any, chosen: dict[Any, _Seen]) -> Any:
        complaints: list[str] = []
        while len(complaints) < _MAX_TRIES:
            server, sent = self._take(chunk, chosen), Deadline(self.longest)
            try:
                client = server.client.until(lambda server=server: self._stopped.is_set() or not server.is_up)
                again = _sent_again(request, len(complaints))
                answer = client.generate(again, timeout=self.silence, longest=self.longest)
                self._check(server, answer)
                self.progress()
                return answer
            except ServerGoneError as error:
                if self._stopped.is_set():
                    raise
                if isinstance(error, ServerSilentError) and sent.is_over:
                    raise RolloutError(
                        f"{server.client.url} took more than --rollout-timeout, {self.longest:g} s, for one request: "
                        "raise it, or ask for less at one time"
                    ) from None
                complaints.append(str(error))
                if server.is_up:  # else its watch has said why
                    self._mark(server, str(error))
            except ServerRefusedError as error:
                raise RolloutError(str(error)) from None
            finally:
                with self._changed:
                    server.num_in_flight -= 1
                    self._changed.notify_all()
        raise RolloutError(f"a request failed {_MAX_TRIES} times: {complaints[-1]}")

    def _take(self, chunk: Any, chosen: dict[Any, _Seen]) -> _Seen:
        """The server of this chunk, else the one with the fewest requests of ours; waits until one is up."""
        preferred = next((server for server in self._servers if server.client.url == self.preferred), None)
        with self._changed:
            while True:
                if self._stopped.is_set():
                    raise ServerGoneError("the rollout has ended")
                server = chosen.get(chunk, preferred)
                if server is None or not server.is_up:
                    order = self._servers[self.first % len(self._servers) :] + self._servers
                    server = min((s for s in order if s.is_up), key=lambda s: s.num_in_flight, default=None)
                if server is not None:
                    chosen[chunk] = server
                    server.num_in_flight += 1
                    return server
                self._changed.wait(_POLL_S)

    def _check(self, server: _Seen, answer: Any) -> None:
        choice = answer["choices"][0]
        versions = {span["version"] for span in choice["weight_versions"] or []}
        if not versions or not all(map(self._is_good, versions)):  # somebody else started it again, or gave it weights
            raise ServerGoneError(f"{server.client.url} answered with weights {', '.join(versions)}, not {self.tag}")
        if choice["finish_reason"] not in ("stop", "length"):
            raise ServerGoneError(f"{server.client.url} ended an answer by {choice['finish_reason']!r}")

    def _is_good(self, tag: str) -> bool:
        if self.newest is None:
            return tag == self.tag
        run, _, version = self.tag.rpartition("/")
        other_run, _, other = tag.rpartition("/")
        return run == other_run and int(other) >= int(version)

    def _watch(self, server: _Seen) -> None:
        """Ask for signs of life as long as requests are out; a server that comes back with the weights is used."""
        while not self._stopped.is_set():
            before = self._now()
            problem = self._problem(server, before)
            if before is None or before != self._now():
                pass  # weights were handed over meanwhile: whoever does that sees what becomes of the server
            elif problem is None:
                with self._changed:
                    server.is_up = True
                    self._changed.notify_all()
            else:
                self._mark(server, problem)
            self._stopped.wait(_PROBE_INTERVAL_S)

    def _now(self) -> str | None:
        return self.tag if self.newest is None else self.newest()

    def _problem(self, server: _Seen, tag: str | None) -> str | None:
        if tag is None:
            return None
        try:
            client, deadline = server.client.until(self._stopped.is_set), Deadline(self.silence)
            version = client.version(timeout=deadline.left)
            paused = client.get("/is_paused", timeout=deadline.left)["is_paused"]
        except ServerError as error:
            return str(error)
        if version != tag:
            return f"{server.client.url} holds weights {version}, not {tag}"
        return f"{server.client.url} was paused by somebody" if paused else None

    def _mark(self, server: _Seen, why: str) -> None:
        with self._changed:
            was_up, server.is_up, server.why = server.is_up, False, why
            self._changed.notify_all()
        if was_up and not self._stopped.is_set():
            log.warning("%s; its requests are sent to others", why)

    def _require_servers(self, scarce: Deadline | None) -> Deadline | None:
        """Since when there are too few, if they are; RolloutError when that takes too long."""
        down = [server for server in self._servers if not server.is_up]
        num_up = len(self._servers) - len(down)
        if num_up >= self.min_servers:
            return None
        scarce = scarce or Deadline(self.patience)
        if scarce.is_over:
            raise RolloutError(
                f"{num_up} of {len(self._servers)} servers answer, for {self.patience:.0f} s now, and "
                f"{self.min_servers} are needed (--min-servers): {'; '.join(server.why for server in down)}"
            )
        return scarce


def most_connections() -> int:
    """Of one rollout, that leave files for all else and for rollouts beside it. The soft limit of open files, 1,024 on
    most systems, is raised to the hard one first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else max(1, (hard - _OTHER_FILES) // _ROLLOUTS)


def _sent_again(request: Any, times: int) -> Any:
    """One with a cache of its own does not find there what it has left itself when it was sent before."""
    salt = request.get("cache_salt")
    return request if salt is None or not times else request | {"cache_salt": f"{salt}-{times}"}
