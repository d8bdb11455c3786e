"""Rewards in the trainer's process: async functions, and functions that a process cannot load."""

import asyncio
import queue
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fsdptrain import platform
from fsdptrain.errors import RolloutError
from fsdptrain.rewards.calls import Call, Outcome, RewardCalls, no_answer, reason
from fsdptrain.rewards.patience import Patience
from fsdptrain.threads import DeadlineError, StepThreads

MAX_CONCURRENT = 64  # async calls of a rank
GRACE_S = 5.0  # for the event loop, which ends late calls itself
_INTERRUPT = signal.SIGVTALRM  # hardly used otherwise; SIGALRM is for the reward itself


class InProcess:
    """Calls one reward, one call at a time: on the main thread if `run` is called there, else in another thread.

    A late call on the main thread, where it may use SIGALRM itself, is interrupted by a signal, again after each
    `timeout`. In another thread it is abandoned. Neither can end C code that holds the GIL.
    """

    def __init__(self, reward: RewardCalls, *, where: str, timeout: float) -> None:
        self.reward = reward
        self.where = where
        self.timeout = timeout
        self._closed = False
        self._deadline = float("inf")  # of the call on the main thread [s, monotonic]
        self._threads = StepThreads(num_threads=1, timeout=timeout, flag="--reward")

    def close(self) -> None:
        self._closed = True

    def run(self, calls: Sequence[Call], patience: Patience) -> list[Outcome]:
        """Score the samples, in order. Raises RolloutError if `patience` ends."""
        outcomes: list[Outcome] = []
        is_main = threading.current_thread() is threading.main_thread()
        for job in self.reward.jobs(range(len(calls))):
            if self._closed:
                raise RolloutError(f"{self.where}: the run has ended")
            samples = [calls[index] for index in job]
            scored = self._on_main_thread(samples) if is_main else self._in_thread(samples)
            if scored is None:
                scored = [no_answer(self.timeout)] * len(job)
                patience.lose(f"{scored[0]} (prompt {samples[0][0].id!r})")
            else:
                patience.answered()
            outcomes += scored
        return outcomes

    def _in_thread(self, samples: Sequence[Call]) -> list[Outcome] | None:
        def score() -> list[Outcome]:
            platform.use_local_device()
            return self.reward.run(samples)

        [scored] = self._threads.run([score])
        if isinstance(scored, DeadlineError):
            return None
        return [reason(scored) for _ in samples] if isinstance(scored, Exception) else scored

    def _on_main_thread(self, samples: Sequence[Call]) -> list[Outcome] | None:
        signal.signal(_INTERRUPT, self._interrupt)
        done, deadline = threading.Event(), time.monotonic() + self.timeout
        watch = partial(_interrupt_until, done, self.timeout, threading.get_ident())
        threading.Thread(target=watch, daemon=True, name="reward timeout").start()
        scored, self._deadline = None, deadline
        try:
            scored = self.reward.run(samples)
            self._deadline = float("inf")
        except DeadlineError:  # raised between calls of user code
            pass
        finally:
            self._deadline = float("inf")
            done.set()
        return scored if time.monotonic() < deadline else None  # it may have caught the interrupt

    def _interrupt(self, *_: object) -> None:
        if time.monotonic() >= self._deadline:  # else the signal is of a call that has just ended
            raise DeadlineError(no_answer(self.timeout))


def _interrupt_until(done: threading.Event, timeout: float, thread: int) -> None:
    while not done.wait(timeout):
        signal.pthread_kill(thread, _INTERRUPT)


class EventLoop:
    """Calls one async reward in an event loop of its own thread, up to `MAX_CONCURRENT` calls at a time.

    The loop lives until `close`, because an HTTP client of the user belongs to one loop. If it is blocked, or a rollout
    fails, the next rollout gets a new one.
    """

    def __init__(self, reward: RewardCalls, *, where: str, timeout: float) -> None:
        self.reward = reward
        self.where = where
        self.timeout = timeout
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._replies = queue.SimpleQueue[tuple[list[int], list[Outcome]] | None]()

    def close(self) -> None:
        """End the loop. A `run` in another thread raises RolloutError."""
        self._closed = True
        self._replies.put(None)
        self._abandon()

    def run(self, calls: Sequence[Call], patience: Patience) -> list[Outcome]:
        """Score the samples, in order. Raises RolloutError if `patience` ends."""
        self._replies = replies = queue.SimpleQueue()
        if self._closed:
            raise RolloutError(f"{self.where}: the run has ended")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), daemon=True, name="async reward").start()
        asyncio.run_coroutine_threadsafe(self._score(calls, replies), self._loop)
        outcomes: dict[int, Outcome] = {}
        try:
            while len(outcomes) < len(calls):
                self._wait(calls, replies, outcomes, patience)
        except BaseException:
            self._abandon()
            raise
        return [outcomes[index] for index in range(len(calls))]

    def _wait(self, calls: Sequence[Call], replies: Any, outcomes: dict[int, Outcome], patience: Patience) -> None:
        """Wait for one call."""
        late = no_answer(self.timeout)
        try:
            reply = replies.get(timeout=self.timeout + GRACE_S)
        except queue.Empty:
            self._abandon()
            late += ", because an async call blocks its event loop"
            left = [index for index in range(len(calls)) if index not in outcomes]
            outcomes |= dict.fromkeys(left, late)
            patience.lose(late)
            return
        if reply is None:
            raise RolloutError(f"{self.where}: the run has ended")
        job, scored = reply
        outcomes |= zip(job, scored, strict=True)
        if scored[0] == late:
            patience.lose(f"{late} (prompt {calls[job[0]][0].id!r})")
        else:
            patience.answered()

    async def _score(self, calls: Sequence[Call], replies: Any) -> None:
        free = asyncio.Semaphore(MAX_CONCURRENT)

        async def score(job: list[int]) -> None:
            async with free:
                task = asyncio.create_task(self._attempt([calls[index] for index in job]))
                done, _ = await asyncio.wait({task}, timeout=self.timeout)
                task.cancel()  # if it is late; not awaited, because it may catch the CancelledError
            replies.put((job, task.result() if done else [no_answer(self.timeout)] * len(job)))

        await asyncio.gather(*map(score, self.reward.jobs(range(len(calls)))))

    async def _attempt(self, samples: Sequence[Call]) -> list[Outcome]:
        try:
            value = await self.reward.call(samples)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  # user code may raise anything
            return [reason(error)] * len(samples)
        return self.reward.outcomes(value, len(samples))

    def _abandon(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_end(), loop)


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
