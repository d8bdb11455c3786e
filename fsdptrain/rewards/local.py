"""Rewards in the trainer's process: async functions, and functions that a process cannot load."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from fsdptrain import platform
from fsdptrain.errors import RolloutError
from fsdptrain.rewards.calls import Call, Outcome, RewardCalls, reason
from fsdptrain.threads import DeadlineError, StepThreads

MAX_CONCURRENT = 64  # async calls of a rank


class InThread:
    """Calls one reward in a thread, one call at a time. A late call is abandoned; one that holds the GIL blocks all."""

    num_calls = 1
    grace = 0.0

    def __init__(self, reward: RewardCalls) -> None:
        self.reward = reward
        self._closed = False
        self._calling = threading.Lock()
        self._threads = StepThreads(num_threads=1, timeout=reward.timeout, flag="--reward")

    def schedule(self, calls: Sequence[Call]) -> Future[list[Outcome]]:
        """Return a future that is done."""

        def score() -> list[Outcome]:
            platform.use_local_device()
            return self.reward.run(calls)

        future: Future[list[Outcome]] = Future()
        with self._calling:
            if self._closed:
                raise RolloutError(f"{self.reward.where}: the run has ended")
            [scored] = self._threads.run([score])
        if isinstance(scored, Exception):
            future.set_result([self.reward.late if isinstance(scored, DeadlineError) else reason(scored)] * len(calls))
        else:
            future.set_result(scored)
        return future

    def abandon(self) -> None: ...

    def close(self) -> None:
        self._closed = True


class EventLoop:
    """Calls one async reward in an event loop of its own thread, up to `MAX_CONCURRENT` calls at a time.

    The loop lives until `close`, because an HTTP client of the user belongs to one loop.
    """

    num_calls = MAX_CONCURRENT
    grace = 5.0  # for the event loop, which ends late calls itself

    def __init__(self, reward: RewardCalls) -> None:
        self.reward = reward
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changing = threading.Lock()

    def schedule(self, calls: Sequence[Call]) -> Future[list[Outcome]]:
        with self._changing:
            if self._closed:
                raise RolloutError(f"{self.reward.where}: the run has ended")
            if self._loop is None:
                self._loop, self._free = asyncio.new_event_loop(), asyncio.Semaphore(MAX_CONCURRENT)
                threading.Thread(target=_run_loop, args=(self._loop,), daemon=True, name="async reward").start()
            return asyncio.run_coroutine_threadsafe(self._score(calls, self._free), self._loop)

    def abandon(self) -> None:
        """Cancel all calls. The next one gets a new event loop."""
        with self._changing:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_end(), loop)

    def close(self) -> None:
        self._closed = True
        self.abandon()

    async def _score(self, calls: Sequence[Call], free: asyncio.Semaphore) -> list[Outcome]:
        async with free:
            task = asyncio.create_task(self._attempt(calls))
            done, _ = await asyncio.wait({task}, timeout=self.reward.timeout)
            task.cancel()  # if it is late; not awaited, because it may catch the CancelledError
            return task.result() if done else [self.reward.late] * len(calls)

    async def _attempt(self, calls: Sequence[Call]) -> list[Outcome]:
        try:
            value = await self.reward.call(calls)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  # user code may raise anything
            return [reason(error)] * len(calls)
        return self.reward.outcomes(value, len(calls))


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    platform.use_local_device()
    loop.run_forever()
    loop.close()


async def _end() -> None:
    """Cancel the calls of the current event loop and stop it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
