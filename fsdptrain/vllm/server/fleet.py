"""All servers of a run, on rank 0: they switch version together, and those that die and are ours are started again."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from fsdptrain.config.server_checks import LOOK_S
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.vllm.server.client import GivenUp, ServerError, ServerGoneError, ServerRefusedError, VLLMClient
from fsdptrain.vllm.server.process import ServerProcess
from fsdptrain.vllm.server.push import Deadline, FilePush, Push, Weights, update

log = logging.getLogger(__name__)

_POLL_S = 0.5
_PROBE_INTERVAL_S = 5.0
_MAX_STARTS = 3  # of one server in a row
_TAKE_BACK_S = 2.0
_HEALTH_S = 5.0
_FOR_WEIGHTS = 0.75  # of --sync-timeout; the rest is for going on, so that one that hangs takes no time from others
_NO_WEIGHTS = "default"  # the version of a vLLM server that nobody has given weights


class State(Enum):
    DOWN = "down"  # ours: to be started; others: nobody asks it any more
    STARTING = "starting"
    UP = "up"  # it answers
    LOST = "lost"  # it cannot be started


@dataclass
class Server:
    """One server as rank 0 sees it."""

    client: VLLMClient
    process: ServerProcess | None = None  # None: it is not ours
    state: State = State.UP
    why: str = ""  # it is not up
    starts: int = 0  # since it last lived from one version of weights to the next
    deadline: Deadline = field(default_factory=lambda: Deadline(0.0))  # of a start
    probe: "Future[None] | None" = None

    def give_up(self, why: str) -> None:
        self.state, self.why, self.probe = State.DOWN, why, None
        if self.process is not None:
            self.process.end()


class Fleet:
    """Owns the processes of servers that are ours. Its methods are called by rank 0 alone, by the thread that trains;
    `raise_if_unrecoverable` by every thread that waits for answers."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        push: Push,
        sync_timeout: float,
        start_timeout: float,
        min_servers: int,
        keep_requests: bool = False,
        require_fitting: Callable[..., None] = lambda client, timeout: None,
        prove: Callable[[VLLMClient, Weights, Deadline], None] = lambda client, weights, deadline: None,
    ) -> None:
        """`keep_requests`: what servers work on goes on after they took new weights. `require_fitting`(client,
        timeout=): ConfigError of one that somebody has started otherwise than it must be. `prove`: ServerError of one
        that took the place of another, and does not hold the weights that it was given; the others are looked at by
        --sync-check."""
        self._servers = list(servers)
        self._push = push
        self._sync_timeout = sync_timeout
        self._start_timeout = start_timeout
        self._min_servers = min_servers
        self._keep_requests = keep_requests
        self._require_fitting = require_fitting
        self._prove = prove
        self._weights: Weights | None = None
        self._failure: Exception | None = None  # of the thread that looks after them
        self._began = False  # all servers have been up
        self._changed = threading.Condition(threading.RLock())  # held while servers or weights change
        self._closing = threading.Event()
        self._overtaken = threading.Event()  # a server that is still being given weights would get old ones
        # for each an update, a probe, and one that is left from before a restart
        self._threads = ThreadPoolExecutor(3 * len(self._servers))
        self._keeper = threading.Thread(target=self._keep, daemon=True, name="servers")

    def start(self) -> None:
        """Start those that are ours and wait for them. RolloutError with the last words of one that does not come."""
        if not any(server.process for server in self._servers):
            return
        for server in self._servers:
            server.state = State.DOWN
        self._keeper.start()
        self.wait_for(len(self._servers), self._start_timeout)
        self._began = True

    def forget_weights(self) -> None:
        """Their files may be deleted: what is started from now on gets the next ones. A server that has just been
        started, and was still reading them, is not waited for but started once more."""
        self._overtaken.set()
        with self._changed:
            self._overtaken.clear()
            self._weights = None

    def switch(self, weights: Weights) -> list[str]:
        """Give all servers `weights`; the addresses of those that have them. None answers before all have switched.

        A server that dies or is silent is left out (and started again where it is ours); one that answers, but did not
        switch, is a RolloutError.
        """
        with self._changed:
            self._weights = weights
            self._take_back()
            up = [server for server in self._servers if server.state is State.UP]
            for server in up:
                server.starts = 0
            self._update(up, partial(self._bring, push=self._push))
        replacement = self._start_timeout + self._sync_timeout if self._has_own else 0.0
        return self.wait_for(self._min_servers, replacement)

    def raise_if_unrecoverable(self) -> None:
        """RolloutError when there will never be --min-servers again. Looks without a lock, which is held while servers
        take weights, and makes sure with it before it raises."""
        if self._failure is None and not self._is_hopeless(self._min_servers):
            return
        with self._changed:
            if self._failure is not None or self._is_hopeless(self._min_servers):
                self.wait_for(self._min_servers, 0.0)

    def close(self) -> None:
        self._closing.set()
        self._overtaken.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for server in self._servers:
            if server.process is not None:
                server.process.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_hopeless(self, num_servers: int) -> bool:
        """So many are not up, and will not come."""
        coming = [s for s in self._servers if s.process is not None and s.state in (State.DOWN, State.STARTING)]
        return num_servers > len(coming) + sum(server.state is State.UP for server in self._servers)

    @property
    def _has_own(self) -> bool:
        return any(server.process for server in self._servers)

    def _take_back(self) -> None:
        """Servers of others that were started anew since they were given up: they have had no weights yet."""
        left = [server for server in self._servers if server.process is None and server.state is State.DOWN]
        tasks = [self._threads.submit(self._is_back, server.client) for server in left]
        for server, task in zip(left, tasks, strict=True):
            error = task.exception()
            if isinstance(error, ConfigError):
                server.why = str(error)
                log.warning("%s; the run goes on without it", error)
            elif error is not None and not isinstance(error, ServerError):
                raise error
            elif error is None and task.result():
                log.info("%s is back", server.client.url)
                server.state = State.UP

    def _is_back(self, client: VLLMClient) -> bool:
        deadline = Deadline(min(LOOK_S, self._sync_timeout))
        if client.version(timeout=min(_TAKE_BACK_S, deadline.left)) != _NO_WEIGHTS:
            return False
        self._require_fitting(client, timeout=deadline.left)
        return True

    def _update(
        self,
        servers: Sequence[Server],
        bring: Callable[[VLLMClient, Weights, Deadline], None],
        given_up: GivenUp = lambda: False,
    ) -> None:
        """The newest weights to all of `servers`; then, if none refused, all of them go on."""
        weights = self._weights
        assert weights is not None
        switched_by, all_by = Deadline(_FOR_WEIGHTS * self._sync_timeout), Deadline(self._sync_timeout)

        def each(servers: Sequence[Server], do: Callable[[VLLMClient], object]) -> list[str]:
            return self._each(servers, lambda server: _ask(server.client.until(given_up), do, all_by))

        refused = each(servers, lambda client: bring(client, weights, switched_by))
        if refused:
            switched = [server.client.url for server in servers if server.state is State.UP]
            raise RolloutError(
                f"servers did not switch to new weights together: {'; '.join(refused)}; switched, and not used: "
                f"{', '.join(url for url in switched if not any(url in text for text in refused)) or 'none'}"
            )
        up = [server for server in servers if server.state is State.UP]
        refused = each(up, lambda client: client.post("/resume", timeout=all_by.left))
        if refused:
            raise RolloutError(f"servers did not go on after they took new weights: {'; '.join(refused)}")

    def _bring(self, client: VLLMClient, weights: Weights, deadline: Deadline, *, push: Push) -> None:
        update(client, weights, push, deadline, keep_requests=self._keep_requests)

    def _bring_and_prove(self, client: VLLMClient, weights: Weights, deadline: Deadline) -> None:
        """By file also where others get theirs over the network: it is on this machine."""
        self._bring(client, weights, deadline, push=FilePush())
        self._prove(client, weights, deadline)

    def _each(self, servers: Sequence[Server], do: Callable[[Server], object]) -> list[str]:
        """`do` for all of them at one time. Those that are gone are given up; what others refused is returned."""
        tasks = [self._threads.submit(do, server) for server in servers]
        refused = []
        for server, task in zip(servers, tasks, strict=True):
            try:
                task.result()
            except ServerGoneError as error:
                self._give_up(server, str(error))
            except ServerRefusedError as error:
                refused.append(str(error))
        return refused

    def _give_up(self, server: Server, why: str) -> None:
        log.warning("%s; %s", why, "it is started again" if server.process else "the run goes on without it")
        self._push.forget(server.client)
        server.give_up(why)

    def wait_for(self, num_servers: int, seconds: float) -> list[str]:
        """The addresses of those that are up, when there are so many. RolloutError after `seconds`, or when as many
        can never come."""
        deadline = Deadline(seconds)
        with self._changed:
            while True:
                if self._failure is not None:
                    raise RolloutError(f"servers could not be looked after: {self._failure!r}") from self._failure
                up = [server.client.url for server in self._servers if server.state is State.UP]
                if len(up) >= num_servers:
                    return up
                if deadline.is_over or self._is_hopeless(num_servers):
                    down = "; ".join(f"{s.client.url}: {s.why}" for s in self._servers if s.state is not State.UP)
                    waited = f" after {seconds:.0f} s" if deadline.is_over and seconds else ""
                    raise RolloutError(
                        f"{len(up)} of {len(self._servers)} servers are there{waited}, and {num_servers} are needed "
                        f"(--min-servers {self._min_servers}): {down}"
                    )
                self._changed.wait(_POLL_S)

    def _keep(self) -> None:
        """The life of servers that are ours, in a thread of its own."""
        try:
            while not self._closing.wait(_POLL_S):
                for server in self._servers:
                    if not self._closing.is_set():
                        self._look_after(server)
        except Exception as error:
            self._failure = error  # the run learns of it where it waits for servers
            raise

    def _look_after(self, server: Server) -> None:
        """At most one step of what there is to do for `server`; only new weights take long."""
        process = server.process
        assert process is not None
        with self._changed:
            if server.state is State.UP:
                self._check(server, process)
            elif server.state is State.DOWN and server.starts == _MAX_STARTS:
                server.state = State.LOST
                log.warning(
                    "%s is not started again, it died %d times in a row: %s", process.url, _MAX_STARTS, server.why
                )
            elif server.state is State.DOWN:
                server.starts += 1
                process.start()
                server.state, server.deadline = State.STARTING, Deadline(self._start_timeout)
            elif server.state is State.STARTING:
                self._admit(server, process)
            self._changed.notify_all()

    def _check(self, server: Server, process: ServerProcess) -> None:
        """Whether it is alive: its process, and a question to its engine now and then."""
        if process.has_ended:
            self._give_up(server, f"{process.url} has ended ({process.log}: {process.last_words()})")
            return
        if server.probe is None:
            server.probe = self._threads.submit(self._probe, server)
        elif server.probe.done():
            error, server.probe = server.probe.exception(), None
            if isinstance(error, ServerError):
                self._give_up(server, str(error))
            elif error is not None:
                raise error  # as a limit of this process: no server is to blame

    def _probe(self, server: Server) -> None:
        server.client.until(self._closing.is_set).version(timeout=self._sync_timeout)
        self._closing.wait(_PROBE_INTERVAL_S)

    def _admit(self, server: Server, process: ServerProcess) -> None:
        """A server that has started gets the newest weights, if there are any."""
        if process.has_ended or server.deadline.is_over:
            ended = "ended while it started" if process.has_ended else f"was not up in {self._start_timeout:.0f} s"
            server.give_up(f"it {ended} ({process.log}: {process.last_words()})")
            if not self._began:
                server.state = State.LOST
            return
        if self._overtaken.is_set() or not server.client.is_healthy(timeout=_POLL_S):
            return
        server.state = State.UP
        if self._weights is not None:
            try:
                self._update([server], self._bring_and_prove, self._overtaken.is_set)
            except RolloutError as error:  # it is told where the server is missed
                server.give_up(str(error))
                server.state = State.LOST
        if server.state is State.UP:
            log.info("%s is up", process.url)
        elif self._overtaken.is_set():
            server.starts -= 1  # it is not at fault


def _ask(client: VLLMClient, do: Callable[[VLLMClient], object], deadline: Deadline) -> None:
    """What a server that is dying refuses does not count as refused."""
    try:
        do(client)
    except ServerRefusedError as error:
        if not client.is_healthy(timeout=min(_HEALTH_S, deadline.left)):
            raise ServerGoneError(str(error)) from None
        raise
