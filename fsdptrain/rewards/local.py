"""Rewards in the trainer's process: async functions, and functions that a process cannot load."""

import asyncio
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait

from fsdptrain import platform
from fsdptrain.errors import RolloutError
from fsdptrain.rewards.calls import Call, Outcome, RewardCalls, reason
from fsdptrain.rewards.patience import Patience
from fsdptrain.threads import DeadlineError, StepThreads

MAX_CONCURRENT = 64  # async calls of a rank
GRACE_S = 5.0  # for the event loop, which ends late calls itself
_INTERRUPT = signal.SIGVTALRM  # hardly used otherwise; SIGALRM is for the reward itself


class InProcess:
    """Calls one reward, one call at a time: on the main thread if `run` is called there, else in another thread.

    A late call on the main thread, where it may use SIGALRM itself, is interrupted by a signal, again after each
    timeout. In another thread it is abandoned. Neither can end C code that holds the GIL.
    """

    def __init__(self, reward: RewardCalls) -> None:
        self.reward = reward
        self._closed = False
        self._threads = StepThreads(num_threads=1, timeout=reward.timeout, flag="--reward")

    def close(self) -> None:
        self._closed = True

    def run(self, calls: Sequence[Call], patience: Patience) -> list[Outcome]:
        """Score the samples, in order. Raises RolloutError if `patience` ends."""
        outcomes: list[Outcome] = []
        is_main = threading.current_thread() is threading.main_thread()
        for job in self.reward.jobs(range(len(calls))):
            if self._closed:
                raise RolloutError(f"{self.reward.where}: the run has ended")
            samples = [calls[index] for index in job]
            start = time.monotonic()
            scored = self._on_main_thread(samples) if is_main else self._in_thread(samples)
            patience.record(samples, scored, self.reward.late, time.monotonic() - start)
            outcomes += scored or [self.reward.late] * len(job)
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
        done, deadline = threading.Event(), time.monotonic() + self.reward.timeout

        def interrupt(*_: object) -> None:
            if not done.is_set() and time.monotonic() >= deadline:  # else the signal is of an earlier call
                raise DeadlineError

        def watch(thread: int = threading.get_ident()) -> None:
            while not done.wait(self.reward.timeout):
                signal.pthread_kill(thread, _INTERRUPT)

        signal.signal(_INTERRUPT, interrupt)
        threading.Thread(target=watch, daemon=True, name="reward timeout").start()
        scored = None
        try:
            scored = self.reward.run(samples)
            done.set()
        except DeadlineError:  # raised between calls of user code
            pass
        finally:
            done.set()
        return scored if time.monotonic() < deadline else None  # it may have caught the interrupt


class EventLoop:
    """Calls one async reward in an event loop of its own thread, up to `MAX_CONCURRENT` calls at a time.

    The loop lives until `close`, because an HTTP client of the user belongs to one loop. If it is blocked, or a rollout
    fails, the next rollout gets a new one.
    """

    def __init__(self, reward: RewardCalls) -> None:
        self.reward = reward
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rollout: Future[None] | None = None
        self._changing = threading.RLock()

    def close(self) -> None:
        """End the loop. A `run` in another thread raises RolloutError."""
        with self._changing:
            self._closed = True
            if self._rollout is not None:
                self._rollout.cancel()
            self._abandon()

    def run(self, calls: Sequence[Call], patience: Patience) -> list[Outcome]:
        """Score the samples, in order. Raises RolloutError if `patience` ends."""
        outcomes: dict[int, Outcome] = {}
        with self._changing:
            if self._closed:
                raise RolloutError(f"{self.reward.where}: the run has ended")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), daemon=True, name="async reward").start()
            rollout = asyncio.run_coroutine_threadsafe(self._score(calls, outcomes, patience), self._loop)
            self._rollout = rollout
        try:
            while not rollout.done():
                num_scored = len(outcomes)
                wait([rollout], self.reward.timeout + GRACE_S)
                if len(outcomes) == num_scored and not rollout.done():
                    return self._give_up(calls, dict(outcomes), patience)
            rollout.result()
        except BaseException as error:
            self._abandon()
            if isinstance(error, CancelledError):
                raise RolloutError(f"{self.reward.where}: the run has ended") from error
            raise
        return [outcomes[index] for index in range(len(calls))]

    def _give_up(self, calls: Sequence[Call], outcomes: Mapping[int, Outcome], patience: Patience) -> list[Outcome]:
        self._abandon()
        reason = f"{self.reward.late}, because an async call blocks its event loop"
        patience.lose(reason, self.reward.timeout + GRACE_S)
        return [outcomes.get(index, reason) for index in range(len(calls))]

    async def _score(self, calls: Sequence[Call], outcomes: dict[int, Outcome], patience: Patience) -> None:
        free = asyncio.Semaphore(MAX_CONCURRENT)

        async def score(job: list[int]) -> None:
            samples = [calls[index] for index in job]
            async with free:
                task = asyncio.create_task(self._attempt(samples))
                done, _ = await asyncio.wait({task}, timeout=self.reward.timeout)
                task.cancel()  # if it is late; not awaited, because it may catch the CancelledError
            scored = task.result() if done else None
            patience.record(samples, scored, self.reward.late, self.reward.timeout / MAX_CONCURRENT)
            outcomes.update(zip(job, scored or [self.reward.late] * len(job), strict=True))

        await asyncio.gather(*map(score, self.reward.jobs(range(len(calls)))))

    async def _attempt(self, samples: Sequence[Call]) -> list[Outcome]:
        try:
            value = await self.reward.call(samples)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  # user code may raise anything
            return [reason(error)] * len(samples)
        return self.reward.outcomes(value, len(samples))

    def _abandon(self) -> None:
        with self._changing:
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
