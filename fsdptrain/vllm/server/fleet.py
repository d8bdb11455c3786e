"""All servers of a run, on rank 0: they switch versions together, and those that the run started are restarted."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, RolloutError
from fsdptrain.vllm.config import DESCRIBE_S, ServerConfig, VllmConfig
from fsdptrain.vllm.server.checks import require_fitting, warn_of_open_servers
from fsdptrain.vllm.server.client import Deadline, ServerError, ServerGoneError, ServerRefusedError, VLLMClient
from fsdptrain.vllm.server.event_loop import race
from fsdptrain.vllm.server.process import ServerProcess
from fsdptrain.vllm.server.push import Weights, push
from fsdptrain.vllm.server.replica import require_weights

log = logging.getLogger(__name__)

_POLL_S = 0.5
_PROBE_EVERY = 10  # polls
_MAX_STARTS = 3  # of one server in a row
_REJOIN_S = 2.0  # for the version of a server that was down
_HEALTH_S = 5.0
_PUSH_SHARE = (
    0.75  # of --weight-sync-timeout; the rest is for the resume, so that a hung server costs the others nothing
)
_NO_WEIGHTS = "default"  # the version of a vLLM server without weights


class State(Enum):
    DOWN = "down"  # a server of the run is restarted, others are not used
    UP = "up"
    LOST = "lost"  # it cannot be started


class _NewWeightsError(Exception):
    """New weights come: the server that is being started would get old ones."""


@dataclass(eq=False)
class Server:
    """One server as rank 0 sees it."""

    client: VLLMClient
    process: ServerProcess | None = None  # None: started by the user
    state: State = State.UP
    why: str = ""  # it is not up
    starts: int = 0  # since it last took part in a weight sync

    def mark_down(self, why: str) -> None:
        self.state, self.why = State.DOWN, why
        if self.process is not None:
            self.process.kill()


class Fleet:
    """Rank 0's view of the servers. All methods run on the engine's event loop."""

    def __init__(self, servers: Sequence[Server], config: Config) -> None:
        self._servers = list(servers)
        self._config = config
        self._options = config.section(ServerConfig)
        self._keep_requests = config.sync.max_staleness > 0  # running requests continue after a weight sync
        self._weights: Weights | None = None
        self._new_weights = asyncio.Event()  # set when `_weights` are replaced
        self._all_started = False
        self._supervisors: list[asyncio.Task[None]] = []
        self.sent_bytes = 0  # most that a server has read or received in the last weight sync

    async def start(self) -> None:
        """Check the servers of the user; start those of the run and wait until all are up.

        ConfigError if too few can be reached, or one has other options. RolloutError with the log of one that fails.
        """
        await self._check_given([server for server in self._servers if server.process is None])
        for server in self._servers:
            if server.process is not None:
                server.state = State.DOWN
                self._supervisors.append(asyncio.create_task(self._supervise(server, server.process)))
        if self._supervisors:
            await self.wait_for(len(self._servers), self._options.server_start_timeout)
        self._all_started = True

    async def forget_weights(self) -> None:
        """Their files may be deleted: servers that start from now on wait for the next weights.

        A server that is loading the old ones is not waited for, but restarted.
        """
        self._weights = None
        self._new_weights.set()
        self._new_weights = asyncio.Event()

    async def switch(self, weights: Weights) -> list[str]:
        """Push `weights` to all servers; the URLs of those that hold them. None resumes before all have switched.

        A server that dies or is silent is left out. One that answers, but did not switch, is a RolloutError.
        """
        await self.forget_weights()
        self._weights = weights
        await self._let_rejoin()
        servers = [server for server in self._servers if server.state is State.UP]
        for server in servers:
            server.starts = 0
        timeout = self._options.weight_sync_timeout
        push_by, resume_by = Deadline(_PUSH_SHARE * timeout), Deadline(timeout)
        self.sent_bytes = 0

        async def push_one(client: VLLMClient) -> None:
            transfer, keep = self._options.weight_transfer, self._keep_requests
            nbytes = await push(client, weights, push_by, transfer=transfer, keep_requests=keep)
            self.sent_bytes = max(self.sent_bytes, nbytes)

        refused = await self._for_each(servers, push_one, resume_by)
        if refused:
            switched = [server.client.url for server in servers if server.state is State.UP and server not in refused]
            raise RolloutError(
                f"not all servers took the new weights: {'; '.join(refused.values())}; switched, but not used: "
                f"{', '.join(switched) or 'none'}"
            )
        up = [server for server in servers if server.state is State.UP]
        refused = await self._for_each(up, lambda client: client.post("/resume", timeout=resume_by.left), resume_by)
        if refused:
            raise RolloutError(f"servers did not resume with the new weights: {'; '.join(refused.values())}")
        return await self.wait_for(self._options.min_servers, self._options.server_start_timeout + timeout)

    def raise_if_unrecoverable(self) -> None:
        """RolloutError if --min-servers servers will never be up again."""
        for task in self._supervisors:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise RolloutError(f"a server could not be supervised: {task.exception()}") from task.exception()
        if not self._can_reach(self._options.min_servers):
            raise self._too_few(self._options.min_servers, "")

    async def wait_for(self, num_servers: int, seconds: float) -> list[str]:
        """The URLs of the servers that are up, once there are `num_servers`. RolloutError after `seconds`, or as soon
        as there can never be so many."""
        deadline = Deadline(seconds)
        while True:
            self.raise_if_unrecoverable()
            up = [server.client.url for server in self._servers if server.state is State.UP]
            if len(up) >= num_servers:
                return up
            if deadline.is_over or not self._can_reach(num_servers):
                raise self._too_few(num_servers, f" after {seconds:.0f} s" if deadline.is_over else "")
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        processes = [server.process for server in self._servers if server.process is not None]
        await asyncio.gather(*(asyncio.to_thread(process.close) for process in processes))

    def _can_reach(self, num_servers: int) -> bool:
        usable = [s for s in self._servers if s.state is State.UP or (s.process and s.state is State.DOWN)]
        return len(usable) >= num_servers

    def _too_few(self, num_servers: int, waited: str) -> RolloutError:
        down = [server for server in self._servers if server.state is not State.UP]
        return RolloutError(
            f"{len(self._servers) - len(down)} of {len(self._servers)} servers are up{waited}, and {num_servers} are "
            f"needed (--min-servers {self._options.min_servers}): {'; '.join(f'{s.client.url}: {s.why}' for s in down)}"
        )

    async def _for_each(
        self, servers: Sequence[Server], do: Callable[[VLLMClient], Awaitable[object]], deadline: Deadline
    ) -> dict[Server, str]:
        """Run `do` for all servers at the same time. Marks dead ones as down; returns the errors of the others."""
        results = await asyncio.gather(
            *(_unless_dying(server.client, do, deadline) for server in servers), return_exceptions=True
        )
        refused = {}
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, ServerGoneError):
                self._mark_down(server, str(result))
            elif isinstance(result, ServerRefusedError):
                refused[server] = str(result)
            elif isinstance(result, BaseException):
                raise result
        return refused

    def _mark_down(self, server: Server, why: str) -> None:
        log.warning("%s; %s", why, "restarting it" if server.process else "continuing without it")
        server.mark_down(why)

    async def _check_given(self, servers: Sequence[Server]) -> None:
        """Mark servers that cannot be reached as down."""
        checks = (require_fitting(server.client, DESCRIBE_S, self._config) for server in servers)
        urls: dict[str, str] = {}  # by instance
        for server, found in zip(servers, await asyncio.gather(*checks, return_exceptions=True), strict=True):
            url = server.client.url
            if isinstance(found, ServerGoneError):
                server.mark_down(str(found))
            elif isinstance(found, BaseException):
                raise found
            elif urls.setdefault(found, url) != url:
                raise ConfigError(f"--rollout-urls: {urls[found]} and {url} are the same server: give one of them")
        down = [server for server in servers if server.state is not State.UP]
        if len(servers) - len(down) < self._options.min_servers and servers:
            raise ConfigError(
                f"--rollout-urls: {'; '.join(server.why for server in down)}; is it a vLLM server that was started "
                f"with VLLM_SERVER_DEV_MODE=1? --min-servers is {self._options.min_servers}"
            )
        for server in down:
            log.warning("%s; starting without it", server.why)
        if not self._config.section(VllmConfig).allow_public_servers:
            await warn_of_open_servers([server.client for server in servers if server.state is State.UP])

    async def _let_rejoin(self) -> None:
        """Use servers of the user again that were restarted since they went down: they have no weights yet.

        One that has weights may have half of an update.
        """
        down = [server for server in self._servers if server.process is None and server.state is State.DOWN]
        results = await asyncio.gather(*(self._is_new(server.client) for server in down), return_exceptions=True)
        for server, result in zip(down, results, strict=True):
            if isinstance(result, ConfigError):
                server.why = str(result)
                log.warning("%s; continuing without it", result)
            elif isinstance(result, BaseException) and not isinstance(result, ServerError):
                raise result
            elif result is True:
                log.info("%s is back", server.client.url)
                server.state = State.UP

    async def _is_new(self, client: VLLMClient) -> bool:
        deadline = Deadline(min(DESCRIBE_S, self._options.weight_sync_timeout))
        if await client.version(timeout=min(_REJOIN_S, deadline.left)) != _NO_WEIGHTS:
            return False
        await require_fitting(client, deadline.left, self._config)
        return True

    async def _supervise(self, server: Server, process: ServerProcess) -> None:
        """Start a server of the run, and restart it when it dies."""
        while server.starts < _MAX_STARTS:
            server.starts += 1
            process.start()
            try:
                await self._bring_up(server, process)
                await self._watch(server, process)
            except _NewWeightsError:
                server.starts -= 1  # not its fault
            except ServerGoneError as error:
                server.why = str(error)
                if not self._all_started:
                    break
            except ServerRefusedError as error:
                server.why = str(error)
                break
            await asyncio.to_thread(process.end)
        server.state = State.LOST
        process.kill()
        if self._all_started:  # else the start of the fleet raises the same error
            log.warning("%s is not restarted after %d starts: %s", process.url, server.starts, server.why)

    async def _bring_up(self, server: Server, process: ServerProcess) -> None:
        """Wait until a started server is healthy, and give it the newest weights, if there are any."""
        deadline = Deadline(self._options.server_start_timeout)
        late = f"was not up in {deadline.seconds:.0f} s"
        while not await server.client.is_healthy(timeout=_HEALTH_S):
            if process.has_ended or deadline.is_over:
                what = "ended during its start" if process.has_ended else late
                raise ServerGoneError(f"it {what} ({process.log}: {process.last_words()})")
            await asyncio.sleep(_POLL_S)
        weights, new_weights = self._weights, self._new_weights
        if weights is not None:
            await race(self._restore(server.client, weights), new_weights, _NewWeightsError())
        server.state = State.UP
        log.info("%s is up", process.url)

    async def _restore(self, client: VLLMClient, weights: Weights) -> None:
        """By file whatever --weight-transfer is: a server of the run is on this machine."""
        timeout = self._options.weight_sync_timeout
        push_by, deadline = Deadline(_PUSH_SHARE * timeout), Deadline(timeout)

        async def restore(client: VLLMClient) -> None:
            await push(client, weights, push_by, keep_requests=self._keep_requests)
            if self._config.run.verify_weight_sync:
                await require_weights(client, weights, push_by)
            await client.post("/resume", timeout=deadline.left)

        await _unless_dying(client, restore, deadline)

    async def _watch(self, server: Server, process: ServerProcess) -> None:
        """Return when the server is down: its process has ended, its engine is silent, or a weight sync failed."""
        num_polls = 0
        while server.state is State.UP:
            problem = ""
            try:
                if num_polls % _PROBE_EVERY == 0:
                    await server.client.version(timeout=self._options.weight_sync_timeout)
            except ServerError as error:
                problem = str(error)
            num_polls += 1
            await asyncio.sleep(_POLL_S)
            if process.has_ended:
                problem = f"{process.url} has ended ({process.log}: {process.last_words()})"
            if problem and server.state is State.UP:
                self._mark_down(server, problem)


async def _unless_dying(client: VLLMClient, do: Callable[[VLLMClient], Awaitable[object]], deadline: Deadline) -> None:
    """Run `do`. A refusal by a server that is not healthy counts as a dead server."""
    try:
        await do(client)
    except ServerRefusedError as error:
        if not await client.is_healthy(timeout=min(_HEALTH_S, deadline.left)):
            raise ServerGoneError(str(error)) from None
        raise
